"""Thresholds as a user has them: `hotcold profile`, then `--mode threshold` everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.jobs.cli import main
from hotcold.jobs.profile.calibrate import speed_line
from hotcold.model.config.build import read_config
from hotcold.model.files.artifact import ModelIdentity
from hotcold.placement.profile import read_profile
from hotcold.predictors.magnitude_thresholds import read_thresholds
from tests.e2e.word_model import add_tokenizer
from tests.tiny_models import make_tiny

Capsys = pytest.CaptureFixture[str]
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


def command(capsys: Capsys, *arguments: str | Path) -> tuple[int, str, str]:
    """Run in this process; the exit status, standard output and standard error."""
    capsys.readouterr()
    status = main(list(map(str, arguments)))
    return status, *capsys.readouterr()


def answer(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[dict[str, Any], str]:
    """The JSON of a command that works, and its standard error."""
    status, out, err = command(capsys, *arguments, "--json")
    assert status == 0, err
    return json.loads(out.splitlines()[-1]), err


def test_from_profile_to_perplexity(
    local_ray: None, capsys: pytest.CaptureFixture[str], model: Path, text: Path
) -> None:
    prompt = ["--prompt-ids", "5,6,7", "--max-tokens", "12", "--temperature", "0", "--ignore-eos"]
    status, _, err = command(capsys, "generate", model, *prompt, "--mode", "threshold")
    assert status == 1 and err.count("\n") == 1
    assert "there is no thresholds file; make one with `hotcold profile`" in err
    assert "which `hotcold profile` calibrates" in command(capsys, "show", model)[1]
    threads = ["--threads", "2", "--cpu-actors", "2"]
    told, err = answer(
        capsys, "profile", model, "--text", text, "--target-kl", f"{TARGET}", *threads
    )
    assert err.startswith("no activation of this model (silu) is exactly zero")
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

    dense, _ = answer(capsys, "generate", model, *prompt, *threads)
    sparse, err = answer(capsys, "generate", model, *prompt, *threads, "--mode", "threshold")
    assert (
        f"threshold: not exact; expected mean KL divergence from dense {found.mean_kld:.2g}" in err
    )
    assert f"reads {told['ffn_bytes_share']:.0%} of the FFN's bytes" in err
    assert "of their ups" in err and sparse["system"]["mode"] == "threshold"
    assert sparse["neurons_computed"] < sparse["ups_computed"] <= sparse["gates_computed"] == 1
    assert dense["neurons_computed"] == dense["ups_computed"] == 1
    scored, _ = answer(
        capsys, "perplexity", model, "--text", text, "--mode", "threshold", "--context-window",
        "128", "--max-windows", "2", *threads,
    )  # fmt: skip
    assert 0.2 * TARGET < scored["mean_kld"] < 5 * TARGET
    assert scored["ups_computed"] == pytest.approx(found.up_share.mean(), abs=0.1)
    assert scored["neurons_computed"] == pytest.approx(found.down_share.mean(), abs=0.1)
    assert "reads" in command(capsys, "show", model)[1]


@pytest.mark.parametrize(
    ("thresholds", "told"),
    [(130.0, "is the faster one here"), (90.0, "does not pay here"), (100.5, "does not pay here")],
)
def test_only_what_was_faster_is_praised(thresholds: float, told: str) -> None:
    line = speed_line({"dense": 100.0, "threshold": thresholds})
    assert (
        line.startswith(f"decoding: dense 100.0 tokens/s, threshold {thresholds}") and told in line
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--inputs", "9"], "--inputs is for models some of whose activations are zero"),
        (["--restart"], "--restart is for models"),
        (["--max-tokens", "20"], "too few to calibrate"),
        (["--target-kl", "0"], "target-kl"),
        (["--thresholds-out", "same", "--out", "same"], "the same file"),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    model: Path, text: Path, arguments: list[str], problem: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    status, out, err = command(capsys, "profile", model, "--text", text, *arguments)
    assert status and out == "" and problem in err and err.count("\n") == 1


def test_other_models_have_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = make_tiny("llama-relu", tmp_path / "relu")
    for arguments in (["--target-kl", "0.1"], ["--thresholds-out", "x"]):
        status, _, err = command(capsys, "profile", path, *arguments)
        assert status == 1 and "this one's is relu; leave them out" in err
