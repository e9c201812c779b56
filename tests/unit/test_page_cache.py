"""Files of a model larger than memory leave nothing in the page cache once they were read."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hotcold.model.config.build import read_config
from hotcold.model.config.families import tensor_names
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.mapped_file import forget_pages
from hotcold.model.weights import tensor_reader
from hotcold.model.weights.embedding import load_embedding
from hotcold.model.weights.tensor_reader import TensorReader
from tests.tiny_models import make_tiny

_PAGE = mmap.PAGESIZE


def cached_bytes(path: Path) -> int:
    """Of a file, by all processes together."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, mmap.MAP_PRIVATE) as region:
        region.madvise(mmap.MADV_RANDOM)
        address = ctypes.c_char.from_buffer(region)
        pages = (ctypes.c_ubyte * -(-len(region) // _PAGE))()
        found = libc.mincore(ctypes.byref(address), ctypes.c_size_t(len(region)), pages)
        del address
        assert found == 0
        return sum(page & 1 for page in pages) * _PAGE


def emptied(path: Path) -> Path:
    """The file, none of it in the page cache; where the file system cannot do that, a skip."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    forget_pages(path)
    if cached_bytes(path):
        pytest.skip("this file system keeps pages")
    return path


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A checkpoint of 32 MB in two tensors, more than the kernel reads ahead."""
    values = torch.zeros((8192, 512))
    save_file({"a": values, "b": values + 1}, tmp_path / "model.safetensors")
    return emptied(tmp_path / "model.safetensors")


@pytest.mark.parametrize("keeps", [True, False])
def test_rows_that_were_read(large: Path, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reader, "_RELEASED_BYTES", 4 << 20)
    monkeypatch.setattr(tensor_reader, "BLOCK_BYTES", 1 << 20)
    released = noted_releases(monkeypatch)
    into = np.empty((8192, 512), np.float32)
    with TensorReader(Checkpoint(large.parent, keeps)) as reader:
        reader.rows("a", 8192, into)
        reader.rows("b", 8192, into)
    expected = ["a", "b"] if keeps else 5 * ["a"] + 5 * ["b"]
    assert [name for names in released for name in names] == expected
    if keeps:
        assert cached_bytes(large) > 30 << 20
    else:
        assert cached_bytes(large) < 9 << 20  # what is being read ahead cannot be let go of


@pytest.mark.parametrize("keeps", [True, False])
def test_parts_that_were_read_together(
    large: Path, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of experts, each with a part of a tensor: it is unloaded once."""
    released = noted_releases(monkeypatch)
    into = np.empty((16384, 512), np.float32)
    with TensorReader(Checkpoint(large.parent, keeps)) as reader, reader.together():
        for begin in range(0, 8192, 256):
            ids = np.arange(begin, begin + 256, dtype=np.int32)
            reader.rows("a", 8192, into[begin : begin + 256], ids)
            reader.rows("b", 8192, into[8192 + begin : 8192 + begin + 256], ids)
    assert not into[:8192].any() and (into[8192:] == 1).all()
    assert released == [("a", "b")]


def noted_releases(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The names of each `Checkpoint.release` from now on."""
    released: list[tuple[str, ...]] = []
    release = Checkpoint.release

    def noted(checkpoint: Checkpoint, *names: str) -> None:
        released.append(names)
        release(checkpoint, *names)

    monkeypatch.setattr(Checkpoint, "release", noted)
    return released


@pytest.mark.parametrize("keeps", [True, False])
def test_token_rows_that_were_looked_up(tmp_path: Path, keeps: bool) -> None:
    config = read_config(make_tiny("llama-relu", tmp_path / "m"))
    config = replace(config, vocab_size=8192, hidden_size=512, embed_size=512)
    values = torch.arange(8192 * 512, dtype=torch.float32).reshape(8192, 512)
    file = tmp_path / "model.safetensors"
    names, norm = tensor_names(config), torch.ones(512)
    save_file({f"{names.tokens}.weight": values, f"{names.final_norm}.weight": norm}, file)
    embedding = load_embedding(Checkpoint(emptied(file).parent, keeps), config)
    assert (cached_bytes(file) > 15 << 20) == keeps
    ids = np.arange(0, 8000, 1000)
    np.testing.assert_array_equal(embedding.lookup(ids, ids), values[ids])
    assert (cached_bytes(file) > 1 << 20) == keeps


def test_a_models_identity_reads_little(large: Path, tmp_path: Path) -> None:
    other = make_tiny("llama-relu", tmp_path / "m")
    (large.parent / "config.json").write_text((other / "config.json").read_text())
    ModelIdentity.of(large.parent)
    assert cached_bytes(large) < 1 << 20
