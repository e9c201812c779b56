"""The sources of rows that `layer_ffn` goes over, each as a function of NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hotcold.numba_kernels.block_rows import BlockRows, block_places
from hotcold.numba_kernels.checks import read_only
from hotcold.numba_kernels.decode.activations import Thresholds, activation
from hotcold.numba_kernels.decode.selection import NO_IDS, NO_MASKS, NO_WEIGHTS, Selection
from hotcold.numba_kernels.ffn.in_memory import FfnScratch, new_scratch
from hotcold.numba_kernels.ffn.layer_ffn import layer_ffn
from hotcold.numba_kernels.ffn.transposed import new_transposed_scratch
from hotcold.numba_kernels.ffn_arrays import FfnArrays, TransposedArrays, most_rows
from hotcold.numba_kernels.formats import row_width
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL
from hotcold.numba_kernels.serve.mailbox import CELLS_A_SERVICE


@dataclass(frozen=True)
class Source:
    """A source, and the shapes of what goes through it."""

    rows: Any  # FfnArrays, TransposedArrays or OffloadedNeurons
    starts: np.ndarray  # (L, B + 1)
    width: int

    def ffn(
        self,
        layer: int,
        x: np.ndarray,
        selection: Selection,
        thresholds: Thresholds,
        activation_fn: str,
        num_threads: int = 1,
        kept: FfnScratch | None = None,
    ) -> tuple[np.ndarray, FfnScratch]:
        """The layer's output for x (T, d), and the work space that says what has fired.

        `kept`: that of an earlier request
        """
        scratch = kept or self.scratch(num_threads, len(x))
        out = np.full((len(x), self.width), np.nan, np.float32)
        cells = np.zeros(CELLS_A_SERVICE * INTS_A_CELL, np.int32)
        # Read-only as in services, so that the same specialisations are compiled.
        is_listed, *arrays = selection
        chosen = Selection(is_listed, *(read_only(each) for each in arrays))

        def run(thread: int) -> bool:
            return layer_ffn(
                thread, num_threads, cells, 0, layer, chosen, thresholds, x, self.rows, scratch,
                activation(activation_fn), out, out[None][:0],
            )  # fmt: skip

        with ThreadPoolExecutor(num_threads) as pool:
            assert all(pool.map(run, range(num_threads)))
        return out, scratch

    def scratch(self, num_threads: int, num_tokens: int) -> FfnScratch:
        """Work space for `ffn`."""
        new = new_transposed_scratch if isinstance(self.rows, TransposedArrays) else new_scratch
        num_blocks = self.starts.shape[1] - 1
        return new(num_threads, num_tokens, most_rows(self.starts), self.width, num_blocks)


def in_memory(arrays: FfnArrays, width: int) -> Source:
    """Neurons in memory, a row each."""
    return Source(arrays, arrays.starts, width)


def transposed(arrays: FfnArrays, width: int) -> Source:
    """The same neurons with a down row an output, of floats."""
    matrices = [
        [arrays.down[first:last].T for first, last in pairwise(layer)] for layer in arrays.starts
    ]
    fields = arrays._asdict() | {"down": block_rows(matrices)}
    return Source(TransposedArrays(**fields), arrays.starts, width)


def block_rows(matrices: Sequence[Sequence[np.ndarray]]) -> BlockRows:
    """The matrices of each layer's blocks, of one dtype or two; one without rows is none."""
    dtypes = list(dict.fromkeys(matrix.dtype for layer in matrices for matrix in layer))
    widths = np.array([[row_width(m.dtype, m.shape[1]) for m in layer] for layer in matrices])
    is_second = np.array([[m.dtype != dtypes[0] for m in layer] for layer in matrices])
    heights = np.array([[len(m) for m in layer] for layer in matrices])
    places, counts = block_places(heights, widths, (dtypes[0], dtypes[-1]), is_second)
    sizes = counts[0], counts[1] if len(dtypes) > 1 else 0
    rows = BlockRows(np.zeros(sizes[0], dtypes[0]), np.zeros(sizes[1], dtypes[-1]), places)
    for layer, block in zip(*np.nonzero(heights * widths), strict=True):
        rows.matrix(layer, block)[:] = matrices[layer][block]
    return rows


def alone(selection: Selection, token: int) -> Selection:
    """What a token of several chooses, as its own request."""
    is_listed, ids, masks, weights = selection
    if masks.size:
        ids = ids[(masks >> np.uint32(token)) & np.uint32(1) != 0]
    if weights.size:
        weights = weights[token : token + 1]
    return Selection(is_listed, ids if is_listed else NO_IDS, NO_MASKS, weights)


def listed(selection: Selection, starts: np.ndarray) -> Selection:
    """The same neurons of one token, listed, with the same weights."""
    ids = np.arange(starts[-1], dtype=np.int32)
    if selection.is_listed:
        ids = selection.ids
    if selection.block_weights.size:
        ids = ids[np.repeat(selection.block_weights[0] != 0, np.diff(starts))[ids]]
    return Selection(True, ids, NO_MASKS, selection.block_weights if selection.block_weights.size
                     else NO_WEIGHTS)  # fmt: skip
