"""`hotcold quantize` and reading its models: whole or not there, the same as quantizing late."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hotcold.actors.setup.preflight import read_model
from hotcold.model.config.build import read_config
from hotcold.model.errors import CheckpointError, ConfigError, HotcoldError, UsageError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.files.safetensors_writer import SafetensorsWriter
from hotcold.model.weights import quantized_checkpoint
from hotcold.model.weights.attention import load_attention
from hotcold.model.weights.embedding import load_embedding, load_head
from hotcold.model.weights.ffn import load_ffn
from hotcold.model.weights.quantized_checkpoint import write_quantized
from hotcold.numba_kernels.formats import Q8, row_items
from tests.e2e.commands import Outcome, run_main
from tests.quantized_models import make_model
from tests.tiny_models import make_tiny

WEIGHTS = "model.safetensors"


def failed(done: Outcome, *texts: str) -> None:
    assert done.refusal.startswith("hotcold: error: ")
    for text in texts:
        assert text in done.refusal


def all_arrays(path: Path, dtype: str = "") -> dict[str, np.ndarray]:
    """All that services load."""
    config, checkpoint = read_config(path), Checkpoint(path)
    ids = [np.arange(config.ffn_size, dtype=np.int32)[::-1].copy()] * config.num_layers
    parts = [
        load_attention(checkpoint, config, dtype=dtype),
        load_ffn(checkpoint, config, ids, include_down_bias=True, dtype=dtype),
        load_embedding(checkpoint, config),
        load_head(checkpoint, config, dtype=dtype),
    ]
    return {
        name: value
        for part in parts
        for name, value in vars(part).items()
        if isinstance(value, np.ndarray)
    }


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
    assert run_main("quantize", path, out, "--dtype", dtype).status == 0
    late, stored = all_arrays(path, dtype), all_arrays(out)
    assert late.keys() == stored.keys()
    for name, array in late.items():
        assert stored[name].dtype == array.dtype, name
        assert stored[name].tobytes() == array.tobytes(), name
    found = read_model(out)
    assert found.dtype == dtype and found == read_model(path, dtype).__class__(
        **(vars(read_model(path, dtype)) | {"name": found.name})
    )
    assert sorted(tmp_path.iterdir()) == [path, out]


def test_the_file_is_as_described(tmp_path: Path) -> None:
    path, out = make_model("q-falcon", tmp_path / "m"), tmp_path / "out"
    report = run_main("quantize", "--dtype", "q8", "--json", path, out).report
    assert (report["path"], report["dtype"]) == (str(out), "q8")
    config = read_config(path)
    before, after = load_file(path / WEIGHTS), load_file(out / WEIGHTS)
    assert before.keys() == after.keys()
    num_quantized = 0
    for name, tensor in after.items():
        if tensor.ndim == 1 or "embed" in name:
            assert tensor.tobytes() == before[name].tobytes(), name
            continue
        num_quantized += 1
        rows, width = before[name].shape
        if "dense_4h_to_h" in name:
            rows, width = config.ffn_size, config.hidden_size
        assert tensor.dtype == np.uint8, name
        assert tensor.shape == (rows, row_items(Q8, width)), name
    assert report["num_quantized"] == num_quantized
    assert report["num_copied"] == len(after) - num_quantized
    assert report["num_bytes"] == sum(tensor.nbytes for tensor in after.values())
    values = json.loads((out / "config.json").read_text())
    about = values.pop("quantization_config")
    assert about == {"quant_method": "hotcold", "bits": 8, "group_size": 32, "version": 1}
    assert values == json.loads((path / "config.json").read_text())


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


def refused(error: type[HotcoldError], path: Path, *texts: str) -> None:
    for call in (read_model, all_arrays):
        with pytest.raises(error) as caught:
            call(path)
        assert "\n" not in str(caught.value)
        for text in texts:
            assert text in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": ["hotcold"] * 1000}, "hotcold"),
        ({"version": 4}, "quantization_config.version is 4"),
        ({"version": 3}, "describes no format"),  # of 8 bits
        ({"minimum": True}, "describes no format"),
        ({"bits": [8]}, "bits is [8]"),
        ({"group_size": 64}, "group_size is 64"),
    ],
)
def test_other_quantizations(changes: dict[str, Any], text: str, quantized: Path) -> None:
    values = json.loads((quantized / "config.json").read_text())
    values["quantization_config"] |= changes
    (quantized / "config.json").write_text(json.dumps(values))
    refused(ConfigError, quantized, text)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(quantized).dtype("layers.0.mlp.up_proj.weight")
    assert text in str(caught.value)


def change(path: Path, name: str, edit: Callable[[np.ndarray], np.ndarray]) -> None:
    tensors = load_file(path / WEIGHTS)
    tensors[name] = np.ascontiguousarray(edit(tensors[name]))
    save_file(tensors, path / WEIGHTS)


def _poisoned(scale: float) -> Callable[[np.ndarray], np.ndarray]:
    def poison(rows: np.ndarray) -> np.ndarray:
        rows[-1, -2:] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        return rows

    return poison


@pytest.mark.parametrize(
    ("name", "edit", "texts"),
    [
        ("layers.1.self_attn.k_proj", lambda rows: rows[:, :-2], ("shape", "66", "68")),
        ("layers.1.mlp.down_proj", lambda rows: rows[:, :-2], ("shape", "66", "68")),
        ("layers.1.mlp.down_proj", lambda rows: rows.T, ("[100, 68]",)),  # not by neuron
        ("layers.1.mlp.gate_proj", _poisoned(np.nan), ("scales",)),
        ("layers.1.mlp.down_proj", _poisoned(np.inf), ("scales",)),
        ("layers.1.self_attn.q_proj", _poisoned(-np.inf), ("scales",)),
        ("embed_tokens", lambda a: np.zeros(a.shape, np.uint8), ("must not be quantized",)),
        ("norm", lambda a: np.zeros(a.shape, np.uint8), ("must not be quantized",)),
    ],
)
def test_damaged_tensors(
    name: str, edit: Callable[[np.ndarray], np.ndarray], texts: tuple[str, ...], quantized: Path
) -> None:
    change(quantized, f"model.{name}.weight", edit)
    with pytest.raises(CheckpointError) as caught:
        all_arrays(quantized)
    assert "\n" not in str(caught.value)
    for text in (name.rpartition(".")[2], *texts):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("config", "about", "texts"),
    [
        ({}, {"bits": 4}, ("q_proj", "[64, 68]", "[64, 36]")),
        ({"quantization_config": None}, {}, ("q_proj", "U8")),
        ({"hidden_size": 80}, {}, ("rows of 80 weights",)),
    ],
)
def test_a_config_of_other_tensors(
    config: dict[str, Any], about: dict[str, Any], texts: tuple[str, ...], quantized: Path
) -> None:
    values = json.loads((quantized / "config.json").read_text())
    values["quantization_config"] |= about
    values = {name: value for name, value in (values | config).items() if value is not None}
    (quantized / "config.json").write_text(json.dumps(values))
    refused(CheckpointError, quantized, *texts)
