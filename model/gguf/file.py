"""A model in GGUF: one file, or several parts, opened by the first."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.model.errors import CheckpointError, shown
from hotcold.model.gguf.file_names import PART, SUFFIX
from hotcold.model.gguf.header import ArrayValue, HeaderReader, TensorInfo
from hotcold.model.mapped_file import MappedFile, file_state, mapped

_CACHED_FILES = 4
_FUSED = "attn_qkv"
_COMPUTED_FUSED = ("falcon", "phi3", "bailingmoe2")  # architectures whose layers are read so
_GATED = ("qwen35", "qwen35moe", "qwen3next")  # queries have as many rows again, of gates


class GgufFile:
    """One file: its metadata, and its tensors by name.

    Errors:  CheckpointError, one line naming the file, for anything declared wrongly
    """

    def __init__(self, path: Path):
        self.path = path
        self._reader = HeaderReader(path, mapped(path))
        self.mapped = MappedFile(path)
        self.metadata: Mapping[str, Any] = self._reader.metadata
        self.tensors: dict[str, TensorInfo] = self._reader.tensors()

    @property
    def header_digest(self) -> str:
        """32 hexadecimal digits over the header: metadata, and tensors' names, types and places."""
        return hashlib.sha256(self.mapped.view(0, self._reader.num_bytes).data).hexdigest()[:32]

    def strings(self, key: str) -> list[str] | None:
        """Return a list of strings of the metadata; None where the key is absent."""
        array = self._array(key)
        if array is None:
            return None
        if not array.holds_strings:
            raise self.fail(key, "holds no strings")
        return self._reader.strings(array)

    def numbers(self, key: str) -> np.ndarray | None:
        """Return a list of numbers of the metadata; None where the key is absent."""
        array = self._array(key)
        if array is None:
            return None
        if array.holds_strings:
            raise self.fail(key, "holds no numbers")
        return self._reader.numbers(array)

    def array(self, name: str) -> np.ndarray:
        """Return a tensor as items of its type's dtype, read-only; blocks keep their bytes."""
        info = self.tensors[name]
        assert info.type.dtype is not None
        items = self.mapped.view(info.start, info.end).view(info.type.dtype)
        return items.reshape(*info.shape[:-1], info.type.items(info.shape[-1]))

    def fail(self, key: str, problem: str) -> CheckpointError:
        """Return (not raise) the error that a key of the metadata has `problem`."""
        return CheckpointError(f"{self.path}: key {shown(key)} {problem}; download it again")

    def _array(self, key: str) -> ArrayValue | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, ArrayValue):
            raise self.fail(key, "is no array")
        return value


class GgufModel:
    """All parts of a model. The first part has the metadata, and all have tensors.

    Errors:  CheckpointError for a part that is missing, damaged, or not this model's
    """

    def __init__(self, path: Path):
        self.path = path
        self.first = GgufFile(path)
        self.metadata = self.first.metadata
        self._file_of: dict[str, GgufFile] = {}
        self._others = self._other_parts()
        for part in [self.first, *self._others]:
            for name in part.tensors:
                if name in self._file_of:
                    raise CheckpointError(
                        f"{part.path}: tensor {shown(name)} is in another part too; download all "
                        "parts again"
                    )
                self._file_of[name] = part
        declared = self.metadata.get("split.tensors.count", len(self._file_of))
        if declared != len(self._file_of):
            raise CheckpointError(
                f"{path}: its parts hold {len(self._file_of)} tensors of {shown(declared)}; "
                "download all parts again"
            )
        self._split_fused()

    @property
    def names(self) -> list[str]:
        """The tensors' names, of all parts."""
        return list(self._file_of)

    def file_of(self, name: str) -> GgufFile:
        """Return the part that holds a tensor. Errors: KeyError."""
        return self._file_of[name]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of all parts."""
        return (self.path, *(file.path for file in self._others))

    def _split_fused(self) -> None:
        """Have q, k and v as tensors, which llama.cpp's converter writes as one by --fuse-qkv.

        A recurrent layer's tensor of that name stays: it has no attn_output.
        Errors:  CheckpointError for rows that are not q's, k's and v's
        """
        architecture = self.metadata.get("general.architecture")
        if architecture in _COMPUTED_FUSED:
            return
        for fused in [name for name in self._file_of if _FUSED in name.split(".")]:
            prefix, suffix = fused.split(_FUSED)
            output = f"{prefix}attn_output.weight"
            if output not in self._file_of or f"{prefix}attn_q{suffix}" in self._file_of:
                continue
            file, heads = self._file_of.pop(fused), self._file_of[output].tensors[output].shape[-1]
            info = file.tensors.pop(fused)
            rows, queries = info.shape[0], heads * (1 + (architecture in _GATED))
            keys, odd = divmod(rows - queries, 2)
            if keys <= 0 or odd:
                raise CheckpointError(
                    f"{file.path}: tensor {shown(fused)} has {rows} rows, of which {queries} are "
                    "queries: the others are no keys and values; download it again"
                )
            start, row_bytes = info.start, (info.end - info.start) // rows
            for part, count in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
                name, end = f"{prefix}{part}{suffix}", start + count * row_bytes
                file.tensors[name] = replace(
                    info, shape=(count, *info.shape[1:]), start=start, end=end
                )
                self._file_of[name], start = file, end

    def _other_parts(self) -> list[GgufFile]:
        count, number = (self.metadata.get(f"split.{key}", 0) for key in ("count", "no"))
        if type(count) is not int or type(number) is not int or count > 99999:
            raise self.first.fail("split.count", f"is {shown(count)}")
        if count <= 1:
            return []
        name = PART.fullmatch(self.path.stem)
        if number != 0 or name is None or int(name["number"]) != 1 or int(name["count"]) != count:
            raise CheckpointError(
                f"{self.path}: is part {number + 1} of {count}; give the first one, which ends in "
                f"-00001-of-{count:05}{SUFFIX}, beside the others"
            )
        paths = [
            self.path.with_name(f"{name['stem']}-{part:05}-of-{count:05}{self.path.suffix}")
            for part in range(2, count + 1)
        ]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise CheckpointError(
                f"{self.path}: part {missing[0]} is missing ({len(missing)} of {count} are); "
                "download all parts"
            )
        return [GgufFile(path) for path in paths]


def open_gguf(path: str | Path) -> GgufModel:
    """Return the model; the same object while the file stays as it is. Errors: CheckpointError."""
    file = Path(path)
    try:
        state = file_state(file)
    except OSError as problem:
        raise CheckpointError(f"{file}: cannot be read ({problem.strerror})") from None
    return _open(file, state)


@functools.lru_cache(_CACHED_FILES)
def _open(path: Path, state: tuple[int, ...]) -> GgufModel:
    return GgufModel(path)
