"""A matrix for each block of each layer, of any height and width, in one format or two.

Experts of a mixture, its shared expert and its dense layers have down rows of different lengths,
and files hold some of them in more bits than others. A kernel is compiled for one format, so the
matrices of each format have their own array, end to end.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.formats import row_items

# Numbers of a place: which array (0: first, 1: second), its items, items of a row.
IS_SECOND, BEGIN, END, ROW_ITEMS = range(4)
NUM_PLACE_NUMBERS = 4
ALIGNED_ITEMS = 64  # a matrix begins at a multiple: at a cache line, in any format


class BlockRows(NamedTuple):
    """Block b of layer l is the matrix first[begin:end] or second[begin:end] of `places[l, b]`.

    first, second (items,): both quantized or both of one float format; with one format second is
    empty and has first's dtype
    places (L, B, 4) int64; a block without rows has no items
    """

    first: np.ndarray
    second: np.ndarray
    places: np.ndarray

    def matrix(self, layer: int, block: int = 0) -> np.ndarray:
        """The rows of a block, (rows, row items), a view; without rows where it has none."""
        place = self.places[layer, block]
        return block_matrix(self.second if place[IS_SECOND] else self.first, place)

    def dtype_of(self, layer: int, block: int) -> np.dtype:
        """The dtype of a block's rows."""
        array = self.second if self.places[layer, block, IS_SECOND] else self.first
        return array.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return int(self.first.nbytes + self.second.nbytes)


def block_matrix(array: np.ndarray, place: np.ndarray) -> np.ndarray:
    """The matrix at `place`, of its array; also compiled."""
    items = place[ROW_ITEMS]
    height = (place[END] - place[BEGIN]) // max(np.int64(1), items)
    return array[place[BEGIN] : place[END]].reshape(height, items)


def block_places(
    heights: np.ndarray | int,
    widths: np.ndarray,
    dtypes: tuple[np.dtype, np.dtype],
    is_second: np.ndarray,
) -> tuple[np.ndarray, tuple[int, int]]:
    """Places of matrices of heights[l, b] rows of widths[l, b] weights; items of both arrays.

    Shapes:  widths (L, B) int64, heights the same or one for all; is_second (L, B) bool: which are
             in the second format; places (L, B, 4)
    Errors:  ValueError for a width that the format has no rows of
    """
    heights = np.broadcast_to(heights, widths.shape)
    places = np.zeros((*widths.shape, NUM_PLACE_NUMBERS), np.int64)
    ends = [0, 0]
    for index in np.ndindex(*widths.shape):
        which, width, height = int(is_second[index]), int(widths[index]), int(heights[index])
        if width == 0 or height == 0:
            continue
        items = row_items(dtypes[which], width)
        begin = -(-ends[which] // ALIGNED_ITEMS) * ALIGNED_ITEMS
        ends[which] = begin + height * items
        places[index] = which, begin, ends[which], items
    return places, (ends[0], ends[1])
