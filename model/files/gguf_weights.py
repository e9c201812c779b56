"""The tensors of a GGUF model under Hugging Face's names, with the interface of SafetensorsFile.

Arrays are views of the file, but for rows of q and k in another order, and norms with one added.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.model.config.build import build_config
from hotcold.model.config.families import tensor_names
from hotcold.model.config.families.tensor_names import LayerNames, TensorNames
from hotcold.model.config.gguf_config import architecture_of, gguf_values
from hotcold.model.config.gguf_rope import FACTORS
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import CheckpointError, shown
from hotcold.model.files.safetensors_file import TensorEntry, WeightFile
from hotcold.model.gguf.file import open_gguf
from hotcold.model.gguf.header import TensorInfo
from hotcold.model.gguf.tensor_types import TensorType
from hotcold.model.mapped_file import MappedFile
from hotcold.numba_kernels.formats import (
    BLOCK_FORMATS,
    Q8,
    ROW_FORMATS,
    is_blocks,
    is_quantized,
    summed_dtype,
)

# In memory these roles have one format: their matrices are multiplied with the same vectors.
_TOGETHER = {"up": "gate", "shared_gate": "gate", "shared_up": "gate", "shared_down": "down"}
_DOWN_T = "ffn_down_t"


@dataclass(frozen=True)
class _Place:
    """Where a tensor of the checkpoint is in the file."""

    name: str  # in the file
    module: str  # of the file's names, without layer and suffix
    role: str  # a field of LayerNames or TensorNames


class GgufWeights(WeightFile):
    """All tensors of the model.

    Errors:  CheckpointError, ConfigError for a file that is damaged, of an unknown architecture, or
             that holds tensors which the architecture does not have
    """

    def __init__(self, path: Path):
        self.path = path
        self._model = open_gguf(path)
        self.paths = self._model.paths
        self._architecture = architecture_of(self._model)
        self._values = gguf_values(path)
        config = build_config(self._values, source=str(path))
        self._own_names: dict[str, str] = {}
        self._places = self._find(config)
        self.entries = {name: self._entry(place) for name, place in self._places.items()}
        self._loaded = self._loaded_dtypes(config)

    def array(self, name: str) -> np.ndarray:
        """Return the tensor's items, read-only, maybe unaligned; blocks keep their bytes."""
        place = self._places[name]
        kind = self._info(place).type
        assert kind.dtype is not None, "Checkpoint.dtype refuses it"
        items = self._model.file_of(place.name).array(place.name)
        order = self._architecture.row_orders.get(place.module)
        if order is not None:
            ids = order(self._values)
            if ids.size != len(items):
                raise CheckpointError(
                    f"{self.path}: tensor {shown(place.name)} has {len(items)} rows, its metadata "
                    f"asks for {ids.size}"
                )
            return items[ids]
        if self._architecture.adds_one_to_norms and place.name.endswith("norm.weight"):
            return items - np.float32(1)
        return items

    def mapped_file(self, name: str) -> MappedFile:
        """Return the file that holds the tensor."""
        return self._model.file_of(self._places[name].name).mapped

    def own_name(self, name: str) -> str:
        """Return the file's name of a tensor, even of one that is missing."""
        return self._own_names.get(name, name)

    def loaded_dtype(self, name: str) -> np.dtype:
        """Return the matrix's dtype in memory, the same in all layers."""
        kind = self._info(self._places[name]).type
        return self._loaded.get(self._places[name].role, kind.loaded or np.dtype(np.float32))

    def own_dtype(self, name: str) -> np.dtype:
        """Return the dtype in memory that suits the matrix alone, whatever other layers have."""
        return self._info(self._places[name]).type.loaded or np.dtype(np.float32)

    def is_by_neurons(self, name: str) -> bool:
        """Whether the matrix has a row for each column of the checkpoint's."""
        return self._places[name].module == _DOWN_T

    def conversion_note(self, by_layer: Collection[str] = ()) -> str:
        """Return a line about formats that are converted in memory; "" where none are.

        In the roles `by_layer` each tensor has its `own_dtype`, in the others its `loaded_dtype`.
        """
        changes: dict[tuple[str, str], int] = {}
        for place in self._places.values():
            kind = self._info(place).type
            role = _TOGETHER.get(place.role, place.role)
            into = kind.loaded if role in by_layer else self._loaded.get(role)
            if into is None or kind.dtype is None or not is_blocks(kind.dtype):
                continue
            if is_quantized(into) and not BLOCK_FORMATS[kind.dtype].is_as_stored(into):
                key = (kind.name, f"{ROW_FORMATS[into].bits} bits")
                changes[key] = changes.get(key, 0) + 1
        if not changes:
            return ""
        names = ", ".join(dict.fromkeys(name for name, _ in changes))
        return f"{names}: read as {' and '.join(dict.fromkeys(b for _, b in changes))} a weight"

    def _info(self, place: _Place) -> TensorInfo:
        return self._model.file_of(place.name).tensors[place.name]

    def _find(self, config: ModelConfig) -> dict[str, _Place]:
        places = {}
        for ours, theirs, role in _pairs(tensor_names(config), self._architecture.names, config):
            self._own_names[ours] = f"{theirs}.weight"
            for suffix in (".weight", ".bias"):
                self._own_names[ours + suffix] = theirs + suffix
                if theirs + suffix in self._model.names:
                    module = theirs.rsplit(".", 1)[-1]
                    places[ours + suffix] = _Place(theirs + suffix, module, role)
        places |= self._find_experts(config)
        known = {place.name for place in places.values()}.union(
            FACTORS
        )  # the configuration has these
        last = config.num_layers + config.num_extra_layers
        extra = tuple(
            self._architecture.names.layers.format(layer)
            for layer in range(config.num_layers, last)
        )
        left = [n for n in self._model.names if n not in known and not n.startswith(extra)]
        if left:
            raise CheckpointError(
                f"{self.path}: tensor {shown(left[0])} has no place in the model that its metadata "
                f"describes ({len(left)} have none); it would change the result"
            )
        return places

    def _find_experts(self, config: ModelConfig) -> dict[str, _Place]:
        """Experts' tensors keep the file's names: a layout of their families has these."""
        if config.experts is None:
            return {}
        names, prefix = self._architecture.names, tensor_names(config).layers
        modules = {
            module: role
            for layout in names.layer.experts
            for role, module in vars(layout).items()
            if isinstance(module, str) and module
        }
        places = {}
        for layer in range(config.num_layers):
            for module, role in modules.items():
                count = config.experts.router.num_experts if "{}" in module else 1
                for name in (module.format(expert) for expert in range(count)):
                    theirs, ours = names.layers.format(layer) + name, prefix.format(layer) + name
                    self._own_names[ours] = theirs
                    if theirs in self._model.names:
                        places[ours] = _Place(theirs, name.rpartition(".")[0], role)
        return places

    def _entry(self, place: _Place) -> TensorEntry:
        info = self._info(place)
        shape = (*info.shape[:-1], info.type.items(info.shape[-1]))
        return TensorEntry(info.type.name, shape, info.start, info.end)

    def _loaded_dtypes(self, config: ModelConfig) -> dict[str, np.dtype]:
        """By role, the dtype of its matrices in all layers."""
        kinds: dict[str, set[TensorType]] = {}
        for place in self._places.values():
            info = self._info(place)
            if len(info.shape) in (2, 3):  # of one matrix, or of all experts
                kinds.setdefault(_TOGETHER.get(place.role, place.role), set()).add(info.type)
        transposed = {place.role for place in self._places.values() if place.module != _DOWN_T}
        common = {
            role: _common(types, role == "down" and role in transposed)
            for role, types in kinds.items()
        }
        if "down" in common:
            common["down"] = summed_dtype(common["down"])
        if config.tied_embeddings and "tokens" in common:
            common.setdefault("head", common["tokens"])
        return common | {role: common[of] for role, of in _TOGETHER.items() if of in common}


def _common(types: set[TensorType], is_transposed: bool) -> np.dtype:
    """The dtype of matrices of these types in memory: their own where they agree, else Q8.

    They agree also where down rows would.
    """
    found = {(kind.transposed if is_transposed else kind.loaded) for kind in types}
    dtypes = {dtype for dtype in found if dtype is not None}
    for agreed in (dtypes, set(map(summed_dtype, dtypes))):
        if len(agreed) == 1:
            return agreed.pop()
    return Q8 if any(is_quantized(dtype) for dtype in dtypes) else np.dtype(np.float32)


def _pairs(
    ours: TensorNames, theirs: TensorNames, config: ModelConfig
) -> Iterator[tuple[str, str, str]]:
    """Yield (name in a checkpoint, name in the file, role) of each module."""
    for field in fields(TensorNames):
        if field.name not in ("layers", "layer"):
            yield from _named(getattr(ours, field.name), getattr(theirs, field.name), field.name)
    for layer in range(config.num_layers):
        own, other = ours.of_layer(layer), theirs.of_layer(layer)
        for field in fields(LayerNames):
            if field.name == "experts":
                continue  # `GgufWeights._find_experts`
            yield from _named(getattr(own, field.name), getattr(other, field.name), field.name)


def _named(ours: Any, theirs: Any, role: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(ours, tuple) and theirs:
        for own, other in zip(ours, theirs, strict=True):
            yield from _named(own, other, role)
    elif ours and theirs:
        yield ours, theirs, role
