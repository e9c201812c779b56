"""Tensors of MXFP4 in safetensors files: values in `…_blocks`, scales in `…_scales`.

Each pair is one tensor of ggml's blocks, which readers know from GGUF files.
Source: OpenAI's gpt_oss/torch/weights.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np

from hotcold.model.errors import CheckpointError, shown
from hotcold.model.files.safetensors_file import SafetensorsFile, TensorEntry, WeightFile
from hotcold.model.gguf.tensor_types import TYPE_OF_NAME
from hotcold.model.mapped_file import MappedFile
from hotcold.numba_kernels.formats import QUANT_GROUP

_VALUES, _SCALES = "_blocks", "_scales"
_DOWN = "down_proj"
_KIND = TYPE_OF_NAME["MXFP4"]
_GROUP_BYTES = QUANT_GROUP // 2


class Mxfp4Pair(WeightFile):
    """A pair of tensors: the values' name has rows of blocks, the scales' name rows of no weights.

    Errors:  CheckpointError where their shapes do not belong together
    """

    def __init__(self, name: str, values: SafetensorsFile, scales: SafetensorsFile):
        self.path = values.path
        self.paths = tuple(dict.fromkeys((values.path, scales.path)))
        self._name, self._scales = name, name.removesuffix(_VALUES) + _SCALES
        self._files = {name: values, self._scales: scales}
        of_values, of_scales = (file.entries[each] for each, file in self._files.items())
        if of_values.shape != (*of_scales.shape, _GROUP_BYTES) or len(of_scales.shape) < 2:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)} has shape {shown(list(of_values.shape))}, "
                f"beside scales of shape {shown(list(of_scales.shape))}; download it again"
            )
        *matrices, groups = of_scales.shape
        row_bytes = _KIND.items(QUANT_GROUP * groups)
        self.entries = {
            name: _entry(of_values, (*matrices, row_bytes)),
            self._scales: _entry(of_scales, (*matrices, 0)),
        }

    def array(self, name: str) -> np.ndarray:
        """Return the rows of blocks: `PairedBlocks`, an array to all that copies rows."""
        if name == self._scales:
            return np.empty(self.entries[name].shape, np.uint8)
        # Numba takes a second to import, and commands' help needs no arrays.
        from hotcold.numba_kernels.load.blocks import PairedBlocks

        values, scales = (file.array(each) for each, file in self._files.items())
        return cast(np.ndarray, PairedBlocks(values, scales))

    def mapped_file(self, name: str) -> MappedFile:
        """Return the file that holds the values, or the scales."""
        return self._files[name].mapped_file(name)

    def release(self, name: str) -> None:
        """Unload the pages of the pair."""
        for each, file in self._files.items():
            file.release(each)

    def loaded_dtype(self, name: str) -> np.dtype | None:
        """Return the matrix's dtype in memory; of a down projection with a row a neuron."""
        is_down = self._name.rpartition(".")[2].startswith(_DOWN)
        return _KIND.transposed if is_down else _KIND.loaded

    def own_dtype(self, name: str) -> np.dtype | None:
        """Return MXFP4: rows as stored."""
        return _KIND.loaded


def with_pairs(files: Mapping[str, WeightFile]) -> dict[str, WeightFile]:
    """Return the file of every tensor, with pairs of MXFP4 as one tensor each.

    Errors:  CheckpointError as for `Mxfp4Pair`
    """
    found = dict(files)
    for name, values in files.items():
        scales_name = name.removesuffix(_VALUES) + _SCALES
        scales = files.get(scales_name)
        if not name.endswith(_VALUES) or not (_is_bytes(values, name)):
            continue
        if _is_bytes(scales, scales_name):
            pair = Mxfp4Pair(name, cast(SafetensorsFile, values), cast(SafetensorsFile, scales))
            found |= dict.fromkeys((name, scales_name), pair)
    return found


def _is_bytes(file: WeightFile | None, name: str) -> bool:
    return isinstance(file, SafetensorsFile) and file.entries[name].format_name == "U8"


def _entry(stored: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(_KIND.name, shape, stored.start, stored.end)
