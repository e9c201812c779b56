"""The tensors of a GGUF model under Hugging Face's names, with the interface of SafetensorsFile.

Arrays are views of the file, but for rows of q and k in another order, and norms with one added.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from hotcold.model.config.build import build_config
from hotcold.model.config.families import tensor_names
from hotcold.model.config.families.tensor_names import (
    FFN_ROLES,
    GGUF_NAMES,
    DraftNames,
    LayerNames,
    RecurrentNames,
    TensorNames,
)
from hotcold.model.config.gguf_config import architecture_of, gguf_values
from hotcold.model.config.gguf_rope import FACTORS
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import agreed_dtype
from hotcold.model.errors import CheckpointError, shown
from hotcold.model.files.safetensors_file import TensorEntry, WeightFile
from hotcold.model.gguf.file import open_gguf
from hotcold.model.gguf.header import TensorInfo
from hotcold.model.gguf.tensor_types import TensorType
from hotcold.model.mapped_file import MappedFile
from hotcold.numba_kernels.formats import (
    BLOCK_FORMATS,
    NVFP4_SCALED,
    ROW_FORMATS,
    is_quantized,
    row_items,
    summed_dtype,
)
from hotcold.numba_kernels.load.stored_rows import ScaledBlocks, StoredRows

# In memory these roles have one format: their matrices are multiplied with the same vectors.
_TOGETHER = {"up": "gate", "shared_gate": "gate", "shared_up": "gate", "shared_down": "down"}
_ROLES = {"inputs": "qkv"}  # of recurrent layers, with attention's; `out` is one of both
_DOWN_T = "ffn_down_t"
# How names of what is for pictures and sounds begin, which Ollama has in the model's own file.
_OTHER_PARTS = ("v.", "a.", "mm.")
_NO_MODULES = ("layers", "layer", "parts", "layer_changes", "blocks")
_RECURRENT_NORM = "ssm_norm"  # it has no one added
_DECAY = "ssm_a"  # -exp of the checkpoint's tensor


@dataclass(frozen=True)
class _Place:
    """Where a tensor of the checkpoint is in the file."""

    name: str  # in the file
    module: str  # of the file's names, without layer and suffix
    role: str  # a field of LayerNames or TensorNames
    drafts: bool = False  # it is the layer's that drafts


class GgufWeights(WeightFile):
    """All tensors of the model.

    Errors:  CheckpointError, ConfigError for a file that is damaged, of an unknown architecture, or
             that holds tensors which the architecture does not have
    """

    def __init__(self, path: Path):
        self.path = path
        self._model = open_gguf(path)
        self.paths = self._model.paths
        _, self._architecture = architecture_of(self._model)
        self._config = config = build_config(gguf_values(path), source=str(path))
        self._own_names: dict[str, str] = {}
        self._scales: dict[str, np.ndarray] = {}  # of NVFP4, by the tensor's name in the file
        self._places = self._find(config)
        self.entries = {name: self._entry(place) for name, place in self._places.items()}
        self._loaded = {drafts: self._loaded_dtypes(config, drafts) for drafts in (False, True)}

    def array(self, name: str) -> np.ndarray:
        """Return the tensor's items, read-only, maybe unaligned; blocks keep their bytes."""
        place = self._places[name]
        kind = self._info(place).type
        assert kind.dtype is not None, "Checkpoint.dtype refuses it"
        items = self._model.file_of(place.name).array(place.name)
        if place.name in self._scales:
            return self._scaled(place, items)
        ids = self._row_order(place)
        if ids is not None:
            if ids.size != len(items):
                raise CheckpointError(
                    f"{self.path}: tensor {shown(place.name)} has {len(items)} rows, its metadata "
                    f"asks for {ids.size}"
                )
            return items[ids]
        is_norm = place.name.endswith("norm.weight") and place.module != _RECURRENT_NORM
        if self._config.norm_offset and is_norm:  # a file's weights have it
            return items - np.float32(self._config.norm_offset)
        return np.log(-items) if place.module == _DECAY else items

    def block_dtype(self, name: str) -> np.dtype | None:
        """Return the dtype of blocks with their tensor's scale; None for what files hold so."""
        return NVFP4_SCALED if self._places[name].name in self._scales else None

    def mapped_file(self, name: str) -> MappedFile:
        """Return the file that holds the tensor."""
        return self._model.file_of(self._places[name].name).mapped

    def own_name(self, name: str) -> str:
        """Return the file's name of a tensor, even of one that is missing."""
        place = self._places.get(name)
        return self._own_names.get(name, name) if place is None else place.name

    def loaded_dtype(self, name: str) -> np.dtype:
        """Return the matrix's dtype in memory, the same in all layers."""
        kind = self._info(self._places[name]).type
        place = self._places[name]
        return self._loaded[place.drafts].get(place.role, kind.loaded or np.dtype(np.float32))

    def own_dtype(self, name: str) -> np.dtype:
        """Return the dtype in memory that suits the matrix alone, whatever other layers have."""
        return self._info(self._places[name]).type.loaded or np.dtype(np.float32)

    def is_by_neurons(self, name: str) -> bool:
        """Whether the matrix has a row for each column of the checkpoint's."""
        return self._places[name].module == _DOWN_T

    def conversion_note(self, by_layer: Collection[str] = ()) -> str:
        """Return a line about formats that are converted in memory; "" where none are.

        In the roles `by_layer` each tensor in blocks has its `own_dtype`; others their
        `loaded_dtype`.
        """
        changes: dict[tuple[str, str], int] = {}
        for place in self._places.values():
            info, role = self._info(place), _TOGETHER.get(place.role, place.role)
            kind, into = info.type, self._loaded[place.drafts].get(role)
            if into is None or kind.dtype is None or len(info.shape) < 2:
                continue
            block = BLOCK_FORMATS.get(kind.dtype)
            if role in by_layer and block is not None:
                into = kind.loaded or into
            if is_quantized(into) and not (block is not None and block.is_as_stored(into)):
                key = (kind.name, f"{ROW_FORMATS[into].bits} bits")
                changes[key] = changes.get(key, 0) + 1
        if not changes:
            return ""
        names = ", ".join(dict.fromkeys(name for name, _ in changes))
        return f"{names}: read as {' and '.join(dict.fromkeys(b for _, b in changes))} a weight"

    def _row_order(self, place: _Place) -> np.ndarray | None:
        """Which rows of the file's tensor are the checkpoint's; None for the same order."""
        config = self._config
        if place.module == "attn_qkv" and config.fused_qkv == "grouped":
            return _grouped_rows(config)
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(place.module)
        if heads is None or not self._architecture.pairs_rows:
            return None
        rows = np.arange(heads * config.head_dim).reshape(heads, config.head_dim // 2, 2)
        return rows.swapaxes(1, 2).reshape(-1)

    def _info(self, place: _Place) -> TensorInfo:
        return self._model.file_of(place.name).tensors[place.name]

    def _find(self, config: ModelConfig) -> dict[str, _Place]:
        places = self._find_model(config, GGUF_NAMES)
        drafting = GGUF_NAMES.of_draft(config.num_layers)
        if f"{drafting.draft.projection}.weight" in self._model.names:
            found = self._find_model(config.draft_layer(), drafting)
            places |= {name: replace(place, drafts=True) for name, place in found.items()}
        known = {place.name for place in places.values()} | without_effect(config)
        known |= self._find_scales(places.values())
        last = config.num_layers + config.num_extra_layers
        extra = tuple(GGUF_NAMES.layers.format(n) for n in range(config.num_layers, last))
        extra += _OTHER_PARTS
        left = [n for n in self._model.names if n not in known and not n.startswith(extra)]
        if left:
            raise CheckpointError(
                f"{self.path}: tensor {shown(left[0])} has no place in the model that its metadata "
                f"describes ({len(left)} have none); it would change the result"
            )
        return places

    def _find_model(self, config: ModelConfig, names: TensorNames) -> dict[str, _Place]:
        """The tensors of a model, or of its layer that drafts; `names` are the file's."""
        places = {}
        for ours, theirs, role in _pairs(config, names, self._architecture.names):
            is_bare = theirs in self._model.names
            self._own_names.setdefault(ours, theirs if is_bare else f"{theirs}.weight")
            for suffix in (".weight", ".bias", ""):
                self._own_names.setdefault(ours + suffix, theirs + suffix)
                if theirs + suffix in self._model.names:
                    module = theirs.rsplit(".", 1)[-1]
                    places[ours + suffix] = _Place(theirs + suffix, module, role)
        return places | self._find_experts(config, names)

    def _find_experts(self, config: ModelConfig, names: TensorNames) -> dict[str, _Place]:
        """Experts' tensors keep the file's names: a layout of their families has these."""
        if config.experts is None:
            return {}
        own = tensor_names(config)
        modules = {
            module: role
            for layout in GGUF_NAMES.layer.experts
            for role, module in vars(layout).items()
            if isinstance(module, str) and module
        }
        places = {}
        for layer in range(0, config.num_layers, len(own.parts)):
            block = own.blocks_of(layer)[1]
            prefix, our_prefix = names.layers.format(block), own.layers.format(block)
            for module, role in modules.items():
                count = config.experts.router.num_experts if "{}" in module else 1
                for name in (module.format(expert) for expert in range(count)):
                    theirs = prefix + self._architecture.names.get(name, name)
                    ours = our_prefix + name
                    self._own_names[ours] = theirs
                    if theirs in self._model.names:
                        places[ours] = _Place(theirs, name.rpartition(".")[0], role)
        return places

    def _scaled(self, place: _Place, items: np.ndarray) -> np.ndarray:
        """Rows of a tensor with a scale, or with one for each of its matrices."""
        rows = items.reshape(-1, items.shape[-1])
        scales = self._scales[place.name]
        scales = scales.repeat(len(rows) // scales.size)
        ids = self._row_order(place)
        if ids is not None:
            rows, scales = rows[ids], scales[ids]
        return cast(np.ndarray, StoredRows.of(ScaledBlocks(rows, scales), *items.shape[:-2]))

    def _find_scales(self, places: Collection[_Place]) -> set[str]:
        """Read the scales of NVFP4 tensors; return their names, and of scales of activations.

        What those would do to activations is left out.
        """
        known = set()
        for place in places:
            info, base = self._info(place), place.name.removesuffix("weight")
            if info.type.name != "NVFP4" or not place.name.endswith(".weight"):
                continue
            known |= {f"{base}scale", f"{base}input_scale"}
            if f"{base}scale" in self._model.names:
                scales = self._model.file_of(f"{base}scale").array(f"{base}scale")
                count = info.shape[0] if len(info.shape) == 3 else 1
                is_good = scales.dtype == np.float32 and scales.size in (1, count)
                if not is_good or not np.isfinite(scales).all():
                    raise CheckpointError(
                        f"{self.path}: tensor {shown(f'{base}scale')} is not {count} finite "
                        "numbers of float32; download it again"
                    )
                self._scales[place.name] = scales.reshape(-1).astype(np.float32)
        return known

    def _entry(self, place: _Place) -> TensorEntry:
        info = self._info(place)
        items = info.type.items(info.shape[-1])
        if place.name in self._scales:
            items = row_items(NVFP4_SCALED, info.shape[-1])
        shape = (*info.shape[:-1], items)
        return TensorEntry(info.type.name, shape, info.start, info.end)

    def _loaded_dtypes(self, config: ModelConfig, drafts: bool) -> dict[str, np.dtype]:
        """By role, the dtype of its matrices in all layers, or in that which drafts."""
        kinds: dict[str, set[TensorType]] = {}
        own = [place for place in self._places.values() if place.drafts == drafts]
        for place in own:
            info = self._info(place)
            if len(info.shape) in (2, 3):  # of one matrix, or of all experts
                kinds.setdefault(_TOGETHER.get(place.role, place.role), set()).add(info.type)
        transposed = {place.role for place in own if place.module != _DOWN_T}
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
    """The dtype of matrices of these types in memory."""
    found = {(kind.transposed if is_transposed else kind.loaded) for kind in types}
    return agreed_dtype({dtype for dtype in found if dtype is not None})


def without_effect(config: ModelConfig) -> set[str]:
    """Return names of tensors that a file may have, and that no layer reads.

    The configuration has what they say of the rope; some layers have an earlier one's keys.
    """
    shared = [layer for layer, kv in enumerate(config.kv_layers) if layer != kv]
    keys = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
    return {*FACTORS, *(GGUF_NAMES.layers.format(n) + key for n in shared for key in keys)}


def _grouped_rows(config: ModelConfig) -> np.ndarray:
    """Falcon's rows of q, k and v: all q, k, v in a file, by KV head in a checkpoint."""
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    rows = np.arange((heads + 2 * kv_heads) * size).reshape(-1, size)
    q, k, v = rows[:heads], rows[heads : heads + kv_heads], rows[heads + kv_heads :]
    groups = [q.reshape(kv_heads, -1, size), k[:, None], v[:, None]]
    return np.concatenate(groups, axis=1).reshape(-1)


def _pairs(
    config: ModelConfig, usual: TensorNames, names: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield (name in a checkpoint, name in the file, role) of each module.

    names: the file's, by module of a checkpoint, where they are not the `usual` ones
    """
    ours = tensor_names(config)
    for role, own, other in _by_role(ours, usual):
        yield own, names.get(own, other), role
    for layer in range(config.num_layers):
        blocks = ours.blocks_of(layer)
        for role, own, other in _by_role(ours.within_layer(layer), usual.layer):
            block = blocks[role in FFN_ROLES]
            full, prefix = ours.layers.format(block) + own, usual.layers.format(block)
            yield full, prefix + names.get(own, other), role
            if role == "down":
                yield full, prefix + _DOWN_T, role


def _by_role(
    ours: TensorNames | LayerNames | RecurrentNames | DraftNames, theirs: Any
) -> Iterator[tuple[str, str, str]]:
    """Yield (role, a checkpoint's module, the file's usual one)."""
    for field in fields(ours):
        own, other = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(own, (RecurrentNames, DraftNames)):
            yield from _by_role(own, other)
        elif field.name not in (*_NO_MODULES, "experts"):
            modules = own if isinstance(own, tuple) else (own,)
            usual = other if isinstance(other, tuple) else (other,)
            for module, one in zip(modules, usual, strict=False):
                if module and one:
                    yield _ROLES.get(field.name, field.name), module, one
