"""`hotcold quantize` and reading its models: whole or not there, the same as quantizing late."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hotcold.actors.setup.preflight import read_model
from hotcold.jobs.cli import main
from hotcold.model.config.build import read_config
from hotcold.model.errors import CheckpointError, ConfigError, HotcoldError, UsageError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.files.safetensors_writer import SafetensorsWriter
from hotcold.model.weights import quantized_checkpoint
from hotcold.model.weights.attention import load_attention
from hotcold.model.weights.embedding import load_embedding, load_head
from hotcold.model.weights.ffn import load_ffn, load_gate
from hotcold.model.weights.quantized_checkpoint import write_quantized
from hotcold.numba_kernels.formats import Q8, row_items
from hotcold.predictors.fitting.layer_data import as_float32
from tests.quantized_models import MODELS, make_model
from tests.reference import reference_logits
from tests.tiny_models import make_tiny

Run = Callable[..., tuple[int, str, str]]
WEIGHTS = "model.safetensors"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_with(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run_with


def failed(result: tuple[int, str, str], *texts: str) -> None:
    status, out, err = result
    assert (status, out) == (1, "")
    assert err.startswith("hotcold: error: ") and err.count("\n") == 1
    for text in texts:
        assert text in err


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


@pytest.mark.parametrize("dtype", ["q8", "q4_1", "q4", "mxfp4"])
@pytest.mark.parametrize("model", MODELS)
def test_loading_it_is_quantizing_late(model: str, dtype: str, run: Run, tmp_path: Path) -> None:
    path, out = make_model(model, tmp_path / "m"), tmp_path / "out"
    assert run("quantize", path, out, "--dtype", dtype)[0] == 0
    late, stored = all_arrays(path, dtype), all_arrays(out)
    assert late.keys() == stored.keys()
    for name, array in late.items():
        assert stored[name].dtype == array.dtype, name
        assert stored[name].tobytes() == array.tobytes(), name
    found = read_model(out)
    assert found.dtype == dtype and found == read_model(path, dtype).__class__(
        **(vars(read_model(path, dtype)) | {"name": found.name})
    )
    ids = np.random.default_rng(5).integers(0, 101, 9)
    np.testing.assert_array_equal(reference_logits(out, ids), reference_logits(path, ids, dtype))
    assert sorted(tmp_path.iterdir()) == [path, out]


@pytest.mark.parametrize("model", ["q-llama", "q-opt", "q-falcon"])
def test_the_file_is_as_described(model: str, run: Run, tmp_path: Path) -> None:
    path, out = make_model(model, tmp_path / "m"), tmp_path / "out"
    status, text, _err = run("quantize", "--dtype", "q8", "--json", path, out)
    report = json.loads(text.splitlines()[-1])
    assert (status, report["path"], report["dtype"]) == (0, str(out), "q8")
    config = read_config(path)
    before, after = load_file(path / WEIGHTS), load_file(out / WEIGHTS)
    assert before.keys() == after.keys()
    num_quantized = 0
    for name, tensor in after.items():
        is_table = "embed" in name
        if tensor.ndim == 1 or is_table:
            assert tensor.tobytes() == before[name].tobytes(), name
            continue
        num_quantized += 1
        rows, width = before[name].shape
        if any(part in name for part in ("down_proj", "fc2", "dense_4h_to_h")):
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


def test_small_files_come_along(run: Run, tmp_path: Path) -> None:
    path, out = make_model("q-llama", tmp_path / "m", shards=3), tmp_path / "deep" / "out"
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "LICENSE",
        "model.gguf",
        "old.bin",
    ):
        (path / name).write_text(name)
    (path / "hotcold").mkdir()
    (path / "hotcold" / "profile.safetensors").write_text("x")
    assert run("quantize", path, out, "--dtype", "q4")[0] == 0
    assert sorted(file.name for file in out.iterdir()) == [
        "LICENSE", "chat_template.jinja", "config.json", "generation_config.json", WEIGHTS,
        "tokenizer.json",
    ]  # fmt: skip
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"


def test_no_file_from_elsewhere_comes_along(run: Run, tmp_path: Path) -> None:
    """A folder from the network may link to any file of the user, whose copy would be published."""
    path, out = make_model("q-llama", tmp_path / "m"), tmp_path / "out"
    (tmp_path / "key").write_text("secret")
    (path / "LICENSE").symlink_to("../key")
    status, _, err = run("quantize", path, out, "--dtype", "q4")
    assert (status, err.count("\n")) == (1, 1) and "LICENSE: is a link out of the model's" in err
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
        assert run("quantize", folder, tmp_path / name, "--dtype", "q4")[0] == 0
        assert (tmp_path / name / "same").read_text() == "own"
        assert not (tmp_path / name / "same").is_symlink()


def test_it_is_another_model(run: Run, tmp_path: Path) -> None:
    path = make_model("q-opt", tmp_path / "m")
    digests = {ModelIdentity.of(path).digest}
    for dtype in ("q8", "q4"):
        assert run("quantize", path, tmp_path / dtype, "--dtype", dtype)[0] == 0
        digests.add(ModelIdentity.of(tmp_path / dtype).digest)
    assert len(digests) == 3
    flipped = tmp_path / "q8" / WEIGHTS
    tensors = load_file(flipped)
    tensors["model.decoder.layers.0.fc1.weight"][0, 0] ^= 1
    save_file(tensors, flipped)
    assert ModelIdentity.of(tmp_path / "q8").digest not in digests


def test_gates_for_predictors(run: Run, tmp_path: Path) -> None:
    path, out = make_model("q-llama", tmp_path / "m"), tmp_path / "out"
    assert run("quantize", path, out, "--dtype", "q8")[0] == 0
    config = read_config(out)
    gate, _bias = load_gate(Checkpoint(out), config, 1)
    plain, _bias = load_gate(Checkpoint(path), config, 1)
    assert gate.nbytes == config.ffn_size * row_items(Q8, config.hidden_size)
    difference = as_float32(gate) - as_float32(plain)
    assert 0 < float(difference.abs().max()) <= float(as_float32(plain).abs().max()) / 127


def test_what_is_refused(run: Run, tmp_path: Path) -> None:
    path, out = make_model("q-llama", tmp_path / "m"), tmp_path / "out"
    assert run("quantize", path, out, "--dtype", "q8")[0] == 0
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    failed(run("quantize", path, out, "--dtype", "q4"), "exists")
    failed(run("quantize", path, out / WEIGHTS, "--dtype", "q4"), "exists")
    failed(run("quantize", path, out / WEIGHTS / "x", "--dtype", "q4"), "cannot be made")
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    for dtype in ("q8", "q4"):
        failed(run("quantize", out, tmp_path / "again", "--dtype", dtype), "already")
    narrow = make_tiny("llama-relu", tmp_path / "narrow")
    failed(run("quantize", narrow, tmp_path / "again", "--dtype", "q8"), "rows of 48")
    failed(run("quantize", tmp_path / "none", tmp_path / "again", "--dtype", "q8"), "none")
    assert run("quantize", path, tmp_path / "again")[0] == 2
    assert run("quantize", path, tmp_path / "again", "--dtype", "q5")[0] == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m", "narrow", "out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_run_leaves_nothing(
    error: BaseException, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    status, _out, err = run("quantize", path, out, "--dtype", "q8")
    assert (status, list(tmp_path.iterdir())) == (
        (130, [path]) if isinstance(error, KeyboardInterrupt) else (1, [path])
    )
    assert "Traceback" not in err and ("No space" in err) == isinstance(error, OSError)


def test_a_full_disk_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model("q-llama", tmp_path / "m")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(quantized_checkpoint.shutil, "disk_usage", lambda directory: usage)
    with pytest.raises(HotcoldError, match="free"):
        write_quantized(path, tmp_path / "out", "q8")
    assert list(tmp_path.iterdir()) == [path]


def test_bad_weights_leave_nothing(run: Run, tmp_path: Path) -> None:
    path = make_model("q-llama", tmp_path / "m")
    for name in (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.2.mlp.up_proj.weight",
    ):
        tensors = load_file(path / WEIGHTS)
        tensors[name].reshape(-1)[-1] = np.nan
        save_file(tensors, tmp_path / WEIGHTS)
        bad = tmp_path / f"bad-{name}"
        shutil.copytree(path, bad)
        os.replace(tmp_path / WEIGHTS, bad / WEIGHTS)
        failed(run("quantize", bad, tmp_path / "out", "--dtype", "q8"), name[-12:], "NaN")
    assert not (tmp_path / "out").exists()


def test_on_a_quantized_model(run: Run, tmp_path: Path) -> None:
    path, out = make_model("q-llama", tmp_path / "m"), tmp_path / "out"
    assert run("quantize", path, out, "--dtype", "q8")[0] == 0
    assert read_model(out, "q8").dtype == read_model(out).dtype == "q8"
    with pytest.raises(UsageError, match="already") as caught:
        read_model(out, "q4")
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="already"):
        load_head(Checkpoint(out), read_config(out), dtype="q4")
    sizes = {}
    for arguments in ((path,), (path, "--dtype", "q8"), (out,), (path, "--dtype", "q4")):
        status, text, _err = run("doctor", "--no-measure", "--json", *arguments)
        assert status == 0
        sizes[arguments] = json.loads(text.splitlines()[-1])["model"]["total_bytes"]
    f16, late, stored, q4 = sizes.values()
    assert q4 < late == stored < f16


@pytest.mark.parametrize(
    "command", ["generate", "chat", "perplexity", "plan", "doctor", "bench decode"]
)
def test_commands_take_the_dtype(command: str, run: Run, tmp_path: Path) -> None:
    assert "--dtype [f16|bf16|q8|q4_1|q4|mxfp4]" in run(*command.split(), "--help")[1]
    path = make_tiny("llama-relu", tmp_path)
    own = {"generate": ["--prompt-ids", "1"], "doctor": ["--no-measure"]}.get(command, [])
    if command not in ("chat", "perplexity"):  # which ask for a tokenizer first
        failed(run(*command.split(), path, *own, "--dtype", "q8"), "--dtype q8", "rows of 48")


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
        ({"quant_method": "awq", "version": "gemm"}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": None}, "None"),
        ({"quant_method": ["hotcold"] * 1000}, "hotcold"),
        ({"version": 4}, "quantization_config.version is 4"),
        ({"version": 2}, "describes no format"),
        ({"version": 3}, "describes no format"),  # of 8 bits
        ({"minimum": True}, "describes no format"),
        ({"version": True}, "version is True"),
        ({"version": None}, "version is None"),
        ({"bits": 5}, "bits is 5"),
        ({"bits": 8.0}, "bits is 8.0"),
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


LAYER = "model.layers.1."


@pytest.mark.parametrize("name", ["self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_rows_of_another_length(name: str, quantized: Path) -> None:
    change(quantized, f"{LAYER}{name}.weight", lambda rows: rows[:, :-2])
    refused(CheckpointError, quantized, name, "shape", "66", "68")


def test_down_is_stored_by_neuron(quantized: Path) -> None:
    change(quantized, f"{LAYER}mlp.down_proj.weight", lambda rows: rows.T)
    refused(CheckpointError, quantized, "down_proj", "[100, 68]")


@pytest.mark.parametrize("name", ["mlp.gate_proj", "mlp.down_proj", "self_attn.q_proj"])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite(name: str, scale: float, quantized: Path) -> None:
    def poison(rows: np.ndarray) -> np.ndarray:
        rows[-1, -2:] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        return rows

    change(quantized, f"{LAYER}{name}.weight", poison)
    with pytest.raises(CheckpointError, match="scales") as caught:
        all_arrays(quantized)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_bits_that_are_not_the_tensors(quantized: Path) -> None:
    values = json.loads((quantized / "config.json").read_text())
    values["quantization_config"]["bits"] = 4
    (quantized / "config.json").write_text(json.dumps(values))
    refused(CheckpointError, quantized, "q_proj", "[64, 68]", "[64, 36]")
    del values["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(values))
    refused(CheckpointError, quantized, "q_proj", "U8")


def test_a_width_of_no_groups(quantized: Path) -> None:
    values = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(values | {"hidden_size": 80}))
    refused(CheckpointError, quantized, "rows of 80 weights")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_what_must_not_be_quantized(name: str, quantized: Path) -> None:
    change(quantized, name, lambda values: np.zeros(values.shape, np.uint8))
    refused(CheckpointError, quantized, name.removeprefix("model."), "must not be quantized")
