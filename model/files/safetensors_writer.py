"""Writes a safetensors checkpoint tensor by tensor, headers first: no tensor is held in memory.

The format (https://github.com/huggingface/safetensors): an unsigned 64-bit little-endian header
length, the header as JSON (name -> dtype, shape, data_offsets), the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from hotcold.model.byte_sizes import size_text
from hotcold.model.errors import HotcoldError
from hotcold.numba_kernels.formats import DTYPES, FLOAT_FORMATS, FORMATS, WeightDtype

_ITEM_BYTES = {kind.short.upper(): dtype.itemsize for dtype, kind in FLOAT_FORMATS.items()}
_ITEM_BYTES["U8"] = 1
_BLOCK_ITEMS = 1 << 23
_HEADER_ALIGNMENT = 8
_SPARE_DISK_BYTES = 64 << 20


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name and shape in the file.

    `format_name`, as safetensors spells it, is that of bits written unchanged; "" means the
    writer's dtype.
    """

    name: str
    shape: tuple[int, ...]
    format_name: str = ""

    @property
    def num_items(self) -> int:
        """Number of weights, or of bytes of quantized rows."""
        return math.prod(self.shape)


class SafetensorsWriter:
    """Takes the tensors of `specs` in their order, converts them and writes them out.

    The file is `model.safetensors`; while it is incomplete, its name ends in `.part`.
    Use as a context manager: an error removes the incomplete file.
    Errors:  ValueError where a tensor is not the next of `specs`, or some were never written
    """

    def __init__(
        self,
        directory: Path,
        specs: Sequence[TensorSpec],
        dtype: WeightDtype,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self._path = directory / "model.safetensors"
        self._part = directory / "model.safetensors.part"
        self._dtype: torch.dtype = getattr(torch, dtype)
        given = FORMATS[DTYPES[dtype]].short.upper()
        specs = [replace(spec, format_name=spec.format_name or given) for spec in specs]
        self._waiting = deque(specs)
        self._on_bytes = on_bytes
        self._file: BinaryIO | None = None
        self.num_bytes = sum(map(_num_bytes, specs))

    def __enter__(self) -> SafetensorsWriter:
        self._file = self._part.open("wb")
        return self

    def __exit__(self, error_type: object, *rest: object) -> None:
        try:
            if error_type is None:
                self._finish()
        finally:
            if self._file is not None:
                with suppress(OSError):  # of buffered bytes
                    self._file.close()
                self._part.unlink(missing_ok=True)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor. `tensor` is of any float dtype, on the CPU."""
        self._begin(name, tuple(tensor.shape))
        for block in tensor.contiguous().view(-1).split(_BLOCK_ITEMS):
            self._write(block.to(self._dtype).view(torch.uint8).numpy())

    def write_bits(self, name: str, bits: np.ndarray) -> None:
        """Write the next tensor's bits unchanged; they are in the spec's format."""
        expected = self._begin(name, bits.shape)
        if bits.itemsize != _ITEM_BYTES[expected.format_name]:
            raise ValueError(f"got {name} {bits.dtype}, expected {expected}")
        flat = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
        for start in range(0, flat.size, 4 * _BLOCK_ITEMS):
            self._write(flat[start : start + 4 * _BLOCK_ITEMS])

    def _begin(self, name: str, shape: tuple[int, ...]) -> TensorSpec:
        """Return the next spec. Errors: ValueError where name or shape differ."""
        assert self._file is not None
        if not self._file.tell():
            self._file.write(_header(self._waiting))
        expected = self._waiting.popleft() if self._waiting else None
        if expected is None or (name, shape) != (expected.name, expected.shape):
            raise ValueError(f"got {name} {shape}, expected {expected}")
        return expected

    def _write(self, data: np.ndarray) -> None:
        assert self._file is not None
        self._file.write(data.data)
        self._on_bytes(data.nbytes)

    def _finish(self) -> None:
        """Give the file its name. Errors: ValueError where tensors are missing."""
        assert self._file is not None
        if self._waiting:
            raise ValueError(f"{len(self._waiting)} tensors missing, next {self._waiting[0].name}")
        self._file.flush()
        os.fsync(self._file.fileno())  # whole before it has its name
        self._file.close()
        self._part.rename(self._path)
        self._file = None


def require_disk_space(folder: Path, num_bytes: int, remedy: str, freed_bytes: int = 0) -> None:
    """Raise HotcoldError, ending in `remedy`, where the disk of `folder` is too full.

    The folder may not exist yet. `freed_bytes` are those of files that will be removed first.
    """
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    free_bytes = shutil.disk_usage(place).free + freed_bytes
    if num_bytes + _SPARE_DISK_BYTES > free_bytes:
        raise HotcoldError(
            f"the model takes {size_text(num_bytes)} and leaves {size_text(_SPARE_DISK_BYTES)} "
            f"spare, but {folder} has {size_text(free_bytes)} free; {remedy}"
        )


def _num_bytes(spec: TensorSpec) -> int:
    return spec.num_items * _ITEM_BYTES[spec.format_name]


def _header(specs: Iterable[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + _num_bytes(spec)
        entries[spec.name] = {
            "dtype": spec.format_name,
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
