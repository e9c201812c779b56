"""A GGUF file's header: metadata and the tensors' names, types and places, read within bounds.

Layout, little-endian: "GGUF" (in PowerInfer's files "PWRI"), version uint32, number of tensors and
of keys uint64; for each key its name, a type and a value; for each tensor its name, sizes (the
row's first), type and offset; padding; the tensors' data. A string is its length uint64 and UTF-8
bytes; an array is the type and the number of its items. Every count is checked against the file's
length before it is used, and arrays are decoded only on request.
Source:  ggml/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.model.errors import LONGEST_POINTER, CheckpointError, refuse_pointer, shown
from hotcold.model.gguf.file_names import MAGICS
from hotcold.model.gguf.tensor_types import TENSOR_TYPES, TensorType, about_unknown

VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20
MAX_KEYS = MAX_TENSORS = 1 << 16
MAX_STRINGS = 1 << 21  # in all arrays of a file
MAX_NAME_BYTES = 1 << 12
MAX_DIMENSIONS = 4
MAX_SIZE = 1 << 40
DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 20
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
_MIN_KEY_BYTES, _MIN_TENSOR_BYTES = 14, 33


@dataclass(frozen=True)
class TensorInfo:
    """A tensor: its shape, the rows' width last, and its bytes, `start` to `end` in the file."""

    type: TensorType
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class ArrayValue:
    """An array of the metadata, decoded on request."""

    kind: int
    count: int
    start: int

    @property
    def holds_strings(self) -> bool:
        """Whether its items are strings."""
        return self.kind == _STRING


class HeaderReader:
    """Reads a mapped file from its start on.

    Errors:  CheckpointError, one line naming the file, for anything invalid
    """

    def __init__(self, path: Path, data: mmap):
        self._path = path
        self._data = data
        self._at = 0
        self._limit = min(len(data), MAX_HEADER_BYTES)
        self._num_strings = 0
        self.num_bytes = 0  # of the header, once `tensors` has read it
        self.num_tensors, num_keys = self._counts()
        self.metadata = self._metadata(num_keys)

    def fail(self, problem: str) -> CheckpointError:
        """Return (not raise) the error that the file has `problem`."""
        return CheckpointError(f"{self._path}: {problem}; download it again")

    def tensors(self) -> dict[str, TensorInfo]:
        """Read the tensors' entries, and check that they lie in the file without overlap."""
        declared: dict[str, tuple[TensorType, tuple[int, ...], int]] = {}
        unknown: Counter[int] = Counter()
        for _ in range(self.num_tensors):
            name = self._name("tensor")
            if name in declared:
                raise self.fail(f"tensor {shown(name)} is declared twice")
            found = self._tensor(name)
            if isinstance(found, int):
                unknown[found] += 1
            else:
                declared[name] = found
        if unknown:
            kinds = (f"{count} of {about_unknown(code)}" for code, count in unknown.most_common(3))
            raise CheckpointError(
                f"{self._path}: {unknown.total()} of {self.num_tensors} tensors cannot be read: "
                f"{'; '.join(kinds)}"
            )
        alignment = self.alignment()
        self.num_bytes = self._at
        data_start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, (kind, shape, offset) in declared.items():
            if offset % alignment:
                raise self.fail(f"tensor {shown(name)} is not aligned to {alignment} bytes")
            start = data_start + offset
            end = start + math.prod(shape) // kind.weights * kind.num_bytes
            if end > len(self._data):
                raise self.fail(
                    f"tensor {shown(name)} ends at byte {end} of {len(self._data)}: the file is "
                    "truncated"
                )
            tensors[name] = TensorInfo(kind, shape, start, end)
        self._require_no_overlap(tensors)
        return tensors

    def alignment(self) -> int:
        """Return the alignment of tensors' offsets, in bytes."""
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        is_good = type(value) is int and 0 < value <= _MAX_ALIGNMENT and value & (value - 1) == 0
        if not is_good:
            raise self.fail(f"general.alignment is {shown(value)}, which is no power of two")
        return int(value)

    def strings(self, array: ArrayValue) -> list[str]:
        """Decode an array of strings."""
        found, at = [], array.start
        for _ in range(array.count):
            (length,) = struct.unpack_from("<Q", self._data, at)
            found.append(self._text(at + 8, length))
            at += 8 + length
        return found

    def numbers(self, array: ArrayValue) -> np.ndarray:
        """Return an array of numbers, as a view of the file."""
        dtype = np.dtype("<" + _numpy_code(array.kind))
        return np.frombuffer(self._data, dtype, array.count, array.start)

    def _counts(self) -> tuple[int, int]:
        if self._limit < 24:
            raise self.fail(f"has {self._limit} bytes, so it is no GGUF file")
        magic, version, num_tensors, num_keys = struct.unpack_from("<4sIQQ", self._data, 0)
        self._at = 24
        if magic not in MAGICS:
            refuse_pointer(self._path, self._data[:LONGEST_POINTER], CheckpointError)
            raise self.fail(f"begins with {shown(magic)}, so it is no GGUF file")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            which = "in big-endian order" if swapped in VERSIONS else f"of version {version}"
            raise CheckpointError(
                f"{self._path}: is a GGUF file {which}; versions 2 and 3 in little-endian order "
                "are read, so convert the model anew"
            )
        self._require_count("tensors", num_tensors, MAX_TENSORS, _MIN_TENSOR_BYTES)
        self._require_count("keys", num_keys, MAX_KEYS, _MIN_KEY_BYTES)
        return num_tensors, num_keys

    def _metadata(self, num_keys: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(num_keys):
            name = self._name("key")
            if name in found:
                raise self.fail(f"key {shown(name)} is given twice")
            found[name] = self._value(name, self._scalar("I"))
        return found

    def _value(self, name: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(self._limit)
        if kind == _ARRAY:
            return self._array(name)
        if kind not in _SCALARS:
            raise self.fail(f"key {shown(name)} has the unknown type {kind}")
        value = self._scalar(_SCALARS[kind])
        if kind == _BOOL and value > 1:
            raise self.fail(f"key {shown(name)} is {value}, which is neither true nor false")
        return bool(value) if kind == _BOOL else value

    def _array(self, name: str) -> ArrayValue:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _ARRAY:
            raise self.fail(f"key {shown(name)} is an array of arrays, which is not read")
        if kind != _STRING and kind not in _SCALARS:
            raise self.fail(f"key {shown(name)} is an array of the unknown type {kind}")
        array = ArrayValue(kind, count, self._at)
        item_bytes = 8 if kind == _STRING else struct.calcsize("<" + _SCALARS[kind])
        self._require_count(f"items of key {shown(name)}", count, MAX_HEADER_BYTES, item_bytes)
        if kind != _STRING:
            self._at += count * item_bytes
            return array
        self._num_strings += count
        if self._num_strings > MAX_STRINGS:
            raise self.fail(f"holds more than {MAX_STRINGS} strings")
        self._skip_strings(count)
        return array

    def _skip_strings(self, count: int) -> None:
        unpack, data, at = struct.Struct("<Q").unpack_from, self._data, self._at
        last = self._limit - 8
        for _ in range(count):
            if at > last:
                raise self._too_short()
            at += 8 + unpack(data, at)[0]
        if at > self._limit:
            raise self._too_short()
        self._at = at

    def _tensor(self, name: str) -> tuple[TensorType, tuple[int, ...], int] | int:
        """A tensor's type, shape and offset; or the number of a type that nothing is known of."""
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.fail(f"tensor {shown(name)} has {num_dimensions} dimensions")
        sizes = [self._scalar("Q") for _ in range(num_dimensions)]
        code, offset = self._scalar("I"), self._scalar("Q")
        if code not in TENSOR_TYPES:
            return int(code)
        kind = TENSOR_TYPES[code]
        if not all(0 < size <= MAX_SIZE for size in sizes) or math.prod(sizes) > MAX_SIZE:
            raise self.fail(f"tensor {shown(name)} has the shape {shown(sizes)}")
        if sizes[0] % kind.weights:
            raise self.fail(
                f"tensor {shown(name)} has rows of {sizes[0]} weights, no whole {kind.name} blocks"
            )
        return kind, tuple(reversed(sizes)), offset

    def _require_no_overlap(self, tensors: dict[str, TensorInfo]) -> None:
        end = 0
        for name, info in sorted(tensors.items(), key=lambda item: item[1].start):
            if info.start < end:
                raise self.fail(f"tensor {shown(name)} overlaps another tensor")
            end = info.end

    def _require_count(self, what: str, count: int, max_count: int, min_bytes: int) -> None:
        if count > max_count or count * min_bytes > self._limit - self._at:
            raise self.fail(f"counts {count} {what}, more than it can hold")

    def _name(self, what: str) -> str:
        name = self._string(MAX_NAME_BYTES)
        if not name:
            raise self.fail(f"has a {what} without a name")
        return name

    def _string(self, max_bytes: int) -> str:
        length = self._scalar("Q")
        if length > max_bytes or length > self._limit - self._at:
            raise self.fail(f"has a string of {length} bytes, more than it can hold")
        text = self._text(self._at, length)
        self._at += length
        return text

    def _text(self, start: int, length: int) -> str:
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.fail("has a string that is not UTF-8") from None

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        if self._at + size > self._limit:
            raise self._too_short()
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += size
        return value

    def _too_short(self) -> CheckpointError:
        if self._limit < len(self._data):
            return self.fail(f"has a header of more than {MAX_HEADER_BYTES >> 20} MiB")
        return self.fail("is truncated: its header is incomplete")


def _numpy_code(kind: int) -> str:
    code = _SCALARS[kind]
    size = struct.calcsize("<" + code)
    return f"{'f' if code in 'fd' else 'u' if code.isupper() else 'i'}{size}"
