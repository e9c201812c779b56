"""Keys or values of every layer in pages, each layer's heads and rows of its own shape."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS


class LayerPages(NamedTuple):
    """Layer l has items[slice(*spans[l])]: pages of shapes[l] heads, positions and rows.

    items (N,) of the cache's format; spans (L, 2), shapes (L, 2) int64: heads, items of a row
    """

    items: np.ndarray
    spans: np.ndarray
    shapes: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return int(self.items.nbytes)

    def pages(self, layer: int) -> np.ndarray:
        """The layer's pages (M, heads, PAGE_POSITIONS, items of a row), a view."""
        heads, row = self.shapes[layer]
        return self.items[slice(*self.spans[layer])].reshape(-1, heads, PAGE_POSITIONS, row)


@njit(nogil=True, cache=True)
def layer_pages(cache, layer):
    """`LayerPages.pages` in compiled code."""
    (first, last), (heads, row) = cache.spans[layer], cache.shapes[layer]
    count = (last - first) // max(1, heads * PAGE_POSITIONS * row)
    return cache.items[first:last].reshape(count, heads, PAGE_POSITIONS, row)


def page_spans(
    num_pages: Sequence[int], shapes: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """`spans` and `shapes` of layers with so many pages each."""
    sizes = np.array(
        [
            count * heads * PAGE_POSITIONS * row
            for count, (heads, row) in zip(num_pages, shapes, strict=True)
        ],
        np.int64,
    )
    ends = np.cumsum(sizes)
    return np.stack([ends - sizes, ends], axis=1), np.array(shapes, np.int64).reshape(-1, 2)
