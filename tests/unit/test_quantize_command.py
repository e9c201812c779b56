"""`hotcold quantize` and reading its models: whole or not there, the same as quantizing late."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hotcold.actors.setup.preflight import read_model
from hotcold.model.errors import CheckpointError, ConfigError, HotcoldError, UsageError
from hotcold.model.files.safetensors_writer import SafetensorsWriter
from hotcold.model.weights import quantized_checkpoint
from hotcold.model.weights.quantized_checkpoint import write_quantized
from tests.e2e.commands import Outcome, run_main
from tests.quantized_models import make_model
from tests.tiny_models import make_tiny
from tests.unit.test_weights import WEIGHTS, change_config, loaded, refused


def failed(done: Outcome, *texts: str) -> None:
    assert done.refusal.startswith("hotcold: error: ")
    for text in texts:
        assert text in done.refusal


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("q-llama-tied", "q8"),
        ("q-opt-postnorm", "q4_1"),
        ("q-falcon", "q4"),
        ("q-falcon-grouped", "mxfp4"),
    ],
)
def test_loading_it_is_quantizing_late(model: str, dtype: str, tmp_path: Path) -> None:
    path, out = make_model(model, tmp_path / "m"), tmp_path / "out"
    report = run_main("quantize", path, out, "--dtype", dtype, "--json").report
    for late, stored in zip(loaded(path, dtype)[:3], loaded(out)[:3], strict=True):
        for name, array in vars(late).items():
            if isinstance(array, np.ndarray):
                assert getattr(stored, name).dtype == array.dtype, name
                assert getattr(stored, name).tobytes() == array.tobytes(), name
    expected = read_model(path, dtype)
    assert read_model(out) == replace(expected, name=out.name) and expected.dtype == dtype
    before, after = load_file(path / WEIGHTS), load_file(out / WEIGHTS)
    assert before.keys() == after.keys()
    kept = [name for name in after if after[name].dtype != np.uint8]
    assert all(after[name].tobytes() == before[name].tobytes() for name in kept)
    assert (report["path"], report["dtype"]) == (str(out), dtype)
    assert (report["num_copied"], report["num_quantized"]) == (len(kept), len(after) - len(kept))
    assert report["num_bytes"] == sum(tensor.nbytes for tensor in after.values())
    values = json.loads((out / "config.json").read_text())
    assert values.pop("quantization_config")["quant_method"] == "hotcold"
    assert values == json.loads((path / "config.json").read_text())
    assert sorted(tmp_path.iterdir()) == [path, out]


@pytest.mark.parametrize("model", ["q-granite4-h", "q-gemma4-a4b"])
def test_layers_of_their_own_kind(model: str, tmp_path: Path) -> None:
    """Mamba's gates, rows of a matrix, stay as they are; a layer may have no attention."""
    path, out = make_model(model, tmp_path / "m"), tmp_path / "out"
    write_quantized(path, out, "q8")
    late, stored = loaded(path, "q8")[0], loaded(out)[0]
    for array, own in zip(late.recurrent, stored.recurrent, strict=True):
        assert array.tobytes() == own.tobytes()
    assert late.out.matrix(0).tobytes() == stored.out.matrix(0).tobytes()


def test_small_files_come_along(tmp_path: Path) -> None:
    path, out = make_model("q-llama", tmp_path / "m", shards=3), tmp_path / "deep" / "out"
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "model.gguf", "old.bin"):
        (path / name).write_text(name)
    (path / "hotcold").mkdir()
    (path / "hotcold" / "profile.safetensors").write_text("x")
    assert run_main("quantize", path, out, "--dtype", "q4").status == 0
    assert sorted(file.name for file in out.iterdir()) == [
        "LICENSE", "chat_template.jinja", "config.json", "generation_config.json", WEIGHTS,
        "tokenizer.json",
    ]  # fmt: skip
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"


def test_no_file_from_elsewhere_comes_along(tmp_path: Path) -> None:
    """A folder from the network may link to any file of the user, whose copy would be published."""
    path, out = make_model("q-llama", tmp_path / "m"), tmp_path / "out"
    (tmp_path / "key").write_text("secret")
    (path / "LICENSE").symlink_to("../key")
    refusal = run_main("quantize", path, out, "--dtype", "q4").refusal
    assert "LICENSE: is a link out of the model's" in refusal
    assert not out.exists()
    (path / "LICENSE").unlink()
    blobs, snapshot = (tmp_path / "models--org--m" / name for name in ("blobs", "snapshots/1"))
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (path / "notes").write_text("own")
    (path / "same").symlink_to("notes")
    for file in path.iterdir():
        target = blobs / file.name
        target.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    for folder, name in ((path, "own"), (snapshot, "cached")):
        assert run_main("quantize", folder, tmp_path / name, "--dtype", "q4").status == 0
        assert (tmp_path / name / "same").read_text() == "own"
        assert not (tmp_path / name / "same").is_symlink()


def test_what_is_refused(tmp_path: Path) -> None:
    path, out = make_model("q-llama", tmp_path / "m"), tmp_path / "out"
    assert run_main("quantize", path, out, "--dtype", "q8").status == 0
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    failed(run_main("quantize", path, out, "--dtype", "q4"), "exists")
    failed(run_main("quantize", path, out / WEIGHTS, "--dtype", "q4"), "exists")
    failed(run_main("quantize", path, out / WEIGHTS / "x", "--dtype", "q4"), "cannot be made")
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    for dtype in ("q8", "q4"):
        failed(run_main("quantize", out, tmp_path / "again", "--dtype", dtype), "already")
    assert read_model(out, "q8").dtype == read_model(out).dtype == "q8"
    with pytest.raises(UsageError, match="already"):
        read_model(out, "q4")
    narrow = make_tiny("llama-relu", tmp_path / "narrow")
    failed(run_main("quantize", narrow, tmp_path / "again", "--dtype", "q8"), "rows of 48")
    failed(run_main("quantize", tmp_path / "none", tmp_path / "again", "--dtype", "q8"), "none")
    assert run_main("quantize", path, tmp_path / "again").status == 2
    assert run_main("quantize", path, tmp_path / "again", "--dtype", "q5").status == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m", "narrow", "out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_run_leaves_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = make_model("q-llama", tmp_path / "m"), tmp_path / "out"
    write, num_written = SafetensorsWriter.write_bits, 0

    def interrupted(writer: SafetensorsWriter, name: str, bits: np.ndarray) -> None:
        nonlocal num_written
        num_written += 1
        assert not out.exists()
        if num_written > 5:
            raise error
        write(writer, name, bits)

    monkeypatch.setattr(SafetensorsWriter, "write_bits", interrupted)
    done = run_main("quantize", path, out, "--dtype", "q8")
    assert (done.status, list(tmp_path.iterdir())) == (
        (130, [path]) if isinstance(error, KeyboardInterrupt) else (1, [path])
    )
    assert "Traceback" not in done.err and ("No space" in done.err) == isinstance(error, OSError)


def test_a_full_disk_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model("q-llama", tmp_path / "m")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(quantized_checkpoint.shutil, "disk_usage", lambda directory: usage)
    with pytest.raises(HotcoldError, match="free"):
        write_quantized(path, tmp_path / "out", "q8")
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    write_quantized(make_model("q-llama", tmp_path / "m"), tmp_path / "out", "q8")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("config", "about", "texts"),
    [
        ({}, {"quant_method": "aqlm"}, ("aqlm",)),
        ({}, {"quant_method": ["hotcold"] * 1000}, ("hotcold",)),
        ({}, {"version": 4}, ("quantization_config.version is 4",)),
        ({}, {"version": 3}, ("describes no format",)),  # of 8 bits
        ({}, {"minimum": True}, ("describes no format",)),
        ({}, {"bits": [8]}, ("bits is [8]",)),
        ({}, {"group_size": 64}, ("group_size is 64",)),
        ({}, {"bits": 4}, ("q_proj", "[64, 68]", "[64, 36]")),
        ({"quantization_config": None}, {}, ("q_proj", "U8")),
        ({"hidden_size": 80}, {}, ("rows of 80 weights",)),
    ],
)
def test_other_quantizations_and_a_config_of_other_tensors(
    config: dict[str, Any], about: dict[str, Any], texts: tuple[str, ...], quantized: Path
) -> None:
    values = json.loads((quantized / "config.json").read_text())
    values["quantization_config"] |= about
    change_config(quantized, **(values | config))
    for call in (read_model, loaded):
        refused((ConfigError, CheckpointError), partial(call, quantized), *texts)


def zeros(rows: np.ndarray) -> np.ndarray:
    return np.zeros(rows.shape, np.uint8)


def with_scale(scale: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(rows: np.ndarray) -> np.ndarray:
        rows[-1, -2:] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        return rows

    return change


@pytest.mark.parametrize(
    ("name", "edit", "texts"),
    [
        ("layers.1.self_attn.k_proj", lambda rows: rows[:, :-2], ("shape", "66", "68")),
        ("layers.1.mlp.down_proj", lambda rows: rows[:, :-2], ("shape", "66", "68")),
        ("layers.1.mlp.down_proj", lambda rows: rows.T, ("[100, 68]",)),  # not by neuron
        ("layers.1.mlp.gate_proj", with_scale(np.nan), ("scales",)),
        ("layers.1.mlp.down_proj", with_scale(np.inf), ("scales",)),
        ("layers.1.self_attn.q_proj", with_scale(-np.inf), ("scales",)),
        ("embed_tokens", zeros, ("must not be quantized",)),
        ("norm", zeros, ("must not be quantized",)),
    ],
)
def test_damaged_tensors(
    name: str, edit: Callable[[np.ndarray], np.ndarray], texts: tuple[str, ...], quantized: Path
) -> None:
    tensors = load_file(quantized / WEIGHTS)
    tensors[f"model.{name}.weight"] = np.ascontiguousarray(edit(tensors[f"model.{name}.weight"]))
    save_file(tensors, quantized / WEIGHTS)
    refused(CheckpointError, partial(loaded, quantized), name.rpartition(".")[2], *texts)
