"""`hotcold profile`, as a user runs it: its files, its figures, and going on after any end."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.jobs.profile.state import Counts, ProfileState, ProfileTask
from hotcold.model.config.build import read_config
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity, check_artifact
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.placement.profile import read_profile
from hotcold.predictors.fitting.inputs import LayerInputs, read_inputs, write_inputs
from tests.actors.test_profiling import reference
from tests.e2e.commands import (
    command_line,
    environment,
    processes_left,
    ray_folder,
    run_here,
    run_main,
)
from tests.e2e.word_model import add_tokenizer, make_word_model
from tests.full_disk import files_of_at_most
from tests.tiny_models import make_tiny

WINDOW, NUM_TOKENS, NUM_INPUTS = 24, 100, 30
HELD_OUT = DEMO_DIRECTORY / "heldout.txt"
LONG = 3_000  # tokens of the demo's held-out text


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_word_model(tmp_path_factory.mktemp("words"))
    add_tokenizer(model, opens_with="w1")  # the model's bos
    return model


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(5).integers(3, 99, NUM_TOKENS).tolist()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, ids: list[int]) -> Path:
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text(" ".join(f"w{token_id}" for token_id in ids))
    return file


def profiled(*arguments: str | Path) -> tuple[dict[str, Any], str]:
    """The JSON of the command, and what it wrote on standard error."""
    done = run_main("profile", *arguments, "--json")
    return done.report, done.err


def state_of(out: Path) -> dict[str, Any]:
    """The facts of a stopped or running run's state."""
    return check_artifact(part_of(out), "profile", ModelIdentity.of(DEMO_DIRECTORY))


def part_of(out: Path) -> Path:
    """The file of that state."""
    return out.with_name(f"{out.name}.part")


def written_at(out: Path) -> int:
    """When the state was last saved, in nanoseconds; 0 where it never was."""
    try:
        return part_of(out).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("exchange", ["arena", "calls"])
def test_files_are_what_transformers_says(
    local_ray: None, words: Path, text: Path, ids: list[int],
    tmp_path: Path, exchange: str,
) -> None:  # fmt: skip
    plot = tmp_path / "figure.png"
    report, _ = profiled(
        words, "--text", text, "--window", f"{WINDOW}", "--inputs", f"{NUM_INPUTS}",
        "--exchange", exchange, "--cpu-actors", "2", "--threads", "2", "--plot", plot,
    )  # fmt: skip
    size = WINDOW - 1  # bos takes one
    windows = [ids[first : first + size] for first in range(0, NUM_TOKENS, size)]
    counts, inputs = reference(words, windows)
    identity, config = ModelIdentity.of(words), read_config(words)
    profile = read_profile(Path(report["path"]), identity, config)
    np.testing.assert_array_equal(profile.counts, counts)
    assert (profile.num_tokens, profile.text_name) == (NUM_TOKENS, "words.txt")
    recorded = read_inputs(Path(report["inputs_path"]), identity, config)
    chosen = [
        token
        for token in range(NUM_TOKENS)
        if (token + 1) * NUM_INPUTS // NUM_TOKENS > token * NUM_INPUTS // NUM_TOKENS
    ]
    assert len(chosen) == NUM_INPUTS
    expected = np.concatenate(inputs, axis=1)[:, chosen]
    found = recorded.inputs.view(np.float16).astype(np.float32)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-3)
    assert recorded.text_digest == profile.text_digest and recorded.num_tokens == NUM_TOKENS
    assert report["tokens"] == NUM_TOKENS and report["resumed_at"] == 0
    assert report["tokens_per_s"] > 0
    np.testing.assert_allclose(report["sparsity"], 1 - (counts / NUM_TOKENS).mean(axis=1))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (words / "hotcold").iterdir()) == [
        "inputs.safetensors", "profile.safetensors",
    ]  # fmt: skip


def test_a_disk_that_is_full_for_the_figure(
    local_ray: None, words: Path, text: Path, tmp_path: Path
) -> None:
    """What was counted is written, and the figure is no part of a figure.

    Where kernels are not in the cache yet, these are told to be lost as well.
    """
    out, plot = tmp_path / "profile", tmp_path / "figures" / "figure.png"
    line = [words, "--text", text, "--out", out, "--inputs", "0", "--plot", plot]
    with files_of_at_most(20_000):
        told = run_main("profile", *line)
    *others, last = told.error_lines
    problem = "cannot be written (File too large); give another place with --plot"
    assert told.status == 1 and last == f"hotcold: error: {plot}: {problem}"
    assert all("so kernels are compiled at every start" in line for line in others)
    assert out.exists() and told.out == ""
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [out]


def test_gelu_without_a_gate_is_never_zero(local_ray: None, text: Path, tmp_path: Path) -> None:
    path = make_tiny("falcon-gelu", tmp_path)
    add_tokenizer(path)
    report, err = profiled(path, "--text", text)
    assert "(gelu) is exactly zero: all neurons fire" in err and len(err.splitlines()) == 1
    assert report["inputs_path"] is None
    assert max(report["sparsity"]) < 0.01


@pytest.mark.thorough
def test_layers_without_an_ffn_have_no_counts_and_no_predictor(
    local_ray: None, text: Path, tmp_path: Path
) -> None:
    path = make_tiny("nemotron-h", tmp_path)
    add_tokenizer(path)
    report, _ = profiled(path, "--text", text)
    has_ffn = [size > 0 for size in read_config(path).ffn_sizes]
    assert not all(has_ffn)
    assert [share is not None for share in report["sparsity"]] == has_ffn
    assert all(0 < share < 1 for share in report["sparsity"] if share is not None)
    found = run_main("train-predictors", path, "--json").report
    assert [size > 0 for size in found["bytes"]] == has_ffn
    answer = (
        "generate",
        path,
        "--prompt",
        "w5 w9",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
        "--json",
    )
    of_all = run_main(*answer, "--mode", "exact").report
    assert of_all["ids"] == run_main(*answer, "--mode", "dense").report["ids"]
    assert 0 < run_main(*answer, "--mode", "lowrank").report["neurons_computed"] <= 1


@pytest.mark.thorough
def test_a_killed_run_goes_on(local_ray: None, tmp_path: Path) -> None:
    arguments: list[str | Path] = ["--text", HELD_OUT, "--max-tokens", f"{LONG}"]
    arguments += ["--window", "128"]
    whole: list[str | Path] = ["--out", tmp_path / "a" / "p", "--inputs-out", tmp_path / "a" / "i"]
    parts: list[str | Path] = ["--out", tmp_path / "b" / "p", "--inputs-out", tmp_path / "b" / "i"]
    profiled(*arguments, *whole)
    for how in (signal.SIGKILL, signal.SIGINT):
        stopped_at = _stop_midway(arguments + parts, tmp_path / "b" / "p", how)
        assert not (tmp_path / "b" / "i").exists()
    report, err = profiled(*arguments, *parts)
    assert report["resumed_at"] == stopped_at and 0 < stopped_at < LONG
    assert f"continued at token {stopped_at}" in err
    for name in ("p", "i"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["i", "p"]


def _stop_midway(arguments: list[str | Path], out: Path, how: signal.Signals) -> int:
    """Start a command, signal it and all that it started once it has saved some work."""
    try:
        before = state_of(out)["num_done"]
    except ArtifactError:
        before = 0
    seen_at = written_at(out)
    with (
        ray_folder() as folder,
        subprocess.Popen(
            command_line(["profile", *arguments, "--save-every", "0"]), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment(folder),
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        while process.poll() is None:
            if written_at(out) != seen_at:  # to look into it costs more than to wait
                seen_at = written_at(out)
                with suppress(ArtifactError):
                    if state_of(out)["num_done"] > before:
                        break
            time.sleep(0.01)
        os.killpg(process.pid, how)
        _, err = process.communicate(timeout=600)
        assert process.returncode == (-how if how == signal.SIGKILL else 130), err.decode()
        assert processes_left(folder) == []
    done: int = state_of(out)["num_done"]
    assert before < done < LONG
    if how == signal.SIGINT:
        assert f"stopped at token {done} of {LONG}" in err.decode()
    return done


def saved_state(out: Path, words: Path, task: ProfileTask) -> ProfileState:
    """A state of two windows done, whose counts are all wrong."""
    config = read_config(words)
    state = ProfileState(out, ModelIdentity.of(words), config, task)
    state.start()
    for first, last in ((0, 23), (23, 46)):
        shape = (config.num_layers, len(task.recorded(first, last)), config.hidden_size)
        state.add_inputs(first, np.full(shape, first + 1, np.uint16))
    state.save(Counts(*(array + 7 for array in state.found)), 46)
    return state


@pytest.mark.parametrize(
    ("change", "num_done"),
    [("none", 46), ("text", 0), ("window", 0), ("inputs", 0), ("model", 0), ("damage", 0),
     ("no rows", 0)],
)  # fmt: skip
def test_which_state_is_taken_over(words: Path, tmp_path: Path, change: str, num_done: int) -> None:
    task, out = ProfileTask("a" * 64, NUM_TOKENS, WINDOW - 1, NUM_INPUTS), tmp_path / "profile"
    identity = saved_state(out, words, task).identity
    fields: dict[str, dict[str, Any]] = {
        "text": {"text_digest": "b" * 64}, "window": {"window_ids": 9}, "inputs": {"num_inputs": 29}
    }  # fmt: skip
    if change == "model":
        identity = ModelIdentity("other", "0" * 64)
    elif change == "no rows":
        out.with_name("profile.part.inputs").write_bytes(b"")
    elif change == "damage":
        part_of(out).write_bytes(b"nonsense")
    other = replace(task, **fields.get(change, {}))
    state = ProfileState(out, identity, read_config(words), other)
    state.resume()
    assert state.num_done == num_done
    for array in state.found[:2]:
        assert np.unique(array).tolist() == [7 if num_done else 0]
    state.remove()
    assert not list(tmp_path.iterdir())


def test_restart(
    local_ray: None, tmp_path: Path, words: Path, text: Path,
    ids: list[int],
) -> None:  # fmt: skip
    config, out = read_config(words), tmp_path / "profile"
    digest = hashlib.sha256(text.read_bytes()).hexdigest()
    saved_state(out, words, ProfileTask(digest, NUM_TOKENS, WINDOW - 1, NUM_INPUTS))
    arguments: list[str | Path] = [words, "--text", text, "--out", out, "--inputs-out"]
    arguments += [tmp_path / "i", "--window", f"{WINDOW}", "--inputs", f"{NUM_INPUTS}"]
    report, err = profiled(*arguments, "--restart")
    assert report["resumed_at"] == 0
    assert all(line.startswith("compiling kernels") for line in err.splitlines())
    windows = [ids[first : first + WINDOW - 1] for first in range(0, NUM_TOKENS, WINDOW - 1)]
    found = read_profile(out, ModelIdentity.of(words), config)
    np.testing.assert_array_equal(found.counts, reference(words, windows)[0])
    saved_state(out, words, ProfileTask(digest, NUM_TOKENS, WINDOW - 1, NUM_INPUTS))
    report, err = profiled(*arguments)
    assert report["resumed_at"] == 46 and "continued at token 46" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--text", "none.txt"], "none.txt: cannot be read"),
        (["--text", HELD_OUT, "--window", "1"], "--window is 1; give a number from 2 to 512"),
        (["--text", HELD_OUT, "--inputs", "0", "--inputs-out", "x"], "leave one out"),
        (["--text", HELD_OUT, "--plot", "figure.gif"], "ends in .png"),
        (["--text", HELD_OUT, "--out", "same", "--inputs-out", "same"], "the same file"),
        (["--text", HELD_OUT, "--out", HELD_OUT / "p"], "cannot be written"),
        (["--text", HELD_OUT, "--threads", "1000"], "--threads is 1000"),
    ],
)
def test_mistakes_cost_no_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str | Path], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    outputs: list[str | Path] = ["--out", "p", "--inputs-out", "i"]
    if "--out" in arguments or "--inputs" in arguments:
        outputs = []
    assert problem in run_here("profile", *outputs, *arguments).refusal
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("inputs", "num_tokens", "problem"),
    [
        (np.full((3, 2, 48), 0x7C00, np.uint16), 9, "not finite"),
        (np.zeros((3, 2, 48), np.uint16), 1, "2 tokens of a text of 1"),
        (np.zeros((3, 0, 48), np.uint16), 9, r"\(3, 0, 48\)"),
    ],
)
def test_impossible_inputs_are_refused(
    tmp_path: Path, inputs: np.ndarray, num_tokens: int, problem: str
) -> None:
    identity = ModelIdentity("any", "0" * 64)
    with pytest.raises(ArtifactError, match=problem):
        write_inputs(tmp_path / "i", identity, LayerInputs(inputs, num_tokens, "0" * 64))
    assert not list(tmp_path.iterdir())
