"""Up and down of a prompt's tokens, for the neurons that fire for each of them.

A matmul computes a prompt's gates; where few fire, most of up and down need not be computed.
Neurons go by in blocks and columns of the output in parts, so that what many tokens read stays in
the second-level cache meanwhile.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.checks import DRELU, GELU, GELU_TANH, SILU
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import activate, activate_up
from hotcold.numba_kernels.decode.rows import add_in_order
from hotcold.numba_kernels.ir.activation_ir import gelu_row, gelu_tanh_row, silu_row
from hotcold.numba_kernels.ir.operands import PART_COLUMNS
from hotcold.numba_kernels.ir.vector_ir import (
    add_part1,
    add_part4,
    dot_lone_row,
    dot_rows4,
    prefetch_part,
)

_ZERO = np.float32(0)
Empty = Callable[..., np.ndarray]
BLOCK = 256  # neurons; 256 KiB of a part of float16 rows


class FiredNeurons(NamedTuple):
    """Which neurons fire for which tokens, block by block: what is read together is contiguous.

    Token t's of block b are ids[b, starts[b, t] : starts[b, t + 1]], and values, what each row of
    down is multiplied with, in the same way. Shapes and dtypes: ids (blocks, T * BLOCK) int32,
    values the same float32, starts (blocks, T + 1) int32.
    """

    ids: np.ndarray
    values: np.ndarray
    starts: np.ndarray


@njit(nogil=True, cache=True)
def activate_kernel(function, weights, bounds, factors, h, num_fired, first, last):
    """h[t] = fn(h[t]) * weights[t] * factors[t], and how many are not zero, for first <= t < last.

    `factors` (T, N), products with up rows, are activated as up is; (T, 0) is none. weights (T, B)
    are of blocks of neurons, b of bounds[b]..bounds[b + 1] - 1; (0, 0) is none. Checks nothing.
    Dtypes:  h, factors, weights float32; bounds, num_fired (T,) int64
    """
    for t in range(first, last):
        own = h[t]
        if function.code == SILU:
            silu_row(h, t)
        elif function.code == GELU:
            gelu_row(h, t)
        elif function.code == GELU_TANH:
            gelu_tanh_row(h, t)
        else:
            for n in range(own.shape[0]):
                own[n] = activate(function, own[n])
        for b in range(weights.shape[1]):
            for n in range(bounds[b], bounds[b + 1]):
                own[n] *= weights[t, b]
        if factors.shape[1]:
            _scale(function, factors[t], own)
        found = 0
        for n in range(own.shape[0]):
            found += own[n] != 0
        num_fired[t] = found


@njit(nogil=True, cache=True)
def scale_kernel(function, factors, h, first, last):
    """h[t] *= factors[t], activated as up is, for first <= t < last; shapes as above."""
    for t in range(first, last):
        _scale(function, factors[t], h[t])


@njit(nogil=True, cache=True)
def _scale(function, factors, h):
    if function.code == DRELU:
        for n in range(h.shape[0]):
            h[n] *= activate_up(function, factors[n])
    else:
        for n in range(h.shape[0]):
            h[n] *= factors[n]


@njit(nogil=True, cache=True)
def list_fired(h, first, last, fired):
    """List the neurons of blocks first..last-1 where h (T, N) float32 is not zero; no checks."""
    for block in range(first, last):
        begin, found = block * BLOCK, 0
        ids, values, starts = fired.ids[block], fired.values[block], fired.starts[block]
        starts[0] = 0
        for t in range(h.shape[0]):
            for n in range(begin, min(begin + BLOCK, h.shape[1])):
                ids[found], values[found] = n, h[t, n]
                found += h[t, n] != 0
            starts[t + 1] = found


@njit(nogil=True, cache=True, inline="always")
def _prefetch_share(matrix, block, first_part, last_part, turn, num_turns):
    """Prefetch some rows of the next block: all at once would be more than a core has in flight."""
    first = block * BLOCK
    begin, end = first + BLOCK * turn // num_turns, first + BLOCK * (turn + 1) // num_turns
    for n in range(begin, min(end, matrix.shape[0])):
        for part in range(first_part, last_part):
            prefetch_part(matrix, n, part)


@njit(nogil=True, cache=True)
def prompt_up_kernel(up, bias, x, first, last, fired):
    """values *= up[n] . x[t] + bias[n] for listed neurons of blocks first..last-1; no checks.

    `x` is what `quantize_activations` gave, bias (N,) or (0,)
    """
    parts = up.shape[1] * up.itemsize // 1024 + 1
    for block in range(first, last):
        ids, values, starts = fired.ids[block], fired.values[block], fired.starts[block]
        num_tokens = starts.shape[0] - 1
        for t in range(num_tokens):
            _prefetch_share(up, block + 1, 0, parts, t, num_tokens)
            i, end = starts[t], starts[t + 1]
            while i + 4 <= end:
                sums = dot_rows4(up, ids[i], ids[i + 1], ids[i + 2], ids[i + 3], x, t)
                for k in range(4):
                    values[i + k] *= sums[k] + (bias[ids[i + k]] if bias.shape[0] else _ZERO)
                i += 4
            while i < end:
                n = ids[i]
                product = dot_lone_row(up, n, x, t)
                values[i] *= product + (bias[n] if bias.shape[0] else _ZERO)
                i += 1


@njit(nogil=True, cache=True)
def prompt_down_kernel(down, fired, first, last, sums, out):
    """out[t] += sum over listed n of value * down[n], for parts first..last-1 of its columns.

    A part is PART_COLUMNS columns; out (T, d), sums (parts, T, PART_COLUMNS) float32: a part's sums
    lie together: rows a power of two apart would evict each other. Checks nothing.
    """
    for part in range(first, last):
        begin, end = part * PART_COLUMNS, min((part + 1) * PART_COLUMNS, out.shape[1])
        own = sums[part]
        own[:] = 0
        _prefetch_share(down, 0, part, part + 1, 0, 1)
        for block in range(fired.ids.shape[0]):
            _add_block(down, fired, block, part, own)
        for t in range(out.shape[0]):
            add_in_order(down, own[t], out[t, begin:end], 0, end - begin)


@njit(nogil=True, cache=True)
def _add_block(down, fired, block, part, sums):
    ids, values, starts = fired.ids[block], fired.values[block], fired.starts[block]
    num_tokens = sums.shape[0]
    for t in range(num_tokens):
        _prefetch_share(down, block + 1, part, part + 1, t, num_tokens)
        i, end = starts[t], starts[t + 1]
        while i + 4 <= end:
            a, b, c, d = ids[i], ids[i + 1], ids[i + 2], ids[i + 3]
            add_part4(
                sums, t, down, a, b, c, d,
                values[i], values[i + 1], values[i + 2], values[i + 3], part,
            )  # fmt: skip
            i += 4
        while i < end:
            add_part1(sums, t, down, ids[i], values[i], part)
            i += 1


def num_blocks(num_neurons: int) -> int:
    """Blocks of `list_fired`."""
    return -(-num_neurons // BLOCK)


def num_parts(width: int) -> int:
    """Parts of `prompt_down_kernel`."""
    return -(-width // PART_COLUMNS)


def empty_fired(num_tokens: int, num_neurons: int, empty: Empty = np.empty) -> FiredNeurons:
    """Space for the worst case, in uninitialized arrays empty(shape, dtype)."""
    blocks = num_blocks(num_neurons)
    shape = blocks, num_tokens * BLOCK
    return FiredNeurons(
        empty(shape, np.int32),
        empty(shape, np.float32),
        empty((blocks, num_tokens + 1), np.int32),
    )
