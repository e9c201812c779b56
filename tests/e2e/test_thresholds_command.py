"""Thresholds as a user has them: `hotcold profile`, then `--mode threshold` everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.jobs.profile.calibrate import speed_line
from hotcold.model.config.build import read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.placement.profile import read_profile
from hotcold.predictors.magnitude_thresholds import read_thresholds
from tests.e2e.commands import run_here, run_main
from tests.e2e.word_model import add_tokenizer
from tests.tiny_models import make_tiny

TARGET = 0.02


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "words.txt"
    ids = np.random.default_rng(5).integers(3, 99, 900)
    file.write_text(" ".join(f"w{token_id}" for token_id in ids))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny("qwen3", tmp_path_factory.mktemp("model") / "qwen3")
    add_tokenizer(path)
    return path


def test_from_profile_to_perplexity(local_ray: None, model: Path, text: Path) -> None:
    prompt = ["--prompt-ids", "5,6,7", "--max-tokens", "12", "--temperature", "0", "--ignore-eos"]
    refusal = run_here("generate", model, *prompt, "--mode", "threshold").refusal
    assert "there is no thresholds file; make one with `hotcold profile`" in refusal
    assert "which `hotcold profile` calibrates" in run_here("show", model).out
    threads = ["--threads", "2", "--cpu-actors", "2", "--json"]
    done = run_main("profile", model, "--text", text, "--target-kl", f"{TARGET}", *threads)
    assert done.err.startswith("no activation of this model (silu) is exactly zero")
    told = done.report
    speeds = told["tokens_per_s"]
    assert set(speeds) == {"dense", "threshold"} and min(speeds.values()) > 0
    assert 0.8 * TARGET < told["mean_kld"] <= TARGET and 0.3 < told["ffn_bytes_share"] < 0.99
    config, identity = read_config(model), ModelIdentity.of(model)
    found = read_thresholds(Path(told["thresholds_path"]), identity, config)
    assert (found.mean_kld, found.target_kld) == (told["mean_kld"], TARGET)
    profile = read_profile(Path(told["path"]), identity, config)
    assert profile.num_tokens == told["tokens"]
    expected = (found.up_share + found.down_share) / 2
    np.testing.assert_allclose(profile.frequency.mean(axis=1), expected, atol=0.02)

    dense = run_main("generate", model, *prompt, *threads).report
    done = run_main("generate", model, *prompt, *threads, "--mode", "threshold")
    sparse, err = done.report, done.err
    assert (
        f"threshold: not exact; expected mean KL divergence from dense {found.mean_kld:.2g}" in err
    )
    assert f"reads {told['ffn_bytes_share']:.0%} of the FFN's bytes" in err
    assert "of their ups" in err and sparse["system"]["mode"] == "threshold"
    assert sparse["neurons_computed"] < sparse["ups_computed"] <= sparse["gates_computed"] == 1
    assert dense["neurons_computed"] == dense["ups_computed"] == 1
    scored = run_main(
        "perplexity", model, "--text", text, "--mode", "threshold", "--context-window", "128",
        "--max-windows", "2", *threads,
    ).report  # fmt: skip
    assert 0.2 * TARGET < scored["mean_kld"] < 5 * TARGET
    assert scored["ups_computed"] == pytest.approx(found.up_share.mean(), abs=0.1)
    assert scored["neurons_computed"] == pytest.approx(found.down_share.mean(), abs=0.1)
    assert "reads" in run_here("show", model).out


@pytest.mark.parametrize(
    ("thresholds", "told"),
    [(130.0, "is the faster one here"), (90.0, "does not pay here"), (100.5, "does not pay here")],
)
def test_only_what_was_faster_is_praised(thresholds: float, told: str) -> None:
    line = speed_line({"dense": 100.0, "threshold": thresholds})
    assert (
        line.startswith(f"decoding: dense 100.0 tokens/s, threshold {thresholds}") and told in line
    )


def test_mistakes_end_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, text: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    relu = make_tiny("llama-relu", tmp_path / "relu")
    for path, arguments, problem in (
        (model, "--inputs 9", "--inputs is for models some of whose activations are zero"),
        (model, "--restart", "--restart is for models"),
        (model, "--max-tokens 20", "too few to calibrate"),
        (model, "--target-kl 0", "target-kl"),
        (model, "--thresholds-out same --out same", "the same file"),
        (relu, "--target-kl 0.1", "this one's is relu; leave them out"),
        (relu, "--thresholds-out x", "this one's is relu; leave them out"),
    ):
        line = ["profile", path, "--text", text, *arguments.split()]
        assert problem in run_here(*line).refusal
