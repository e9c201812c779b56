"""Work stealing: a service's threads share the rows of a matrix.

Each thread has a part of the rows, in blocks, and streams through it. A thread that has finished
takes blocks of the others' parts, so a late or slow thread delays the others by one block at most.
The last blocks of a part are smaller and smaller, so that threads end together, as in guided
self-scheduling. A row's dot product does not depend on the thread that computes it.

Source:  Polychronopoulos and Kuck, Guided self-scheduling, IEEE Trans. Computers C-36, 1987
"""

import numpy as np

from hotcold.numba_kernels.block_rows import BEGIN, END, ROW_ITEMS
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.by_format import with_matrix
from hotcold.numba_kernels.decode.rows import block_products, split_range
from hotcold.numba_kernels.decode.vectors import quantize_activations
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL, atomic_add

_BLOCK_BYTES, _LEAST_BYTES = 1 << 18, 1 << 15
_UNIT = 48  # rows; whole tiles of every format


def new_block_counters(num_kinds: int, num_threads: int) -> np.ndarray:
    """Counters of `num_kinds` kinds of work in one request: (kinds, threads * 16) int32, zero.

    A cell counts the blocks taken of a thread's part. A kind is used once, then zeroed: for
    attention by `mailbox.finish_request`, for the FFN by `layer_ffn` after its first barrier.
    """
    return np.zeros((num_kinds, num_threads * INTS_A_CELL), np.int32)


@njit(nogil=True, cache=True, inline="always")
def next_block(counters, part):
    """Take the next block of a part; `counters` is one kind's row of `new_block_counters`."""
    return np.int64(atomic_add(counters, part * INTS_A_CELL, np.int32(1)))


@njit(nogil=True, cache=True)
def take_piece(counters, thread, num_threads, pieces):
    """The next of num_threads * pieces pieces of work, or -1: first of those of this thread."""
    for turn in range(num_threads):
        part = (thread + turn) % num_threads
        number = next_block(counters, part)
        if number < pieces:
            return part * pieces + number
    return np.int64(-1)


@njit(nogil=True, cache=True)
def _rows_of(weights, num_bytes):
    return max(1, num_bytes // max(1, _UNIT * weights.shape[1] * weights.itemsize)) * _UNIT


@njit(nogil=True, cache=True)
def block_rows(weights):
    """Rows of a block."""
    return _rows_of(weights, _BLOCK_BYTES)


@njit(nogil=True, cache=True)
def least_rows(weights):
    """Rows of the smallest block, but for what is left at the end."""
    return _rows_of(weights, _LEAST_BYTES)


@njit(nogil=True, cache=True)
def _following_rows(left, least):
    """Rows of the next block where less than two blocks are left: half, in whole units."""
    return min(left, max(least, left // 2 // _UNIT * _UNIT))


@njit(nogil=True, cache=True)
def block_span(count, size, least, number):
    """First and last row of block `number` of a part of `count` rows; equal where there is none.

    Blocks have `size` rows; where less than two are left each has half of what is left, but at
    least `least`. With `least` = `size` all but the last have `size`.
    """
    whole = max(0, count // size - 1)
    if number < whole:
        return number * size, number * size + size
    begin = whole * size
    for _ in range(number - whole):
        begin += _following_rows(count - begin, least)
    return begin, begin + _following_rows(count - begin, least)


@njit(nogil=True, cache=True)
def num_blocks(count, size, least):
    """Blocks of a part of `count` rows."""
    whole = max(0, count // size - 1)
    left = count - whole * size
    while left > 0:
        left -= _following_rows(left, least)
        whole += 1
    return whole


@njit(nogil=True, cache=True)
def work_stealing_rows(counters, thread, num_threads, weights, bias, x, addend, out, column):
    """out[t, n] = weights[n - column] . x[t] + bias[n] + addend[t, n], of the rows it takes.

    Row r is column `column` + r of `out` (T, N). `bias` and `addend` may be empty. `x` is
    `quantize_activations` of T tokens. Checks nothing.
    """
    size, least = block_rows(weights), least_rows(weights)
    for turn in range(num_threads):
        part = (thread + turn) % num_threads
        first, last = split_range(weights.shape[0], part, num_threads, 4)
        begin, end = block_span(last - first, size, least, next_block(counters, part))
        while begin < end:
            begin, end = first + begin, first + end
            block_products(weights, x, out, begin, end, column + begin)
            for t in range(out.shape[0]):
                if bias.shape[0]:
                    for n in range(column + begin, column + end):
                        out[t, n] += bias[n]
                if addend.shape[0]:
                    for n in range(column + begin, column + end):
                        out[t, n] += addend[t, n]
            begin, end = block_span(last - first, size, least, next_block(counters, part))


@njit(nogil=True, cache=True)
def _share_matrix(weights, counters, thread, num_threads, bias, x, inputs, addend, out, column):
    vectors = quantize_activations(weights, x, inputs, thread)
    work_stealing_rows(counters, thread, num_threads, weights, bias, vectors, addend, out, column)


@njit(nogil=True, cache=True)
def work_stealing_layer(
    counters, thread, num_threads, rows, layer, bias, x, inputs, addend, out
):  # fmt: skip
    """`work_stealing_rows` of a layer's `BlockRows`, one under the other; `counters`: of each.

    x (T, d) float32 is quantized for each in the thread's part of `inputs`.
    """
    column = np.int64(0)
    for block in range(rows.places.shape[1]):
        place = rows.places[layer, block]
        height = (place[END] - place[BEGIN]) // max(np.int64(1), place[ROW_ITEMS])
        if height:
            with_matrix(
                rows.arrays, place, _share_matrix, counters[block], thread, num_threads, bias, x,
                inputs, addend, out, column,
            )  # fmt: skip
        column += height
