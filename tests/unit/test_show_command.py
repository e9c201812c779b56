"""`hotcold show`: its figures beside transformers' and the files' own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.commands import run_main
from tests.tiny_checkpoint import TinyCheckpoint


def shown(*arguments: object) -> tuple[dict[str, Any], str]:
    done = run_main("show", *arguments, "--json")
    return done.report, done.out


def test_the_demo_model() -> None:
    facts, text = shown()
    assert (facts["family"], facts["mode"]) == ("llama", "exact")
    assert facts["predictors"] == ["sign", "lowrank"]
    assert 0.02 < facts["firing_share"] < 0.2
    assert f"{facts['firing_share']:.1%} of neurons fire" in text
    assert "4 layers of d 384" in text and "--mode sign or --mode lowrank" in text
    assert facts["quantized_bytes"]["q4"] < facts["quantized_bytes"]["q8"] < facts["weight_bytes"]


@pytest.mark.parametrize("variant", ["opt-prenorm", "gemma2", "nemotron"])
def test_sizes_are_transformers(variant: str, tiny: Callable[..., TinyCheckpoint]) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny(variant).path
    facts, text = shown(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert facts["num_parameters"] == model.num_parameters()
    assert sum(facts["stored_bytes"].values()) >= 4 * facts["num_parameters"]
    assert facts["is_sparse"] == (variant != "gemma2")
    assert ("as was published" in text) == (variant == "opt-prenorm")
    assert ("dense: no activation is exactly zero" in text) == (facts["mode"] == "dense")


@pytest.mark.parametrize(
    ("variant", "experts", "words"),
    [
        ("qwen2-moe", (7, 3, 24, 36, 0), "and one of 36 that all tokens share"),
        ("qwen3-moe-dense", (7, 3, 24, 0, 1), "1 layer has an FFN of 40"),
        ("gpt-oss", (5, 3, 40, 0, 0), "5 of 40 neurons a layer, of which a token chooses 3"),
    ],
)
def test_a_mixture(
    variant: str, experts: tuple[int, ...], words: str, tiny: Callable[..., TinyCheckpoint]
) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny(variant).path
    facts, text = shown(path)
    assert tuple(facts["experts"].values())[:5] == experts
    model = AutoModelForCausalLM.from_pretrained(path)
    total = sum(weight.numel() for weight in model.parameters())
    buffers = sum(b.numel() for n, b in model.named_buffers() if n.endswith("correction_bias"))
    assert facts["num_parameters"] == total + buffers
    num_experts, chosen, size = experts[:3]
    layers = model.config.num_hidden_layers - experts[4]
    biases = 2 * size + 48 if variant == "gpt-oss" else 0
    left_out = layers * (num_experts - chosen) * (3 * size * 48 + biases)
    assert facts["num_active_parameters"] == total + buffers - left_out
    assert words in text and "of which a token takes" in text
    assert "within them no activation is exactly zero" in text and facts["mode"] == "dense"


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ("smallthinker", "about 40% of their neurons fire, as was published"),
        ("turbosparse-mixtral", "40.0% of the neurons, and predictors in them leave out more"),
    ],
)
def test_sparse_experts(variant: str, words: str, tiny: Callable[..., TinyCheckpoint]) -> None:
    facts, text = shown(tiny(variant).path)
    assert words in text and facts["mode"] == "exact"


def test_what_is_no_model(tmp_path: Path) -> None:
    assert str(tmp_path) in run_main("show", tmp_path).refusal


def test_a_random_models_own_density_is_shown(tmp_path: Path) -> None:
    """Not what was published of models of its kind."""
    line = ["make-model", "--density", "0.2", tmp_path / "model", "--json"]
    made = run_main(*line).report["density"]
    facts, text = shown(tmp_path / "model")
    assert facts["published_share"] == pytest.approx(made, abs=1e-4)
    assert f"about {made:.0%} of neurons fire, as its config.json says" in text
    assert "is not empty" in run_main(*line).refusal
