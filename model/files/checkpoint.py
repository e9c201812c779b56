"""The weights of a model, by name, as views of the mapped files.

Throughout the project float16 weights are uint16 bits and bfloat16 weights int16 bits, so that
Numba kernels tell them apart by dtype. In a checkpoint that config.json calls quantized, matrices
are U8 tensors [rows, row bytes], here with a dtype of `formats.ROW_FORMATS`. In a GGUF file most
are rows of ggml's blocks, which loading converts to one of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from hotcold.model.config.families import PREFIXES
from hotcold.model.config.json_reader import ConfigReader, read_json_object
from hotcold.model.config.quantization import quantized_dtype
from hotcold.model.config.weight_formats import numpy_dtype
from hotcold.model.errors import CheckpointError, shown
from hotcold.model.files.gguf_weights import GgufWeights
from hotcold.model.files.packed_weights import with_packed
from hotcold.model.files.safetensors_file import (
    BIT_DTYPES,
    SafetensorsFile,
    TensorEntry,
    WeightFile,
)
from hotcold.model.files.torch_file import TorchFile
from hotcold.model.files.unsupported_formats import refuse_folder, refuse_types
from hotcold.model.gguf.file_names import is_gguf
from hotcold.model.gguf.tensor_types import TYPE_OF_NAME
from hotcold.model.mapped_file import forget_pages
from hotcold.numba_kernels.formats import is_quantized

# Kinds of weight files, the preferred first.
_FORMS: tuple[tuple[str, Callable[[Path], WeightFile]], ...] = (
    ("model.safetensors", SafetensorsFile),
    ("pytorch_model.bin", TorchFile),
)


class Checkpoint:
    """All tensors of a model directory or a GGUF file.

    Names are given with or without a family's prefix.
    Errors:  CheckpointError, one line naming file and tensor, for a missing, truncated, overlapping
             or wrongly declared file, an index that disagrees with its files, or an unknown tensor
    """

    def __init__(self, path: str | Path, keeps_pages: bool = True):
        """Without `keeps_pages` released tensors leave the page cache too."""
        self.path = Path(path)
        self.keeps_pages = keeps_pages
        self._files = with_packed(self.path, _open_files(self.path))
        self._asked: set[str] = set()

    @functools.cached_property
    def quantized_dtype(self) -> np.dtype | None:
        """The dtype of quantized matrices; None where config.json declares none.

        Errors:  CheckpointError for a method or version that is not supported
        """
        file = self.path / "config.json"
        if not file.exists():
            return None
        values = read_json_object(file, CheckpointError)
        name = quantized_dtype(ConfigReader(values, str(file), CheckpointError))
        return None if name is None else numpy_dtype(name)

    def names(self) -> list[str]:
        """Return the tensors' full names, sorted."""
        return sorted(self._files)

    def own_names_asked(self) -> set[str]:
        """The names, in the files, of all tensors that were asked for."""
        return {own for name in self._asked for own in self._files[name].all_names(name)}

    def own_names(self) -> set[str]:
        """The names of all tensors in safetensors files, but for those that are never weights."""
        return {own for name, file in self._files.items() for own in file.all_names(name)}

    def has(self, name: str) -> bool:
        """Whether the tensor exists, under any known prefix."""
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape."""
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of the tensor's bits: a float's, quantized rows' (U8), or blocks'."""
        found = self._known_dtype(name)
        if found is None and is_gguf(self.path):
            raise refuse_types(self.path)
        if found is None:
            raise CheckpointError(
                f"{self.path}: tensor {self.shown_name(name)} is {self.format_name(name)}; "
                "float32, float16 and bfloat16 are supported, so convert the model"
            )
        return found

    def loaded_dtype(self, name: str) -> np.dtype:
        """Return the dtype that a matrix is loaded in without --dtype."""
        stored = self.dtype(name)  # refuses unsupported formats
        file, full_name = self._located(name)
        return file.loaded_dtype(full_name) or stored

    def own_dtype(self, name: str) -> np.dtype:
        """Return the dtype that suits the tensor alone, whatever other layers have."""
        stored = self.dtype(name)
        file, full_name = self._located(name)
        return file.own_dtype(full_name) or stored

    def is_by_neurons(self, name: str) -> bool:
        """Whether a down projection is stored transposed: `hotcold quantize` does so, too."""
        file, full_name = self._located(name)
        return file.is_by_neurons(full_name) or is_quantized(self.dtype(name))

    def format_name(self, name: str) -> str:
        """Return the tensor's format as safetensors or GGUF names it, supported or not."""
        return self._entry(name).format_name

    def first_bytes(self, name: str, count: int) -> bytes:
        """Return the first `count` bytes of the tensor's data; none of an unsupported format.

        Nothing is read ahead, which would fill the page cache from many tensors.
        """
        if not self.is_readable(name):
            return b""
        self.advise_random(name)
        found = self.array(name)  # of MXFP4 in two tensors it stands in for an array
        items = (found if isinstance(found, np.ndarray) else self.stored_bytes(name)).reshape(-1)
        return items[: -(-count // items.itemsize)].tobytes()[:count]

    def is_readable(self, name: str) -> bool:
        """Whether the tensor's format is supported."""
        return self._known_dtype(name) is not None

    def num_bytes(self, name: str) -> int:
        """Return the bytes of the tensor's data in the files."""
        entry = self._entry(name)
        return entry.end - entry.start

    def array(self, name: str) -> np.ndarray:
        """Return the tensor's bits as a view of the file: read-only, maybe unaligned."""
        dtype = self.dtype(name)
        file, full_name = self._located(name)
        bits = file.array(full_name)
        return bits.view(dtype) if bits.dtype == np.uint8 else bits

    def conversion_note(self, by_layer: Collection[str] = ()) -> str:
        """Return a line about formats that are converted in memory; "" where none are.

        Kinds of matrices in `by_layer` have their `own_dtype`, the others their `loaded_dtype`.
        """
        files = {id(file): file for file in self._files.values()}.values()
        return "; ".join(filter(None, (file.conversion_note(by_layer) for file in files)))

    def files(self) -> list[Path]:
        """Return config.json, index and weight files, sorted."""
        beside = ("config.json", *(f"{name}.index.json" for name, _ in _FORMS))
        found = {self.path / name for name in beside if (self.path / name).is_file()}
        return sorted(found | self._paths)

    def stored_bytes(self, name: str) -> np.ndarray:
        """Return the tensor's bytes as the file has them, whatever its format: uint8."""
        file, full_name = self._located(name)
        return file.stored_bytes(full_name)

    def read_ahead(self, name: str) -> None:
        """Have the kernel read all of the tensor now."""
        file, full_name = self._located(name)
        file.read_ahead(full_name)

    def release(self, *names: str) -> None:
        """Unload the tensors' pages; reading maps them again."""
        for name in names:
            file, full_name = self._located(name)
            file.release(full_name)
        self.drop_page_cache()

    def drop_page_cache(self) -> None:
        """Drop the files from the page cache, unless `keeps_pages`."""
        for path in () if self.keeps_pages else self._paths:
            forget_pages(path)

    @functools.cached_property
    def _paths(self) -> set[Path]:
        return {path for file in self._files.values() for path in file.paths}

    def advise_random(self, name: str) -> None:
        """Read single rows of the tensor from now on: the kernel reads nothing ahead."""
        file, full_name = self._located(name)
        file.advise_random(full_name)

    def full_name(self, name: str) -> str:
        """Return the tensor's name with its prefix. Errors: CheckpointError where it is missing."""
        full_name = self._find(name)
        if full_name is None:
            raise CheckpointError(
                f"{self.path}: tensor {self.shown_name(name)} is missing; download the complete "
                "model"
            )
        return full_name

    def shown_name(self, name: str) -> str:
        """Return the tensor's name in the file, for an error text."""
        file = next(iter(self._files.values()), None)
        return shown(name if file is None else file.own_name(name))

    def _located(self, name: str) -> tuple[WeightFile, str]:
        full_name = self.full_name(name)
        self._asked.add(full_name)
        return self._files[full_name], full_name

    def _entry(self, name: str) -> TensorEntry:
        file, full_name = self._located(name)
        return file.entries[full_name]

    def _known_dtype(self, name: str) -> np.dtype | None:
        file, full_name = self._located(name)
        if (dtype := file.block_dtype(full_name)) is not None:
            return dtype
        found = file.entries[full_name].format_name
        if found == "U8":
            return self.quantized_dtype
        kind = TYPE_OF_NAME.get(found)
        return BIT_DTYPES.get(found) if kind is None else kind.dtype

    def _find(self, name: str) -> str | None:
        return next((prefix + name for prefix in PREFIXES if prefix + name in self._files), None)


def needs_torch(path: Path) -> bool:
    """Whether torch reads the weights: they are pytorch_model*.bin files."""
    if is_gguf(path):
        return False
    opens = (
        form
        for name, form in _FORMS
        for file in (path / name, path / f"{name}.index.json")
        if file.exists()
    )
    return next(opens, None) is TorchFile


def _open_files(directory: Path) -> dict[str, WeightFile]:
    """Return the file of every tensor, from the first kind of weight files that exists."""
    if is_gguf(directory):
        weights = GgufWeights(directory)
        return dict.fromkeys(weights.entries, weights)
    for name, open_file in _FORMS:
        if (directory / name).exists():
            file = open_file(directory / name)
            return dict.fromkeys(file.entries, file)
        index = directory / f"{name}.index.json"
        if index.exists():
            return _open_index(index, open_file)
    refuse_folder(directory)
    raise CheckpointError(
        f"{directory}: no model.safetensors and no model.safetensors.index.json there; "
        "give a directory with a Hugging Face model"
    )


def _open_index(index: Path, open_file: Callable[[Path], WeightFile]) -> dict[str, WeightFile]:
    weight_map = read_json_object(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map; download it again")
    opened: dict[str, WeightFile] = {}
    files = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or file_name not in opened:
            opened[file_name] = open_file(_shard_path(index, file_name))
        files[name] = opened[file_name]
        if name not in files[name].entries:
            raise CheckpointError(
                f"{files[name].path}: tensor {shown(name)} is missing, which {index.name} places "
                "there; download the file again"
            )
    return files


def _shard_path(index: Path, file_name: Any) -> Path:
    """Return the path of a shard beside its index; refuse a name with folders in it."""
    parts = PurePosixPath(file_name).parts if isinstance(file_name, str) else ()
    if len(parts) != 1 or parts[0] in ("..", "/") or "\\" in file_name or "\0" in file_name:
        raise CheckpointError(
            f"{index}: names the file {shown(file_name)}, which is not a name beside it; "
            "download it again"
        )
    path = index.parent / parts[0]
    try:
        found = path.exists()
    except (OSError, ValueError):  # a name that no file can have
        found = False
    if not found:
        raise CheckpointError(
            f"{index}: names the file {shown(file_name)}, which is not there; download it"
        )
    return path
