"""A mixture of experts as a user meets it: profile, plan, generate with both, what is refused."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from hotcold.model.config.build import read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.placement.profile import rates_of, read_profile
from tests.e2e.commands import run_here, run_main
from tests.e2e.word_model import add_tokenizer
from tests.tiny_models import make_tiny

NUM_TOKENS = 90
OPTIONS = ("--cpu-actors", "2", "--threads", "2")


@pytest.fixture(scope="module", params=["smallthinker", "qwen2-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny(request.param, tmp_path_factory.mktemp(request.param) / "model")
    add_tokenizer(path)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    ids = np.random.default_rng(5).integers(3, 90, NUM_TOKENS)
    file = tmp_path / "words.txt"
    file.write_text(" ".join(f"w{token_id}" for token_id in ids))
    return file


def report(*arguments: str | Path) -> dict[str, Any]:
    return run_main(*arguments, *OPTIONS, "--json").report


def refused(*arguments: str | Path) -> str:
    return run_here(*arguments).refusal


def generated(model: Path, *more: str) -> list[int]:
    options = ("--prompt", "w5 w6 w7", "--max-tokens", "12", "--temperature", "0")
    found: list[int] = report("generate", model, *options, *more)["ids"]
    return found


@pytest.mark.sweep(model=["qwen2-moe"])  # of which one expert is shared
def test_profile_plan_and_answer(local_ray: None, model: Path, text: Path) -> None:
    before = generated(model)
    told = report("profile", model, "--text", text)
    config = read_config(model)
    profile = read_profile(Path(told["path"]), ModelIdentity.of(model), config)
    assert config.experts is not None and profile.chosen is not None
    num_answers, num_prompt = 5, 16  # the first 16 of 90 tokens, and of four other places
    num_written = min(128, config.max_positions - num_prompt)
    num_tokens = NUM_TOKENS + num_answers * (num_prompt + num_written)
    assert told["inputs_path"] is None and profile.num_tokens == num_tokens
    num_experts = config.experts.router.num_experts
    for layer, spec in enumerate(config.layers):
        if spec.ffn.router is not None:
            routed = profile.chosen[layer, :num_experts]
            assert routed.sum() == num_tokens * spec.ffn.router.num_chosen
            assert told["never_chosen"][layer] == (routed == 0).sum()
            assert told["hot_experts"][layer] is not None
    num_choices = config.num_experts // num_experts * config.experts.router.num_chosen
    assert profile.distances is not None  # but of the first 64 steps, one of which is a prompt's
    assert profile.distances.sum() == (num_answers * num_written - 63) * num_choices
    missed = [told["missed_experts"][share] for share in ("25%", "50%", "75%")]
    assert 1 >= missed[0] > missed[1] > missed[2] >= 0
    plan = report("plan", model, "--gpu-memory", "0")
    held = {device["name"]: device["neurons"] for device in plan["devices"]}
    assert sum(held.values()) == config.num_neurons
    assert max(held.values()) - min(held.values()) <= 2
    assert generated(model) == before  # by the plan, which is found beside the model
    assert generated(model, "--plan", plan["path"], "--gpu-memory", "0") == before


def test_what_takes_predictors_is_refused(model: Path, text: Path) -> None:
    said = "is for models without experts"
    for mode in ("sign", "lowrank"):
        assert said in refused("generate", model, "--prompt", "w5", "--mode", mode)
    assert said in refused("generate", model, "--prompt", "w5", "--draft", "predicted")
    assert said in refused("train-predictors", model)
    assert said in refused("profile", model, "--text", text, "--inputs", "5")
    if read_config(model).is_sparse:
        told = refused("profile", model, "--text", text, "--target-kl", "0.1")
        assert "this one's is relu; leave them out" in told


def test_thresholds_within_experts(
    local_ray: None, model: Path, tmp_path: Path, text: Path
) -> None:
    config = read_config(model)
    if config.is_sparse:
        pytest.skip("its experts have silent neurons")
    own = copytree(model, tmp_path / "own", ignore=lambda *_: {"hotcold"})
    refusal = refused("generate", own, "--prompt", "w5", "--mode", "threshold")
    assert "`hotcold profile --target-kl 0.03` makes one" in refusal
    told = report("profile", own, "--text", text, "--target-kl", "0.05")
    assert 0 < told["mean_kld"] <= 0.05 and 0.3 < told["ffn_bytes_share"] < 1
    profile = read_profile(Path(told["path"]), ModelIdentity.of(own), config)
    assert profile.chosen is not None and config.experts is not None
    rates = rates_of(config, profile)
    assert (rates.fired <= rates.chosen).all()
    share = rates.fired.sum(axis=1) / rates.chosen.sum(axis=1)
    expected = (np.array(told["up_share"]) + np.array(told["down_share"])) / 2
    np.testing.assert_allclose(share, expected, atol=0.03)
    scored = report(
        "perplexity", own, "--text", text, "--mode", "threshold", "--context-window", "64"
    )
    assert 0.01 < scored["mean_kld"] < 0.25
    chosen = rates.chosen.sum() / config.num_neurons
    ups = np.average(told["up_share"], weights=rates.chosen.sum(axis=1))
    assert scored["ups_computed"] == pytest.approx(chosen * ups, abs=0.05)
