"""Benchmarks' tables say what their reports say; the text to profile the demo model on is fair."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.driver.text.prompts import Prompts
from jobs.demo.corpus import HELD_OUT_MODULES, stdlib_entries
from jobs.demo.text import mixed, write_demo_text
from jobs.support.text_file import read_text_ids
from model.config.build import read_config
from model.errors import UsageError
from model.files.locate import DEMO_DIRECTORY
from tests.benchmark_programs import rows_of, table_of

NUM_TOKENS = 12_000


def _plan_round(planned: float, measured: float, ffn_ms: float) -> dict[str, Any]:
    names = ("attention", "attention", "head", "neurons", "exchanges")
    parts = [{"name": name, "ms": ms} for name, ms in zip(names, (1, 2, 4, 8, 16), strict=True)]
    ms = {"attention": 5.0, "head": 6.0, "ffn": ffn_ms, "predictor": 0.0, "exchange": 8.0}
    return {
        "planned": {"tokens_per_s": planned, "token_s": 0.031, "parts": parts},
        "measured": {
            "tokens_per_s": measured,
            "per_token_ms": ms | {"python": 0.5, "total": 30.0},
        },
    }


def test_plan_table_takes_the_median_of_ratios_and_adds_up_parts(tmp_path: Path) -> None:
    rounds = [_plan_round(10, 20, 7.0), _plan_round(30, 20, 9.0), _plan_round(30, 30, 10.0)]
    case = {"shape_name": "llama-7b", "density": 0.1, "rounds": rounds}
    table = table_of("plan_accuracy", {"layers": 8, "cases": [case]}, tmp_path)
    speeds, parts = rows_of(table)
    assert speeds == ["llama-7b, 10.0%", "30.00", "20.00", "1.00 (0.50 to 1.50)"]
    assert parts == ["llama-7b", "3.00 / 5.00", "4.00 / 6.00", "8.00 / 9.00", "16.00 / 8.00",
                     "0.00 / 0.50", "31.00 / 30.00"]  # fmt: skip


def _variant(
    title: str, ppl: float, right: int, speeds: tuple[float, float, float], **scores: Any
) -> dict[str, Any]:
    scored = {"ppl": ppl, "ppl_dense": 100.0, "mean_kld": 0.0125, "same_top_p": 0.975}
    sizes = {"tokens": 512, "windows": 2, "context_window": 512, "recall": None}
    return {
        "title": title,
        "mode": title.split()[0],
        "training": None,
        "perplexity": scored | sizes | {"neurons_computed": None} | scores,
        "decode": [{"tokens_per_s": speed} for speed in speeds],
        "answers": {"asked": 5, "right": right},
    }


def test_demo_table_compares_with_dense_and_exact(tmp_path: Path) -> None:
    found = {"recall": [0.94, None, 0.97], "neurons_computed": 0.25}
    sign = _variant("sign 0.95", 110.0, 3, (800, 1200, 900), **found)
    sign["training"] = {"bytes": [500_000, 750_000]}
    dense = _variant("dense", 100.0, 5, (200, 150, 100), ppl_dense=None)
    variants = [dense, _variant("exact", 99.9999, 5, (400, 300, 600)), sign]
    table = table_of("demo_modes", {"profile_tokens": 9, "variants": variants}, tmp_path)
    assert rows_of(table) == [
        ["dense", "", "", "", "", "100%", "", "150", "0.50", "5"],
        ["exact", "+0.00%", "0.013", "97.5%", "", "100%", "", "400", "1.00", "5"],
        ["sign 0.95", "+10.00%", "0.013", "97.5%", "94.0%", "25.0%", "1.25", "900", "2.00", "3"],
    ]
    assert "right answers of 5" in table and "dense on held-out text: 100.00" in table


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of the demo's text; that it has the tokens asked for is checked on the way."""
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    num_documents, num_tokens = write_demo_text(file, NUM_TOKENS)
    found = _ids(file)
    assert found.num_documents == num_documents
    assert abs(found.ids.size - num_tokens) <= 1  # the last text is followed by no eos
    assert NUM_TOKENS <= num_tokens < NUM_TOKENS * 1.1
    return file.read_text().splitlines()


def _ids(file: Path) -> Any:
    return read_text_ids(file, Prompts(DEMO_DIRECTORY, read_config(DEMO_DIRECTORY),
                                       512))  # fmt: skip


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_every_beginning_is_half_questions(
    documents: list[str], share: float, tmp_path: Path
) -> None:
    first = documents[: int(len(documents) * share)]
    sizes = []
    for key in ("text", "messages"):
        file = tmp_path / f"{key}.jsonl"
        file.write_text("\n".join(line for line in first if key in json.loads(line)))
        sizes.append(_ids(file).ids.size)
    assert 0.4 < sizes[1] / sum(sizes) < 0.6


def test_a_shorter_text_is_the_beginning_of_a_longer_one(
    documents: list[str], tmp_path: Path
) -> None:
    write_demo_text(tmp_path / "text.jsonl", NUM_TOKENS // 4)
    shorter = (tmp_path / "text.jsonl").read_text().splitlines()
    assert 10 < len(shorter) < len(documents)
    assert shorter == documents[: len(shorter)]


def test_held_out_modules_are_in_no_document(documents: list[str]) -> None:
    held_out = {entry.name for entry in stdlib_entries() if entry.module in HELD_OUT_MODULES}
    read = [json.loads(line) for line in documents]
    lines = {line for each in read for line in each.get("text", "").splitlines()}
    asked = {
        word.strip("?.")
        for each in read
        for word in (each["messages"][0]["content"].split() if "messages" in each else [])
    }
    assert {"tarfile.open", "fractions.Fraction"} & held_out
    assert not {name for name in held_out if "." in name} & (lines | asked)


def test_more_tokens_than_there_are_are_refused() -> None:
    kinds: list[list[Any]] = [[({"text": "a"}, 3)] * 4, [({"text": "b"}, 2)] * 2]
    assert [size for _, size in mixed(kinds, 8)] == [3, 2, 2, 3]
    with pytest.raises(UsageError, match="--tokens is 20"):
        mixed(kinds, 20)
