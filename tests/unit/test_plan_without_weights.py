"""`hotcold plan` of a model that is not here: a named shape or a config.json, a stated sparsity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotcold.model.synthetic.shape import DTYPES, SHAPES, config_json
from tests.documents import ROOT
from tests.e2e.commands import run_main

HERE = str(ROOT / "benchmarks/machines/pc-high.json")


def planned(*arguments: str) -> dict[str, Any]:
    done = run_main("plan", *arguments, "--context", "128", "--json")
    return done.report | {"said": done.out}


def refusal(*arguments: str) -> str:
    return run_main("plan", *arguments).refusal


def test_a_shape_alone_is_planned() -> None:
    arguments = ("--shape", "llama-7b", "--machine", HERE, "--gpu-memory", "2GiB")
    exact = planned(*arguments, "--density", "0.1")
    assert exact["path"] is None
    assert "no plan file: the model's weights are not here" in exact["said"]
    assumed = "\n".join(exact["assumed"])
    for words in ("0.1 of the neurons fire", "(--density)", "description", "half full"):
        assert words in assumed
    weights = sum(device["used_bytes"] for device in exact["devices"])
    assert weights == pytest.approx(13.2e9, rel=0.02)  # 6.6 G weights in float16
    lowrank = planned(*arguments, "--density", "0.1", "--mode", "lowrank")
    q4 = planned(*arguments, "--density", "0.1", "--dtype", "q4")
    speeds = [each["tokens_per_s"] for each in (exact, lowrank)]
    assert speeds == sorted(speeds)
    assert q4["tokens_per_s"] > 2 * exact["tokens_per_s"]
    assert any("as on random weights" in text for text in lowrank["assumed"])


def test_what_was_published_is_used() -> None:
    report = planned("--shape", "tiny", "--machine", HERE)
    assert any("0.3 of the neurons" in each and "published" in each for each in report["assumed"])
    assert "state a share" in refusal("--shape", "afm-4.5b", "--machine", HERE)
    silu = planned("--shape", "qwen3-8b", "--machine", HERE)
    assert any("every neuron fires" in each for each in silu["assumed"])


def test_a_config_alone_is_planned(tmp_path: Path) -> None:
    text = json.dumps(config_json(SHAPES["tiny"], DTYPES["bf16"]))
    (tmp_path / "config.json").write_text(text)
    found = [
        planned("--config", str(source), "--machine", HERE)["tokens_per_s"]
        for source in (tmp_path, tmp_path / "config.json")
    ]
    assert found[0] == found[1] > 0
    assert "give a config.json" in refusal("--config", "nothing", "--machine", HERE)
    assert "each name a model" in refusal("--config", str(tmp_path), "--shape", "tiny")


def test_a_shape_larger_than_memory_is_planned_from_storage() -> None:
    """As a model that is here is: what stays in memory, by size, and what a token reads."""
    arguments = ("--shape", "llama-7b", "--gpu-memory", "2GiB", "--machine", HERE)
    report = planned(*arguments, "--cpu-memory", "8GiB")
    sizes = report["storage"]
    assert all(size["num_on_gpu"] > 0 for size in sizes)
    speeds = [size["tokens_per_s"] for size in sizes]
    assert speeds == sorted(speeds) and len(speeds) == 5
    assert "--cpu-memory 8.00GiB: " in report["said"]
    assert "with --dtype q8 all of it fits in memory" in report["said"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--shape", "none"), "known are tiny"),
        (("--shape", "tiny", "--out", "x"), "--out writes a plan"),
        (("--shape", "tiny", "--profile", "x"), "--profile is of a model"),
        (
            ("--shape", "llama-13b", "--gpu-memory", "0", "--cpu-memory", "10GB", "--context=64"),
            "or --dtype q4_1, which fits",
        ),
        (("--density", "0.1"), "--density states what is not known"),
    ],
)
def test_what_cannot_be_planned(arguments: tuple[str, ...], says: str) -> None:
    assert says in refusal(*arguments, "--machine", HERE)
