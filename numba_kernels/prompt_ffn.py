"""Up and down of a prompt's tokens, for the neurons that fire for each of them.

Gates of a prompt are matrix products; where few fire, most of up and down need not be computed.
Neurons are taken in blocks and columns of the output in parts, so that what many tokens read stays
in the second-level cache while they pass by.
"""

import numpy as np
from numba import njit

from numba_kernels.operands import PART_COLUMNS
from numba_kernels.rows import add_in_order
from numba_kernels.vector_ir import add_part1, add_part4, dot_ahead, dot_rows4, prefetch_part

BLOCK = 256  # neurons; 256 KiB of a part of float16 rows


@njit(nogil=True, cache=True)
def list_fired(h, first, last, fired, counts):
    """For each token, the neurons of block b in first..last-1 whose h is not zero; no checks.

    fired (T, N) int32: those of block b from fired[t, b * BLOCK] on; counts (T, blocks) int32
    """
    for t in range(h.shape[0]):
        for block in range(first, last):
            begin, found = block * BLOCK, 0
            for n in range(begin, min(begin + BLOCK, h.shape[1])):
                fired[t, begin + found] = n
                found += h[t, n] != 0
            counts[t, block] = found


@njit(nogil=True, cache=True)
def prompt_up_kernel(up, bias, x, h, first, last, fired, counts):
    """h[t, n] *= up[n] . x[t] + bias[n] for listed neurons of blocks first..last-1; no checks.

    `x` is what `prepared` gave, bias (N,) or (0,), h (T, N) float32
    """
    parts = up.shape[1] * up.itemsize // 1024 + 1
    for block in range(first, last):
        begin = block * BLOCK
        for n in range(begin, min(begin + BLOCK, h.shape[1])):
            for part in range(parts):
                prefetch_part(up, n, part)
        for t in range(h.shape[0]):
            i, end = begin, begin + counts[t, block]
            while i + 4 <= end:
                a, b, c, d = fired[t, i], fired[t, i + 1], fired[t, i + 2], fired[t, i + 3]
                sums = dot_rows4(up, a, b, c, d, x, t)
                for k in range(4):
                    n = fired[t, i + k]
                    h[t, n] *= sums[k] + (bias[n] if bias.shape[0] else np.float32(0))
                i += 4
            while i < end:
                n = fired[t, i]
                product = dot_ahead(up, n, n, x, t)
                h[t, n] *= product + (bias[n] if bias.shape[0] else np.float32(0))
                i += 1


@njit(nogil=True, cache=True)
def prompt_down_kernel(down, h, fired, counts, first, last, sums, out):
    """out[t] += sum over listed n of h[t, n] * down[n], for parts first..last-1 of its columns.

    A part is PART_COLUMNS columns; out (T, d), sums (parts, T, PART_COLUMNS) float32: a part's sums
    lie together, for rows a power of two apart would evict each other. Checks nothing.
    """
    for part in range(first, last):
        begin, end = part * PART_COLUMNS, min((part + 1) * PART_COLUMNS, out.shape[1])
        own = sums[part]
        own[:] = 0
        for block in range(counts.shape[1]):
            _add_block(down, h, fired, counts, block, part, own)
        for t in range(out.shape[0]):
            add_in_order(down, own[t], out[t, begin:end], 0, end - begin)


@njit(nogil=True, cache=True)
def _add_block(down, h, fired, counts, block, part, sums):
    begin = block * BLOCK
    for n in range(begin, min(begin + BLOCK, h.shape[1])):
        prefetch_part(down, n, part)
    for t in range(h.shape[0]):
        i, end = begin, begin + counts[t, block]
        while i + 4 <= end:
            a, b, c, d = fired[t, i], fired[t, i + 1], fired[t, i + 2], fired[t, i + 3]
            add_part4(sums, t, down, a, b, c, d, h[t, a], h[t, b], h[t, c], h[t, d], part)
            i += 4
        while i < end:
            add_part1(sums, t, down, fired[t, i], h[t, fired[t, i]], part)
            i += 1


def num_blocks(num_neurons: int) -> int:
    """Blocks of `list_fired`."""
    return -(-num_neurons // BLOCK)


def num_parts(width: int) -> int:
    """Parts of `prompt_down_kernel`."""
    return -(-width // PART_COLUMNS)


def empty_lists(num_tokens: int, num_neurons: int) -> tuple[np.ndarray, np.ndarray]:
    """`fired` and `counts` of `list_fired`."""
    shape = (num_tokens, num_blocks(num_neurons))
    return np.empty((num_tokens, shape[1] * BLOCK), np.int32), np.empty(shape, np.int32)
