"""A matrix for each block of each layer, of any height and width, each in a format of its own.

Files hold matrices of one role in several formats: those of sensitive layers in more bits, a shared
expert's in others than experts'. A kernel is compiled for one format, so the matrices of each
format have their own array, end to end, and a place says in which array a matrix is.
`numba_kernels.decode.by_format` finds the kernel for it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.formats import row_items

# Numbers of a place: which array, its items, items of a row.
FORMAT, BEGIN, END, ROW_ITEMS = range(4)
NUM_PLACE_NUMBERS = 4
ALIGNED_ITEMS = 64  # a layer's first matrix begins at a multiple: at a cache line, in any format


class BlockRows(NamedTuple):
    """Block b of layer l is the matrix arrays[format][begin:end] of `places[l, b]`.

    arrays: each (items,), of different dtypes: all quantized, or one of floats
    places (L, B, 4) int64; a block whose rows have no weights has no items
    """

    arrays: tuple[np.ndarray, ...]
    places: np.ndarray

    def matrix(self, layer: int, block: int = 0) -> np.ndarray:
        """The rows of a block, (rows, row items), a view; without rows where it has none."""
        place = self.places[layer, block]
        return block_matrix(self.arrays[place[FORMAT]], place)

    def of_blocks(self, layer: int, first: int, end: int) -> np.ndarray:
        """The rows of blocks first..end-1, which are in one format and width, a view."""
        place = self.places[layer, first].copy()
        place[END] = self.places[layer, end - 1, END]
        return block_matrix(self.arrays[place[FORMAT]], place)

    def dtype_of(self, layer: int, block: int = 0) -> np.dtype:
        """The dtype of a block's rows."""
        return self.arrays[self.places[layer, block, FORMAT]].dtype

    def parts(self, layer: int) -> list[np.ndarray]:
        """The matrices of a layer's blocks that have rows."""
        found = [self.matrix(layer, block) for block in range(self.places.shape[1])]
        return [matrix for matrix in found if matrix.size]

    @property
    def dtypes(self) -> tuple[np.dtype, ...]:
        """The dtypes of all matrices."""
        return tuple(array.dtype for array in self.arrays)

    @property
    def heights(self) -> np.ndarray:
        """The rows of each layer's blocks, (L, B) int64."""
        sizes = self.places[:, :, END] - self.places[:, :, BEGIN]
        found: np.ndarray = sizes // np.maximum(self.places[:, :, ROW_ITEMS], 1)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, without the gaps between them."""
        items = self.places[:, :, END] - self.places[:, :, BEGIN]
        sizes = np.array([array.itemsize for array in self.arrays])
        return int((items * sizes[self.places[:, :, FORMAT]]).sum())


def block_matrix(array: np.ndarray, place: np.ndarray) -> np.ndarray:
    """The matrix at `place`, of its array; also compiled."""
    items = place[ROW_ITEMS]
    height = (place[END] - place[BEGIN]) // max(np.int64(1), items)
    return array[place[BEGIN] : place[END]].reshape(height, items)


def block_places(
    heights: np.ndarray | int, widths: np.ndarray | int, dtypes: Sequence[np.dtype],
    formats: np.ndarray,
) -> tuple[np.ndarray, list[int]]:  # fmt: skip
    """Places of matrices of heights[l, b] rows of widths[l, b] weights; items of each array.

    Matrices of a layer that follow each other in one format have no gap between them.
    Shapes:  formats (L, B): the number in `dtypes` of each matrix's format; heights and widths
             int64, the same or one for all; places (L, B, 4)
    Errors:  ValueError for a width that the format has no rows of
    """
    heights, widths, _ = np.broadcast_arrays(heights, widths, formats)
    places = np.zeros((*formats.shape, NUM_PLACE_NUMBERS), np.int64)
    ends = [0] * len(dtypes)
    for layer, of_layer in enumerate(formats.tolist()):
        last = -1
        for block, which in enumerate(of_layer):
            width, height = int(widths[layer, block]), int(heights[layer, block])
            if width == 0:
                continue
            items = row_items(dtypes[which], width)
            unit = ALIGNED_ITEMS if which != last else 1
            begin = -(-ends[which] // unit) * unit
            ends[which], last = begin + height * items, which
            places[layer, block] = which, begin, ends[which], items
    return places, ends


def matrices_of(stack: np.ndarray) -> BlockRows:
    """`stack` (L, N, items) as a matrix of each layer; nothing is copied."""
    layers, height, items = stack.shape
    ends = np.arange(1, layers + 1, dtype=np.int64) * height * items
    places = np.zeros((layers, 1, NUM_PLACE_NUMBERS), np.int64)
    places[:, 0, BEGIN], places[:, 0, END] = ends - height * items, ends
    places[:, 0, ROW_ITEMS] = items
    return BlockRows((stack.reshape(-1),), places)
