"""A matrix of every layer, stacked, whose rows are in one format or in two.

Files of 4 bits a weight hold the most sensitive matrices of some layers in 6 bits. A kernel is
compiled for one format, so the rows of each format have their own array.
"""

from typing import NamedTuple

import numpy as np


class LayerRows(NamedTuple):
    """Layer l's rows are first[slice(*first_rows[l])], then second[slice(*second_rows[l])].

    first (N, items), second (M, items): weights of one width, both quantized or both of one float
    format; with one format second has no rows and first's dtype
    first_rows, second_rows (L, 2) int64: begin and end
    """

    first: np.ndarray
    second: np.ndarray
    first_rows: np.ndarray
    second_rows: np.ndarray

    def parts(self, layer: int) -> list[np.ndarray]:
        """The layer's rows in order: one matrix, or one of each format."""
        spans = (self.first, self.first_rows), (self.second, self.second_rows)
        found = [rows[slice(*span[layer])] for rows, span in spans]
        return [part for part in found if len(part)] or found[:1]

    def matrix(self, layer: int) -> np.ndarray:
        """The layer's rows. Errors: ValueError where they are in two formats."""
        (part,) = self.parts(layer)
        return part

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return int(self.first.nbytes + self.second.nbytes)


def one_format(stack: np.ndarray) -> LayerRows:
    """`stack` (L, N, items) as layers' rows of one format; nothing is copied."""
    layers, count, items = stack.shape
    ends = np.arange(1, layers + 1, dtype=np.int64) * count
    rows = stack.reshape(layers * count, items)
    return LayerRows(
        rows, rows[:0], np.stack([ends - count, ends], axis=1), np.zeros((layers, 2), np.int64)
    )
