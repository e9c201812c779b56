"""`hotcold profile`, as a user runs it: its files, its figures, and going on after any end."""

from __future__ import annotations

import hashlib
import json
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

from hotcold.jobs.cli import main
from hotcold.jobs.profile.plot import cumulative_share
from hotcold.jobs.profile.state import Counts, ProfileState, ProfileTask
from hotcold.model.config.build import read_config
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity, check_artifact
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sparsity import hot_share
from hotcold.placement.profile import ActivationProfile, read_profile, write_profile
from hotcold.predictors.fitting.inputs import LayerInputs, read_inputs, write_inputs
from tests.actors.test_profiling import reference
from tests.e2e.commands import command_line, environment, processes_left, ray_folder
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


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[dict[str, Any], str]:
    """Run a command in this process; its JSON, and what it wrote on standard error."""
    capsys.readouterr()
    status = main(["profile", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    return json.loads(out.splitlines()[-1]), err


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
    local_ray: None, capsys: pytest.CaptureFixture[str], words: Path, text: Path, ids: list[int],
    tmp_path: Path, exchange: str,
) -> None:  # fmt: skip
    plot = tmp_path / "figure.png"
    report, _ = run(
        capsys, words, "--text", text, "--window", f"{WINDOW}", "--inputs", f"{NUM_INPUTS}",
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
    local_ray: None, capsys: pytest.CaptureFixture[str], words: Path, text: Path, tmp_path: Path
) -> None:
    """What was counted is written, and the figure is no part of a figure.

    Where kernels are not in the cache yet, these are told to be lost as well.
    """
    out, plot = tmp_path / "profile", tmp_path / "figures" / "figure.png"
    line = [words, "--text", text, "--out", out, "--inputs", "0", "--plot", plot]
    with files_of_at_most(20_000):
        assert main(["profile", *map(str, line)]) == 1
    told = capsys.readouterr()
    *others, last = told.err.splitlines()
    problem = "cannot be written (File too large); give another place with --plot"
    assert last == f"hotcold: error: {plot}: {problem}"
    assert all("so kernels are compiled at every start" in line for line in others)
    assert out.exists() and told.out == ""
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [out]


def test_a_disk_that_is_full_for_inputs(words: Path, tmp_path: Path) -> None:
    config, size = read_config(words), 40
    task = ProfileTask("a" * 64, size, WINDOW - 1, size)
    state = ProfileState(tmp_path / "profile", ModelIdentity.of(words), config, task)
    state.start()
    inputs = np.ones((config.num_layers, size, config.hidden_size), np.uint16)
    with (
        files_of_at_most(inputs.nbytes - 1),
        pytest.raises(ArtifactError, match=r"part.inputs: cannot be written \(File too large\)"),
    ):
        state.add_inputs(0, inputs)


@pytest.mark.thorough
def test_part_of_a_text_without_inputs(
    local_ray: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "new" / "profile.safetensors"
    report, err = run(
        capsys, "--text", HELD_OUT, "--out", out, "--inputs", "0", "--max-tokens", "700",
    )  # fmt: skip
    assert report["tokens"] == 700 and report["inputs_path"] is None
    assert report["path"] == str(out) and [path.name for path in out.parent.iterdir()] == [out.name]
    assert len(report["hot_share"]) == len(report["never_fired"]) == 4
    assert "warning" not in err


def test_gelu_without_a_gate_is_never_zero(
    local_ray: None, capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    path = make_tiny("falcon-gelu", tmp_path)
    add_tokenizer(path)
    report, err = run(capsys, path, "--text", text)
    assert "(gelu) is exactly zero: all neurons fire" in err and len(err.splitlines()) == 1
    assert report["inputs_path"] is None
    assert max(report["sparsity"]) < 0.01


@pytest.mark.thorough
def test_a_killed_run_goes_on(
    local_ray: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments: list[str | Path] = ["--text", HELD_OUT, "--max-tokens", f"{LONG}"]
    arguments += ["--window", "128"]
    whole: list[str | Path] = ["--out", tmp_path / "a" / "p", "--inputs-out", tmp_path / "a" / "i"]
    parts: list[str | Path] = ["--out", tmp_path / "b" / "p", "--inputs-out", tmp_path / "b" / "i"]
    run(capsys, *arguments, *whole)
    for how in (signal.SIGKILL, signal.SIGINT):
        stopped_at = _stop_midway(arguments + parts, tmp_path / "b" / "p", how)
        assert not (tmp_path / "b" / "i").exists()
    report, err = run(capsys, *arguments, *parts)
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
        _, err = process.communicate(timeout=120)
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
     ("no rows", 0), ("a row more", 46)],
)  # fmt: skip
def test_which_state_is_taken_over(words: Path, tmp_path: Path, change: str, num_done: int) -> None:
    task, out = ProfileTask("a" * 64, NUM_TOKENS, WINDOW - 1, NUM_INPUTS), tmp_path / "profile"
    first = saved_state(out, words, task)
    fields: dict[str, dict[str, Any]] = {
        "text": {"text_digest": "b" * 64}, "window": {"window_ids": 9}, "inputs": {"num_inputs": 29}
    }  # fmt: skip
    identity = ModelIdentity("other", "0" * 64) if change == "model" else first.identity
    rows = out.with_name("profile.part.inputs")
    if change in ("no rows", "a row more"):
        rows.write_bytes(b"" if change == "no rows" else rows.read_bytes() + bytes(288))
    if change == "damage":
        out.with_name("profile.part").write_bytes(b"nonsense")
    config = read_config(words)
    state = ProfileState(out, identity, config, replace(task, **fields.get(change, {})))
    state.resume()
    assert state.num_done == num_done
    for array in state.found[:2]:
        assert np.unique(array).tolist() == [7 if num_done else 0]
    if num_done:
        shape = (config.num_layers, NUM_INPUTS - task.recorded_before(46), config.hidden_size)
        state.start()
        state.add_inputs(46, np.full(shape, 47, np.uint16))
        expected = [[1] * 6 + [24] * 7 + [47] * 17] * config.num_layers
        np.testing.assert_array_equal(state.inputs()[:, :, 0], expected)
    state.remove()
    assert not list(tmp_path.iterdir())


def test_restart(
    local_ray: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: Path, text: Path,
    ids: list[int],
) -> None:  # fmt: skip
    config, out = read_config(words), tmp_path / "profile"
    digest = hashlib.sha256(text.read_bytes()).hexdigest()
    saved_state(out, words, ProfileTask(digest, NUM_TOKENS, WINDOW - 1, NUM_INPUTS))
    arguments: list[str | Path] = [words, "--text", text, "--out", out, "--inputs-out"]
    arguments += [tmp_path / "i", "--window", f"{WINDOW}", "--inputs", f"{NUM_INPUTS}"]
    report, err = run(capsys, *arguments, "--restart")
    assert report["resumed_at"] == 0 and err == ""
    windows = [ids[first : first + WINDOW - 1] for first in range(0, NUM_TOKENS, WINDOW - 1)]
    found = read_profile(out, ModelIdentity.of(words), config)
    np.testing.assert_array_equal(found.counts, reference(words, windows)[0])
    saved_state(out, words, ProfileTask(digest, NUM_TOKENS, WINDOW - 1, NUM_INPUTS))
    report, err = run(capsys, *arguments)
    assert report["resumed_at"] == 46 and "continued at token 46" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--text", "none.txt"], "none.txt: cannot be read"),
        (["--text", HELD_OUT, "--window", "1"], "--window is 1; give a number from 2 to 512"),
        (["--text", HELD_OUT, "--window", "513"], "--window is 513"),
        (["--text", HELD_OUT, "--inputs", "0", "--inputs-out", "x"], "leave one out"),
        (["--text", HELD_OUT, "--plot", "figure.gif"], "ends in .png"),
        (["--text", HELD_OUT, "--out", "same", "--inputs-out", "same"], "the same file"),
        (["--text", HELD_OUT, "--out", "."], "is a directory"),
        (["--text", HELD_OUT, "--out", HELD_OUT / "p"], "cannot be written"),
        (["--text", HELD_OUT, "--threads", "1000"], "--threads is 1000"),
    ],
)
def test_mistakes_cost_no_waiting(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str | Path], problem: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    outputs: list[str | Path] = ["--out", "p", "--inputs-out", "i"]
    if "--out" in arguments or "--inputs" in arguments:
        outputs = []
    assert main(["profile", *map(str, [*outputs, *arguments])]) == 1
    out, err = capsys.readouterr()
    assert out == "" and problem in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_files_of_another_model_are_refused(words: Path, tmp_path: Path) -> None:
    config = read_config(words)
    other = ModelIdentity("other", "0" * 64)
    counts = np.ones((config.num_layers, config.ffn_size), np.int64)
    write_profile(tmp_path / "p", other, ActivationProfile(counts, 9, "a.txt", "0" * 64))
    inputs = np.ones((config.num_layers, 2, config.hidden_size), np.uint16)
    write_inputs(tmp_path / "i", other, LayerInputs(inputs, 9, "0" * 64))
    with pytest.raises(ArtifactError, match="belongs to the model 'other'"):
        read_profile(tmp_path / "p", ModelIdentity.of(words), config)
    with pytest.raises(ArtifactError, match="belongs to the model 'other'"):
        read_inputs(tmp_path / "i", ModelIdentity.of(words), config)
    found = read_inputs(tmp_path / "i", other, config)
    np.testing.assert_array_equal(found.inputs, inputs)
    assert (found.num_tokens, found.text_digest) == (9, "0" * 64)


@pytest.mark.parametrize(
    ("inputs", "num_tokens", "problem"),
    [
        (np.full((3, 2, 48), 0x7C00, np.uint16), 9, "not finite"),
        (np.full((3, 2, 48), 0xFE00, np.uint16), 9, "not finite"),
        (np.zeros((3, 2, 48), np.uint16), 1, "2 tokens of a text of 1"),
        (np.zeros((3, 2, 48), np.float16), 9, "float16"),
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


@pytest.mark.parametrize(
    ("counts", "share"),
    [([0, 0], 0.0), ([1, 1, 1, 1, 1], 0.8), ([0, 8, 1, 1], 0.25), ([3, 0, 5, 2], 0.5), ([7], 1.0)],
)
def test_hot_share(counts: list[int], share: float) -> None:
    assert hot_share(np.array(counts)) == share


def test_cumulative_share() -> None:
    x, y = cumulative_share(np.array([1, 0, 6, 3]))
    np.testing.assert_allclose(x, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(y, [0, 0.6, 0.9, 1, 1])
    x, y = cumulative_share(np.ones(5000, np.int64))
    assert x.size <= 1001
    np.testing.assert_allclose(x, y)
