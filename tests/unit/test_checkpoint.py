"""Weight files: views without copies, and one line for each way a file can be wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hotcold.model.errors import CheckpointError, HotcoldError
from hotcold.model.files.checkpoint import Checkpoint

TENSORS = {
    "model.a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "model.b.weight": torch.tensor([1.5, -2.0], dtype=torch.float16),
    "c": torch.tensor([[0.5]], dtype=torch.bfloat16),
}


def write_raw(path: Path, header: Any, data: bytes, padding: int = 0) -> None:
    """Write a safetensors file from a header as JSON (or raw bytes) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode() + b" " * padding
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(start: int, end: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    shape = [(end - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def refused(path: Path) -> str:
    """Return the one line that refuses the checkpoint in `path`."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint = Checkpoint(path)
        for name in checkpoint.names():
            checkpoint.array(name)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 1000
    return text


def test_arrays_are_the_bits_of_the_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names() == sorted(TENSORS)
    a, b, c = (checkpoint.array(name) for name in TENSORS)
    np.testing.assert_array_equal(a, TENSORS["model.a.weight"].numpy())
    assert b.dtype == np.uint16 and c.dtype == np.int16
    assert b.view(np.float16).tolist() == [1.5, -2.0]
    assert c.tolist() == [[0x3F00]]
    assert not a.flags.writeable and not a.flags.owndata
    assert checkpoint.shape("a.weight") == (2, 3)
    assert checkpoint.num_bytes("b.weight") == 4
    assert checkpoint.dtype("a.weight") == np.float32
    assert checkpoint.has("a.weight") and not checkpoint.has("weight")


@pytest.mark.parametrize("padding", [1, 6])
def test_unaligned_empty_and_scalar_tensors(padding: int, tmp_path: Path) -> None:
    header = {"none": entry(0, 0, shape=[0, 3]), "one": entry(0, 4, shape=[])}
    write_raw(tmp_path / "model.safetensors", header, struct.pack("<f", 2.5), padding)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.array("none").shape == (0, 3)
    assert checkpoint.array("one") == np.float32(2.5)


@pytest.mark.parametrize(
    ("header", "num_bytes", "message"),
    [
        ({"x": entry(0, 40)}, 39, "truncated"),
        ({"x": entry(0, 8, shape=[3])}, 8, "invalid shape"),
        ({"x": entry(0, 8), "y": entry(4, 12)}, 12, "invalid offset for tensor `y`"),
        ({"x": entry(0, 8), "y": entry(12, 20)}, 20, "invalid offset for tensor `y`"),
        ({"x": entry(0, 8)}, 12, "not fully covered"),
        ({"x": entry(-8, 0, shape=[2])}, 8, "invalid value"),
        ({"x": entry(0, 8, "F32", [-1, -2])}, 8, "invalid value"),
        ({"x": entry(0, 8, "F32", [True, 2])}, 8, "invalid type"),
        ({"x": entry(0, 0, "F32", [1 << 40, 1 << 40])}, 0, "overflow"),
        ({"x": entry(0, 8, "F32", [1] * 60 + [2])}, 8, "described as"),
        ({"x": entry(0, 0, "F32", [0, 1 << 63])}, 0, "described as"),
        ({"x": entry(0, 8) | {"dtype": {"F32": None}}}, 8, "described as"),
        ({"x": []}, 0, "invalid length"),
        ({"x": ["F32", [2], [0, 8]]}, 8, "described as"),
        ({"x": entry(0, 8, "F64", [1])}, 8, "F64"),
        (b'{"x": %b, "x": %b}' % ((json.dumps(entry(0, 8)).encode(),) * 2), 8, "twice"),
        (b"{" + b'"x": {' * 50_000, 0, "JSON"),
        ({"\ud800\n": entry(0, 8, shape=[3])}, 8, "JSON"),
    ],
)
def test_mis_declared_tensors(header: Any, num_bytes: int, message: str, tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", header, bytes(num_bytes))
    text = refused(tmp_path)
    assert message in text
    assert str(tmp_path) in text


def test_files_without_a_header_and_no_files(tmp_path: Path) -> None:
    assert "no model.safetensors" in refused(tmp_path)
    path = tmp_path / "model.safetensors"
    for content in (b"", struct.pack("<Q", 1 << 63)):
        path.write_bytes(content)
        assert "truncated" in refused(tmp_path)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)  # a sparse file
    assert "too large" in refused(tmp_path)
    path.unlink()
    path.mkdir()
    assert "cannot be read" in refused(tmp_path)


def write_index(path: Path, weight_map: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "b": "two.safetensors"}, "two.safetensors"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "'b'"),
        ({"a": "../one.safetensors"}, "not a name beside it"),
        ({"a": "/etc/passwd"}, "not a name beside it"),
        ({"a": "..\\one.safetensors"}, "not a name beside it"),
        ({"a": "one\0.safetensors"}, "not a name beside it"),
        ({"a": "\ud800"}, "not there"),
        ({"a": 3}, "not a name beside it"),
        ({}, "weight_map"),
    ],
)
def test_bad_index(weight_map: Any, message: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"a": TENSORS["model.a.weight"]}, directory / "one.safetensors")
    save_file({"a": TENSORS["model.a.weight"]}, tmp_path / "one.safetensors")
    write_index(directory, weight_map)
    text = refused(directory)
    assert message in text and str(directory) in text


def test_torch_files(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    checkpoint = Checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.array("a.weight"), TENSORS["model.a.weight"].numpy())
    assert checkpoint.array("b.weight").view(np.float16).tolist() == [1.5, -2.0]
    assert checkpoint.array("c").tolist() == [[0x3F00]]
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert Checkpoint(tmp_path).array("c").tolist() == [[0x3F00]]


def test_damaged_torch_files_and_those_of_other_things(tmp_path: Path) -> None:
    for content in ({"x": 1}, {"x": Path("a")}):
        torch.save(content, tmp_path / "pytorch_model.bin")
        refused(tmp_path)
    for damaged in (b"", b"PK\x03\x04junk"):
        (tmp_path / "pytorch_model.bin").write_bytes(damaged)
        refused(tmp_path)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.none() | st.integers(0, 10_000),
)
def test_random_damage_never_escapes(
    edits: list[tuple[int, int]], cut: int | None, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    content = bytearray(file.read_bytes())
    for position, value in edits:
        content[position % len(content)] = value
    file.write_bytes(content[: None if cut is None else cut % len(content)])
    try:
        checkpoint = Checkpoint(tmp_path)
        for name in checkpoint.names():
            assert checkpoint.array(name).nbytes == checkpoint.num_bytes(name)
    except HotcoldError as error:
        assert "\n" not in str(error)


def test_what_was_read_does_not_stay_in_memory(tmp_path: Path) -> None:
    values = np.arange(1 << 22, dtype=np.float32).reshape(1024, -1)
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.from_numpy(values)}, path)
    checkpoint = Checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.array("weight"), values)
    assert resident_kb(path) > values.nbytes // 1024 * 0.9
    checkpoint.release("weight")
    assert resident_kb(path) < 64
    np.testing.assert_array_equal(checkpoint.array("weight"), values)


def resident_kb(path: Path) -> int:
    """Kilobytes of a mapped file that this process has in memory, as the kernel counts them."""
    kilobytes, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.endswith(str(path)):
            is_file = True
        elif "-" in line.split()[0]:
            is_file = False
        elif is_file and line.startswith("Rss:"):
            kilobytes += int(line.split()[1])
    return kilobytes
