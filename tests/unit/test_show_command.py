"""`hotcold show`: its figures beside transformers' and the files' own."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from hotcold.jobs.cli import main
from tests.tiny_checkpoint import TinyCheckpoint


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict, str]:
    assert main(["show", *arguments, "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return json.loads(last), "\n".join(lines)


def test_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    facts, text = shown(capsys)
    assert (facts["family"], facts["mode"]) == ("llama", "exact")
    assert facts["predictors"] == ["sign", "lowrank"]
    assert 0.02 < facts["firing_share"] < 0.2
    assert f"{facts['firing_share']:.1%} of neurons fire" in text
    assert "4 layers of d 384" in text and "--mode sign or --mode lowrank" in text
    assert facts["quantized_bytes"]["q4"] < facts["quantized_bytes"]["q8"] < facts["weight_bytes"]


@pytest.mark.parametrize(
    "variant", ["llama-tied", "opt-prenorm", "falcon-relu", "gemma2", "nemotron"]
)
def test_sizes_are_transformers(
    variant: str, tiny: Callable[..., TinyCheckpoint], capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny(variant).path
    facts, text = shown(capsys, str(path))
    model = AutoModelForCausalLM.from_pretrained(path)
    assert facts["num_parameters"] == model.num_parameters()
    assert sum(facts["stored_bytes"].values()) >= 4 * facts["num_parameters"]
    assert facts["is_sparse"] == (variant != "gemma2")
    assert ("as was published" in text) == (variant in ("llama-tied", "opt-prenorm", "falcon-relu"))
    assert ("dense: no activation is exactly zero" in text) == (facts["mode"] == "dense")


def test_what_is_no_model(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
