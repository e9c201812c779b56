"""A matrix of every layer, stacked, whose rows are in one format or in two.

Files of 4 bits a weight hold some matrices of some layers in 6: what matters most. Kernels are
compiled for formats, so these rows lie in two arrays, each of one.
"""

from typing import NamedTuple

import numpy as np


class LayerRows(NamedTuple):
    """Layer l's rows are first[slice(*first_rows[l])], and after them second[...] the same.

    first (N, items), second (M, items) weights of one width, both quantized or both the same float
    format; second has no rows, and the first's dtype, where one format is enough;
    first_rows, second_rows (L, 2) int64: begin and end
    """

    first: np.ndarray
    second: np.ndarray
    first_rows: np.ndarray
    second_rows: np.ndarray

    def parts(self, layer: int) -> list[np.ndarray]:
        """The layer's rows, in their order: one matrix, or one of each format."""
        spans = (self.first, self.first_rows), (self.second, self.second_rows)
        found = [rows[slice(*span[layer])] for rows, span in spans]
        return [part for part in found if len(part)] or found[:1]

    def matrix(self, layer: int) -> np.ndarray:
        """The layer's rows, of a matrix in one format. Errors: ValueError for one in two."""
        (part,) = self.parts(layer)
        return part

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return int(self.first.nbytes + self.second.nbytes)


def one_format(stack: np.ndarray) -> LayerRows:
    """`stack` (L, N, items), all in one format, as layers' rows; nothing is copied."""
    layers, count, items = stack.shape
    ends = np.arange(1, layers + 1, dtype=np.int64) * count
    rows = stack.reshape(layers * count, items)
    return LayerRows(
        rows, rows[:0], np.stack([ends - count, ends], axis=1), np.zeros((layers, 2), np.int64)
    )
