"""AMX's products in plain loops: the same sums in the same order, on any CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import njit

from hotcold.actors.cpu.kernel_matmul import row_widths
from hotcold.actors.cpu.thread_team import Then
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.formats import row_width
from hotcold.numba_kernels.load.convert import widen_kernel
from hotcold.numba_kernels.prefill.block_tokens import (
    IS_WHOLE,
    BlockTokens,
    CutRows,
    LaneSums,
    Rows,
    WeightBlocks,
    clear_level,
    merge_levels_of,
    rows_of_block,
)

_STEP = 32  # numbers of a row of a tile
_LEAST = np.float32(np.finfo(np.float32).tiny)
Operand = tuple[BlockTokens, list[np.ndarray]]


def tile_products(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """left (M, K) @ right (K, N), bfloat16 numbers as float32, as TDPBF16PS adds them up.

    Of every 32 numbers those in even places are added to one sum and those in odd places to
    another, in their order; their sum is added to what is there. A product of bfloat16 is exact.
    Numbers below the normal ones are zero.
    """
    total = np.zeros((left.shape[0], right.shape[1]), np.float32)
    _add_up(np.ascontiguousarray(left), np.ascontiguousarray(right.T), total)
    return total


@njit(nogil=True)
def _add_up(left, right, total):
    for m in range(total.shape[0]):
        for n in range(total.shape[1]):
            for first in range(0, left.shape[1], _STEP):
                even, odd = np.float32(0), np.float32(0)
                for k in range(first, min(first + _STEP, left.shape[1]), 2):
                    even = _flushed(even + _flushed(left[m, k]) * _flushed(right[n, k]))
                    if k + 1 < left.shape[1]:
                        odd = _flushed(odd + _flushed(left[m, k + 1]) * _flushed(right[n, k + 1]))
                total[m, n] = _flushed(total[m, n] + _flushed(even + odd))


@njit(nogil=True)
def _flushed(number):
    return np.float32(0) * number if abs(number) < _LEAST else number


def bfloat16_of(numbers: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 numbers, as torch finds them, as float32."""
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.bfloat16).float().numpy()


class EmulatedAmxMatmul:
    """`AmxMatmul` by `tile_products`, with its methods; threads share rows and columns as there."""

    few = 0.05

    def __init__(self, num_threads: int, then: Then) -> None:
        """As `AmxMatmul`."""
        self._num_threads, self._then = num_threads, then

    def operand(self, x: Rows, weights: WeightBlocks, tokens: BlockTokens) -> Operand:
        """x of each block's choices, once the phase has run."""
        found: list[np.ndarray] = []

        def round_(thread: int) -> None:
            if thread == 0:
                for block in range(len(row_widths(x, tokens))):
                    own, ids = rows_of_block(x, tokens, block)
                    found.append(bfloat16_of(own[ids]))

        self._then(round_)
        return tokens, found

    def linear(self, operand: Operand, weights: WeightBlocks, out: Rows) -> None:
        """out = x @ weights.T of each block's choices, as `AmxMatmul.linear`."""
        self._multiply(operand, weights, out, lambda x, matrix, own: (x, matrix[own].T), 0)

    def combine(self, h: CutRows, tokens: BlockTokens, rows: WeightBlocks, out: LaneSums) -> None:
        """out = h @ rows of each block's choices, as `AmxMatmul.combine`."""
        operand = self.operand(h, rows, tokens)
        self._multiply(operand, rows, out, lambda h, matrix, own: (h, matrix[:, own]), 1)

    def _multiply(
        self,
        operand: Operand,
        weights: WeightBlocks,
        out: Rows,
        sides: Callable[[np.ndarray, np.ndarray, slice], tuple[np.ndarray, np.ndarray]],
        axis: int,
    ) -> None:
        tokens, inputs = operand

        def multiply(thread: int) -> None:
            for block, x in enumerate(inputs):
                matrix = _numbers(weights.matrix(block))
                own, ids = rows_of_block(out, tokens, block)
                count = out.out.shape[1] if isinstance(out, LaneSums) else matrix.shape[axis]
                part = split_range(count, thread, self._num_threads, 1)
                if isinstance(out, LaneSums):
                    clear_level(out, block, *part)
                if len(ids) and matrix.size and part[0] < part[1]:
                    product = tile_products(*sides(x, matrix, slice(*part)))
                    if isinstance(out, LaneSums) and not out.steps[block, IS_WHOLE]:
                        product = own[ids, slice(*part)] + product
                    own[ids, slice(*part)] = product
                if isinstance(out, LaneSums):
                    merge_levels_of(out, block, *part)

        self._then(multiply)


def _numbers(rows: np.ndarray) -> np.ndarray:
    """Rows of any format as bfloat16 numbers."""
    bits = np.empty((len(rows), row_width(rows.dtype, rows.shape[1])), np.int16)
    if rows.dtype == np.int16:
        bits[:] = rows
    elif rows.dtype == np.float32:
        return bfloat16_of(rows)
    else:
        widen_kernel(np.ascontiguousarray(rows), bits, 0, len(rows))
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
