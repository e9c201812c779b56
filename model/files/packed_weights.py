"""All tensors of a safetensors model that others quantized: `METHODS` says what belongs together.

A matrix has one name and rows of blocks, made when they are read; formats in memory are those of
its role in all layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from hotcold.model.config.build import read_config
from hotcold.model.config.families import PREFIXES, tensor_names
from hotcold.model.config.json_reader import ConfigReader, read_json_object
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.quantization import KEY, PackedMethod, packed_method
from hotcold.model.config.weight_formats import agreed_dtype, dtype_name
from hotcold.model.errors import CheckpointError, shown
from hotcold.model.files.packed_methods import METHODS, Matrix, Parts, Rule
from hotcold.model.files.safetensors_file import (
    BIT_DTYPES,
    SafetensorsFile,
    TensorEntry,
    WeightFile,
)
from hotcold.model.gguf.file_names import is_gguf
from hotcold.model.mapped_file import MappedFile
from hotcold.numba_kernels.formats import (
    BLOCK_FORMATS,
    NVFP4,
    Q8,
    VALUES,
    row_items,
)
from hotcold.numba_kernels.load.stored_rows import StoredRows

# Of activations and of the KV cache, which are not quantized here.
_UNUSED = (
    *(f".{side}_{kind}" for side in ("input", "output", "activation")
      for kind in ("scale", "zero_point", "global_scale", "scale_ub")),
    *("_activation_scale", ".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale"),
    ".weight_format",
)  # fmt: skip


@dataclass(frozen=True)
class _Found:
    """A matrix, and the tensors that it is read from."""

    parts: Parts
    matrix: Matrix


class PackedWeights(WeightFile):
    """All tensors of a model that METHODS knows, with matrices as rows that are made when read.

    Other parts of a matrix have names too, and no weights: their bytes count as the model's.
    Errors:  CheckpointError where parts do not belong together; those of `read_config`
    """

    def __init__(self, path: Path, files: Mapping[str, WeightFile], method: PackedMethod):
        self.path = path
        self._method = method
        self.paths = tuple(dict.fromkeys(each for file in files.values() for each in file.paths))
        self._places = {
            name: (file, name) for name, file in files.items() if not name.endswith(_UNUSED)
        }
        self._has_unused = len(self._places) < len(files)
        self._found: dict[str, _Found] = {}
        for name in files:
            for rule in METHODS[method.name]:
                if self._take(rule, name, files):
                    break
        self.entries = {name: file.entries[own] for name, (file, own) in self._places.items()}
        for name, found in self._found.items():
            self._describe(name, found)
        config = read_config(path)
        self._roles = _roles(config)
        self._drafting = tensor_names(config.draft_layer()).layers
        self._common = self._common_dtypes()

    def _take(self, rule: Rule, name: str, files: Mapping[str, WeightFile]) -> bool:
        """Make a matrix of the tensor `name` and others, where the rule is theirs."""
        if not name.endswith(rule.main) or name not in self._places:
            return False
        base = name.removesuffix(rule.main)
        named = {end: base + end for end in (rule.main, *rule.needs, *rule.takes)}
        found: dict[str, tuple[SafetensorsFile, str]] = {}
        for end, own in named.items():
            file = files.get(own)
            if isinstance(file, SafetensorsFile):
                found[end] = file, own
        is_own = rule.main in found and files[name].entries[name].format_name in rule.formats
        if not is_own or any(end not in found for end in rule.needs):
            return False
        if ".bias" in found:  # zeros, where the module had none
            file, own = found.pop(".bias")
            if not file.stored_bytes(own).any():
                del self._places[own]
        parts = Parts(self._method, base + rule.name, found)
        for end in found:
            self._places.pop(named[end], None)
        self._places[parts.name] = found[rule.main]
        self._found[parts.name] = _Found(parts, rule.read(parts))
        return True

    def _describe(self, name: str, found: _Found) -> None:
        """The entries of a matrix and of its other parts."""
        matrix = found.matrix
        *rows, width = matrix.shape
        try:
            shape = *rows, row_items(matrix.dtype, width)
        except ValueError as problem:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)}: {problem}; use the model that is not quantized"
            ) from None
        own = self._places[name][1]
        for end, (file, stored) in found.parts.found.items():
            entry, is_main = found.parts.entry(end), stored == own
            self._places[name if is_main else stored] = file, stored
            self.entries[name if is_main else stored] = TensorEntry(
                matrix.format_name, shape if is_main else (0,), entry.start, entry.end
            )

    def array(self, name: str) -> np.ndarray:
        """Return a matrix's rows: `StoredRows`, an array to all that copies rows."""
        if name in self._found:
            matrix = self._found[name].matrix
            return cast(np.ndarray, StoredRows.of(matrix.source(), *matrix.shape[:-2]))
        if self.block_dtype(name) is not None:
            return np.empty(0, np.uint8)
        file, own = self._places[name]
        return file.array(own)

    def stored_bytes(self, name: str) -> np.ndarray:
        """Return the bytes of the tensor that holds a matrix's numbers, or of another."""
        file, own = self._places[name]
        return file.stored_bytes(own)

    def mapped_file(self, name: str) -> MappedFile | None:
        """Return the file of that tensor."""
        file, own = self._places[name]
        return file.mapped_file(own)

    def own_name(self, name: str) -> str:
        """Return that tensor's name."""
        return self._places[name][1] if name in self._places else name

    def all_names(self, name: str) -> tuple[str, ...]:
        """Return the names of all parts of a matrix, or a tensor's own."""
        found = self._found.get(name)
        if found is None:
            return (self.own_name(name),)
        return tuple(own for _, own in found.parts.found.values())

    def release(self, name: str) -> None:
        """Unload the pages of a tensor, or of all parts of a matrix."""
        found = self._found.get(name)
        places = [self._places[name]] if found is None else found.parts.found.values()
        for file, own in places:
            file.release(own)

    def block_dtype(self, name: str) -> np.dtype | None:
        """Return the dtype of a matrix's rows, and of its other parts; None for other tensors."""
        if name in self._found:
            return self._found[name].matrix.dtype
        return VALUES if self.entries[name].shape == (0,) else None

    def loaded_dtype(self, name: str) -> np.dtype | None:
        """Return the matrix's dtype in memory, the same in all layers; None for the stored one."""
        return self._common.get(self._role(name)) or self.own_dtype(name)

    def own_dtype(self, name: str) -> np.dtype | None:
        """Return the dtype in memory that suits the matrix alone."""
        found = self._found.get(name)
        if found is None:
            return None
        return found.matrix.held or BLOCK_FORMATS[found.matrix.dtype].loaded_as

    def conversion_note(self, by_layer: Collection[str] = ()) -> str:
        """Return a line about what is not held as the files have it; "" where all is."""
        changes: dict[str, set[str]] = {}
        rounded: Counter[str] = Counter()
        for name, found in self._found.items():
            (role, drafts), dtype = self._role(name), found.matrix.dtype
            own = self.own_dtype(name)
            into = own if role in by_layer else self._common.get((role, drafts), own)
            assert into is not None
            exact, kind = BLOCK_FORMATS[dtype].exact, found.matrix.format_name
            if role == "down" and role not in by_layer:  # transposed
                kind += " of down projections" if exact or found.matrix.held else ""
                changes.setdefault(dtype_name(into), set()).add(kind)
            elif into not in (*exact, NVFP4):
                changes.setdefault(dtype_name(into), set()).add(kind)
            elif found.matrix.scales:
                rounded[kind] += 1
        notes = [
            f"{', '.join(sorted(kinds))}: read as {into}{_ERRORS.get(into, '')}"
            for into, kinds in changes.items()
        ]
        if rounded:
            notes.append(f"{', '.join(rounded)}: scales are rounded to float16")
        if self._quantizes_activations():
            notes.append("activations are not quantized as the method does")
        return "; ".join(notes)

    def _quantizes_activations(self) -> bool:
        values = self._method.values
        groups = values.get("config_groups")
        each = groups.values() if isinstance(groups, dict) else ()
        in_groups = any(isinstance(one, dict) and one.get("input_activations") for one in each)
        return in_groups or self._has_unused or self._method.name in ("fp8", "fbgemm_fp8", "mxfp8")

    def _role(self, name: str) -> tuple[str, bool]:
        """What its matrix is multiplied with, and whether it is the layer's that drafts."""
        prefix = max((each for each in PREFIXES if name.startswith(each)), key=len)
        own = name.removeprefix(prefix)
        drafts = own.startswith(self._drafting)
        if drafts:
            own = _FIRST_LAYER + own.removeprefix(self._drafting)
        own = _NUMBER.sub("0", own)
        return self._roles.get(own, own), drafts  # others of one name have one format, too

    def _common_dtypes(self) -> dict[tuple[str, bool], np.dtype]:
        """By role, the dtype of its matrices in all layers; down's have a row a neuron."""
        kinds: dict[tuple[str, bool], set[np.dtype]] = {}
        for name in self.entries:
            if self.entries[name].shape == (0,):
                continue
            role = self._role(name)
            own = self.own_dtype(name) or BIT_DTYPES.get(self.entries[name].format_name)
            if own is not None:
                is_down = role[0] == "down" and name in self._found
                kinds.setdefault(role, set()).add(Q8 if is_down else own)
        return {role: agreed_dtype(found) for role, found in kinds.items()}


_ERRORS = {
    "q8": ", off by at most 1/254 of the largest of 32 weights",
    "nf4": ", off by at most 1/254 of the largest of a block",
}
_FIRST_LAYER = "layers.0."  # in most families; in others no layer drafts
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _roles(config: ModelConfig) -> dict[str, str]:
    """By a tensor's name, with 0 for all numbers: what its matrix is multiplied with."""
    names = tensor_names(config)
    roles = {f"{names.head}.weight": "head"}
    for number in range(config.num_layers):
        layer = names.of_layer(number)
        modules = {
            "qkv": layer.qkv,
            "out": (layer.out,),
            "gate": (layer.gate, layer.up),
            "down": (layer.down,),
        }
        roles |= {f"{module}.weight": role for role, found in modules.items() for module in found}
        for layout in layer.experts:
            gates = layout.gate, layout.up, layout.shared_gate, layout.shared_up
            roles |= {name.format(0): "gate" for name in gates if name}
            roles |= {name.format(0): "down" for name in (layout.down, layout.shared_down) if name}
    return {_NUMBER.sub("0", name): role for name, role in roles.items()}


def with_packed(path: Path, files: dict[str, WeightFile]) -> dict[str, WeightFile]:
    """Return the file of every tensor, with quantized matrices of others' methods as one each.

    Errors:  CheckpointError for a method that is not read, and as for `PackedWeights`
    """
    method = None if is_gguf(path) else _method(path)
    if method is None:
        return files
    if not all(isinstance(file, SafetensorsFile) for file in files.values()):
        raise CheckpointError(
            f"{path}: is quantized by {method.name}, and its weights are pytorch_model.bin; take a "
            "model with model.safetensors"
        )
    packed = PackedWeights(path, files, method)
    return dict.fromkeys(packed.entries, packed)


def _method(path: Path) -> PackedMethod | None:
    """The method of config.json, or of hf_quant_config.json, which Model Optimizer writes."""
    file, beside = path / "config.json", path / "hf_quant_config.json"
    if not file.exists():
        return None
    values = read_json_object(file, CheckpointError)
    inner = values.get("text_config")
    if KEY not in values and isinstance(inner, dict) and KEY in inner:
        values = inner
    found = packed_method(ConfigReader(values, str(file), CheckpointError))
    if found is None and KEY not in values and beside.exists():
        return PackedMethod("modelopt", read_json_object(beside, CheckpointError))
    return found
