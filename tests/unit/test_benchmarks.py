"""Benchmarks' tables say what their reports say."""

import json
from pathlib import Path
from typing import Any

from tests.benchmark_programs import error_of, rows_of, run_benchmark, table_of
from tests.documents import ROOT


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


def test_quality_table_has_a_row_for_each_model_format_and_mode(tmp_path: Path) -> None:
    row = {"format": "q4", "mode": "threshold", "ffn_bytes_share": 0.804, "ppl": 12.345}
    row |= {"mean_kld": 0.29161, "same_top": 0.7514, "right": 21}
    dense = row | {"mode": "dense", "ffn_bytes_share": 1.0, "mean_kld": 0.0}
    model = {"model": "small", "questions": 40, "rows": [dense, row]}
    report = {"machine": "a machine", "date": "a day", "python": "3.1", "models": [model]}
    assert rows_of(table_of("quality", report, tmp_path)) == [
        ["small", "q4", "`dense`", "100%", "12.35", "0.0000", "75.1%", "21 of 40"],
        ["small", "q4", "`threshold`", "80%", "12.35", "0.2916", "75.1%", "21 of 40"],
    ]


def test_the_quiz_asks_each_question_once() -> None:
    lines = (ROOT / "benchmarks" / "questions.jsonl").read_text().splitlines()
    quiz = [json.loads(line) for line in lines]
    assert 30 <= len({each["question"] for each in quiz}) == len(quiz) <= 50
    assert all(each["answers"] and each["question"].endswith("?") for each in quiz)


def test_memory_table_says_the_greatest_total_with_others_pages_too(tmp_path: Path) -> None:
    gib, mib = 1 << 30, 1 << 20
    peak = {"total": 3 * gib, "resident": 2 * gib, "page_cache": 512 * mib, "after_s": 70.4}
    requests = {"answers": 7, "cancelled": 2}
    run = {"promised": 4 * gib, "requests": requests, "peak": peak | {"others": 256 * mib}}
    table = table_of("storage_memory", {"minutes": 20, "mode": "sign", "runs": [run]}, tmp_path)
    assert rows_of(table) == [
        ["4.00", "7 answers, 2 cancelled", "3.000", "0.750", "256", "0.812", "2.000", "512", "70"]
    ]


def test_a_disk_that_cannot_be_limited_is_no_run_without_a_limit(tmp_path: Path) -> None:
    said = run_benchmark("limited_run", "--disk", "1GB", "--file", "/proc/self/stat", "--", "true")
    assert "cannot be limited" in error_of(said)
    asked = run_benchmark("limited_run", "--disk", "1GB", "--", "true")
    assert "--disk needs a --file" in error_of(asked)


def test_a_plot_of_storage_has_the_reports_speeds(tmp_path: Path) -> None:
    picture = tmp_path / "speed.svg"
    report = ROOT / "benchmarks/results/storage-32-layers.md"
    assert run_benchmark("storage_plot", report, picture).status == 0
    drawn = picture.read_text()
    assert "tokens/s" in drawn and "llama.cpp" in drawn and "planned" in drawn
