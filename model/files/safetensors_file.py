"""One .safetensors file: its header checked in full, its tensors as views of the mapped bytes.

Layout: 8 bytes N (little-endian), N bytes of JSON {name: {dtype, shape, data_offsets}}, then data.
Source: the format's description in https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.model.config.json_reader import parse_json
from hotcold.model.errors import LONGEST_POINTER, CheckpointError, refuse_pointer, shown
from hotcold.model.mapped_file import MappedFile
from hotcold.numba_kernels.formats import FLOAT_FORMATS

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
# The project's weight bits: uint16 is float16, int16 is bfloat16. Other formats are known only by
# their size, for the file's layout to be checked.
BIT_DTYPES = {kind.short.upper(): dtype for dtype, kind in FLOAT_FORMATS.items()}
_ARRAY_DTYPES = BIT_DTYPES | {"U8": np.dtype(np.uint8)}  # U8 is bytes of quantized rows
_ITEM_BITS = {"F32": 32, "F16": 16, "BF16": 16, "F64": 64, "C64": 64, "BOOL": 8, "U8": 8, "I8": 8}
_ITEM_BITS |= {"I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64}
_ITEM_BITS |= {"F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: `start` to `end` in bytes from the start of the file."""

    format_name: str
    shape: tuple[int, ...]
    start: int
    end: int


class WeightFile:
    """A model's tensors in one kind of files, by name: the interface, and defaults."""

    entries: dict[str, TensorEntry]
    path: Path
    paths: tuple[Path, ...]

    def array(self, name: str) -> np.ndarray:
        """Return the tensor's items, read-only, maybe unaligned."""
        raise NotImplementedError

    def mapped_file(self, name: str) -> MappedFile | None:
        """Return the mapped file that holds the tensor; None where torch reads the file."""
        return None

    def stored_bytes(self, name: str) -> np.ndarray:
        """Return the tensor's bytes as the file has them, whatever its format: uint8."""
        file = self.mapped_file(name)
        assert file is not None
        return file.view(*self._span(name))

    def read_ahead(self, name: str) -> None:
        """Have the kernel read all of the tensor now, where the file is mapped."""
        if (file := self.mapped_file(name)) is not None:
            file.read_ahead(*self._span(name))

    def release(self, name: str) -> None:
        """Unload the tensor's pages, where the file is mapped; reading maps them again."""
        if (file := self.mapped_file(name)) is not None:
            file.release(*self._span(name))

    def advise_random(self, name: str) -> None:
        """Read single rows of the tensor from now on: the kernel reads nothing ahead."""
        if (file := self.mapped_file(name)) is not None:
            file.advise_random(*self._span(name))

    def _span(self, name: str) -> tuple[int, int]:
        entry = self.entries[name]
        return entry.start, entry.end

    def own_name(self, name: str) -> str:
        """Return the file's name of a tensor, even of one that is missing."""
        return name

    def all_names(self, name: str) -> tuple[str, ...]:
        """Return the file's names of all tensors that one is read from."""
        return (self.own_name(name),)

    def block_dtype(self, name: str) -> np.dtype | None:
        """Return the dtype of rows that are made of a matrix; None where it says its format."""
        return None

    def loaded_dtype(self, name: str) -> np.dtype | None:
        """Return the matrix's dtype in memory, the same in all layers; None for the stored one."""
        return None

    def own_dtype(self, name: str) -> np.dtype | None:
        """Return the dtype in memory that suits the matrix alone; None for the stored one."""
        return None

    def is_by_neurons(self, name: str) -> bool:
        """Whether a down projection is stored transposed, so that its rows are neurons."""
        return False

    def conversion_note(self, by_layer: Collection[str] = ()) -> str:
        """Return a line about formats that are converted in memory; "" where none are.

        Roles in `by_layer` have their `own_dtype`, the others their `loaded_dtype`.
        """
        return ""


class SafetensorsFile(WeightFile):
    """The tensors of one file, mapped on first use.

    Errors:  CheckpointError naming file and tensor, on construction, for anything mis-declared
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as stream:
                num_bytes = path.stat().st_size
                self.entries = _read_header(path, stream, num_bytes)
        except OSError as problem:
            raise CheckpointError(f"{path}: cannot be read ({problem.strerror})") from None
        self.paths = (path,)
        self._file = MappedFile(path)

    def array(self, name: str) -> np.ndarray:
        """Return a read-only view of the tensor's mapped bits, maybe unaligned."""
        entry = self.entries[name]
        bits = self._file.view(entry.start, entry.end).view(_ARRAY_DTYPES[entry.format_name])
        return bits.reshape(entry.shape)

    def mapped_file(self, name: str) -> MappedFile:
        """Return the file that holds the tensor."""
        return self._file


def _read_header(path: Path, stream: Any, num_bytes: int) -> dict[str, TensorEntry]:
    length_bytes = stream.read(8)
    length = int.from_bytes(length_bytes, "little")
    if num_bytes <= LONGEST_POINTER:
        refuse_pointer(path, length_bytes + stream.read(LONGEST_POINTER), CheckpointError)
        stream.seek(len(length_bytes))
    if len(length_bytes) < 8 or 8 + length > num_bytes:
        raise CheckpointError(f"{path}: truncated, its header is incomplete; download it again")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: header of {length} bytes is too large; download it again")
    text = stream.read(length)
    if not text.startswith(b"{"):
        raise CheckpointError(f"{path}: not a safetensors file; download it again")
    header = parse_json(text, str(path), CheckpointError)
    header.pop("__metadata__", None)
    data_bytes = num_bytes - 8 - length
    entries = {name: _entry(path, name, header[name], data_bytes, 8 + length) for name in header}
    _check_cover(path, entries, 8 + length, num_bytes)
    return entries


def _entry(path: Path, name: str, info: Any, data_bytes: int, data_start: int) -> TensorEntry:
    def fail(problem: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {shown(name)} {problem}; download it again")

    if not isinstance(info, dict):
        raise fail("has no description")
    format_name: Any = info.get("dtype")
    shape: Any = info.get("shape")
    offsets: Any = info.get("data_offsets")
    if not isinstance(format_name, str) or format_name not in _ITEM_BITS:
        raise fail(f"has the unknown dtype {shown(format_name)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise fail(f"has the shape {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fail(f"has the data offsets {shown(offsets)}")
    if offsets[1] > data_bytes:
        raise fail(f"ends at byte {offsets[1]} of {data_bytes}: the file is truncated")
    num_bits = math.prod(shape) * _ITEM_BITS[format_name]
    if num_bits != 8 * (offsets[1] - offsets[0]):
        raise fail(
            f"is declared {format_name} {shown(shape)} but has {offsets[1] - offsets[0]} bytes"
        )
    return TensorEntry(format_name, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _are_sizes(value: Any) -> bool:
    """Whether `value` is a list of whole numbers that an offset into a file can be."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _check_cover(path: Path, entries: dict[str, TensorEntry], start: int, end: int) -> None:
    """Check that the tensors cover the data exactly, without overlap and without a hole."""
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            fault = "overlaps another tensor" if entry.start < position else "follows a gap"
            raise CheckpointError(f"{path}: tensor {shown(name)} {fault}; download it again")
        position = entry.end
    if position != end:
        raise CheckpointError(
            f"{path}: {end - position} bytes belong to no tensor; download it again"
        )
