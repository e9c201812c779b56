"""One .safetensors file: its header, checked by its library, its tensors as views of mapped bytes.

Layout: 8 bytes N (little-endian), N bytes of JSON {name: {dtype, shape, data_offsets}}, then data.
Source: the format's description in https://github.com/huggingface/safetensors
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotcold.model.config.json_reader import parse_json
from hotcold.model.errors import CheckpointError, first_line, refuse_pointer_file, shown
from hotcold.model.mapped_file import MappedFile
from hotcold.numba_kernels.formats import FLOAT_FORMATS

MAX_DIMENSIONS = 8
# The project's weight bits: uint16 is float16, int16 is bfloat16.
BIT_DTYPES = {kind.short.upper(): dtype for dtype, kind in FLOAT_FORMATS.items()}
_ARRAY_DTYPES = BIT_DTYPES | {"U8": np.dtype(np.uint8)}  # U8 is bytes of quantized rows


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
            self.entries = _read_header(path)
        except OSError as problem:
            reason = problem.strerror or first_line(problem)  # the library's errors have no number
            raise CheckpointError(f"{path}: cannot be read ({reason})") from None
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


def _is_shape(shape: list[int]) -> bool:
    """Whether NumPy has such arrays; with a 0 the library takes any number beside it."""
    return len(shape) <= MAX_DIMENSIONS and all(size < 1 << 62 for size in shape)


def _read_header(path: Path) -> dict[str, TensorEntry]:
    from safetensors import SafetensorError, safe_open

    refuse_pointer_file(path, CheckpointError)
    try:
        with safe_open(path, framework="numpy"):  # checks all that the header declares
            pass
    except SafetensorError as problem:
        reason = first_line(problem)
        raise CheckpointError(
            f"{path}: is truncated or damaged ({reason}); download it again"
        ) from None
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = parse_json(stream.read(length), str(path), CheckpointError)
    header.pop("__metadata__", None)
    entries = {}
    for name, info in header.items():
        is_like_one = isinstance(info, dict) and isinstance(info["dtype"], str)
        if not is_like_one or not _is_shape(info["shape"]):
            raise CheckpointError(
                f"{path}: tensor {shown(name)} is described as {shown(info, 60)}; download it again"
            )
        start, end = (8 + length + offset for offset in info["data_offsets"])
        entries[name] = TensorEntry(info["dtype"], tuple(info["shape"]), start, end)
    return entries
