"""The order in which a layer's neurons are added up, whoever computes them.

A model's neurons are in a fixed number of *stripes*, a power of two. Neurons of a stripe are added
in ascending order, block after block; stripes' sums are the leaves of a binary tree, in which a sum
and its neighbour are added. A thread has some stripes in a row, a service those of its threads.
Each adds what meets in the tree within its own stripes; what is left over it passes on, the service
from its threads to the driver. So a token's bits depend neither on threads nor on services.

A sum is known by its first stripe. Biases come last of all: they count as stripe `OF_BIASES`.
"""

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.candidates import BLOCK, END_ROW, FIRED_END, ROW

OF_BIASES = 1 << 20
ALL_STRIPES = OF_BIASES << 1  # an end behind them


@njit(nogil=True, cache=True)
def meet(one, other, first, end):
    """Whether the sums that begin at stripes one < other meet in the tree within first..end-1."""
    height = 0
    while one >> height != other >> height:
        height += 1
    begin = one >> height << height
    return begin >= first and begin + (1 << height) <= end


@njit(nogil=True, cache=True, _nrt=True)
def first_stripes(first, end):
    """The first stripes of the sums that are left over of stripes first..end-1: int64."""
    found, count = np.empty(max(1, end - first), np.int64), 0
    for stripe in range(first, end + 1):
        while count > 1 and meet(found[count - 2], found[count - 1], first, stripe):
            count -= 1
        if stripe < end:
            found[count] = stripe
            count += 1
    return found[:count]


@njit(nogil=True, cache=True)
def list_by_stripe(rows, begin, end, spans, fired_ids, order, ends):
    """Order what fired by stripes begin..end-1; in a stripe by block, then by row. Checks nothing.

    Those of stripe i are order[:ends[i - begin]] behind those of the stripe before.
    Shapes:  rows (B, stripes + 1) int64: first rows of a layer's stripes in each block, and ends,
             or (0, 0) where all is one stripe
             fired_ids (N,) int32, ascending; order (N,) int32
    """
    count, found = fired_ids.shape[0], 0
    if rows.shape[0] == 0:
        for i in range(count):
            order[i] = i
        ends[0] = count
        return
    i = 0
    for span in spans:
        span[FIRED_END] = i  # from now on the next one of the span
        while i < count and fired_ids[i] < span[END_ROW]:
            i += 1
    for stripe in range(begin, end):
        for span in spans:
            own, i = rows[span[BLOCK]], span[FIRED_END]
            row = span[ROW] + own[stripe + 1] - own[0]
            while i < count and fired_ids[i] < row:
                order[found] = i
                found += 1
                i += 1
            span[FIRED_END] = i
        ends[stripe - begin] = found
