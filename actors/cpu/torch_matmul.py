"""Matmul of many tokens' vectors by torch in bfloat16, which uses AMX, with weights of any format.

Weights of another format are converted block by block, in small buffers that stay in the cache.
What torch's product of a row is may depend on how many rows there are. So every product is of
TOKENS_AT_ONCE tokens, the last ones filled up with zeros.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hotcold.actors.cpu.kernel_matmul import Rows, row_widths
from hotcold.actors.cpu.thread_team import Then
from hotcold.numba_kernels.block_rows import ROW_ITEMS
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.formats import row_width
from hotcold.numba_kernels.load.convert import widen_kernel
from hotcold.numba_kernels.prompt.block_tokens import (
    BlockTokens,
    WeightBlocks,
    rows_of_block,
)

TOKENS_AT_ONCE = 64
_BLOCK_BYTES = 4 << 20  # of converted weights, in each thread


class TorchOperand(NamedTuple):
    """Of each block its runs (TOKENS_AT_ONCE, width)."""

    tokens: BlockTokens
    runs: list[Sequence[torch.Tensor]]


class TorchBfloat16Matmul:
    """Weights and activations rounded to bfloat16; results too, before they are float32.

    Each thread has rows of weights, and a buffer of its own.
    """

    def __init__(self, num_threads: int, then: Then) -> None:
        """`then` has a function called with every thread's number, after those before."""
        self._num_threads, self._then = num_threads, then
        self._buffers = [np.empty(_BLOCK_BYTES // 2, np.int16) for _ in range(num_threads)]

    def operand(self, x: Rows, weights: WeightBlocks, tokens: BlockTokens) -> TorchOperand:
        """x in bfloat16, of each block whole runs of TOKENS_AT_ONCE choices."""
        widths = row_widths(x, tokens).tolist()
        runs = (-(-np.diff(tokens.starts) // TOKENS_AT_ONCE)).tolist()
        rounded = [
            torch.zeros(number * TOKENS_AT_ONCE, width, dtype=torch.bfloat16)
            for number, width in zip(runs, widths, strict=True)
        ]

        def round_(thread: int) -> None:
            torch.set_num_threads(1)
            for block, target in enumerate(rounded):
                own, ids = rows_of_block(x, tokens, block)
                part = slice(*split_range(ids.size, thread, self._num_threads, 1))
                target[: ids.size][part] = torch.from_numpy(own[ids[part]])

        self._then(round_)
        return TorchOperand(tokens, [of_block.split(TOKENS_AT_ONCE) for of_block in rounded])

    def linear(self, operand: TorchOperand, weights: WeightBlocks, out: Rows) -> None:
        """out = x @ weights.T of each block, as `kernel_matmul.FloatMatmul.linear`."""

        def multiply(thread: int) -> None:
            for number, runs in enumerate(operand.runs):
                own, ids = rows_of_block(out, operand.tokens, number)

                def put(block: torch.Tensor, first: int, last: int) -> None:
                    for part, x in zip(_runs(ids), runs, strict=True):  # noqa: B023
                        product = (x @ block.T)[: len(part)].float().numpy()
                        own[part, first:last] = (  # noqa: B023
                            own[part, first:last] + product if own is out else product  # noqa: B023
                        )

                if ids.size:
                    self._each_block(thread, weights.matrix(number), put)

        self._then(multiply)

    def combine(self, h: Rows, tokens: BlockTokens, rows: WeightBlocks, out: Rows) -> None:
        """out = h @ rows of each block, in each thread of its rows, then of all threads.

        As `kernel_matmul.FloatMatmul.combine`.
        """
        operand = self.operand(h, rows, tokens)
        most = int(np.diff(tokens.starts).max(initial=0))
        width = row_width(rows.array.dtype, int(rows.places[:, ROW_ITEMS].max(initial=0)))
        sums = np.empty((self._num_threads, most, width), np.float32)
        for block, runs in enumerate(operand.runs):
            matrix = rows.matrix(block)
            if len(runs) and len(matrix):
                self._combine_block(runs, matrix, *rows_of_block(out, tokens, block), out, sums)

    def _combine_block(
        self,
        runs: Sequence[torch.Tensor],
        rows: np.ndarray,
        own: np.ndarray,
        ids: np.ndarray,
        out: Rows,
        sums: np.ndarray,
    ) -> None:
        def multiply(thread: int) -> None:
            of_thread = sums[thread, : ids.size]
            of_thread[:] = 0

            def add(block: torch.Tensor, first: int, last: int) -> None:
                for part, x in zip(_runs(of_thread), runs, strict=True):
                    part += (x[:, first:last] @ block)[: len(part)].float().numpy()

            self._each_block(thread, rows, add)

        def add_up(thread: int) -> None:
            part = slice(*split_range(ids.size, thread, self._num_threads, 1))
            total = sums[0, : ids.size][part].copy()
            for of_thread in sums[1:]:
                total += of_thread[: ids.size][part]
            own[ids[part]] = own[ids[part]] + total if own is out else total

        self._then(multiply)
        self._then(add_up)

    def _each_block(
        self, thread: int, weights: np.ndarray, use: Callable[[torch.Tensor, int, int], None]
    ) -> None:
        """Call use(block, first, last) for blocks of the thread's share of the rows."""
        size = max(1, _BLOCK_BYTES // 2 // row_width(weights.dtype, weights.shape[1]))
        begin, end = split_range(weights.shape[0], thread, self._num_threads, 1)
        for first in range(begin, end, size):
            last = min(first + size, end)
            use(self._block(thread, weights[first:last]), first, last)

    def _block(self, thread: int, block: np.ndarray) -> torch.Tensor:
        """The block's weights in bfloat16."""
        if block.dtype != np.int16:
            shape = block.shape[0], row_width(block.dtype, block.shape[1])
            if self._buffers[thread].size < shape[0] * shape[1]:  # a row longer than a buffer
                self._buffers[thread] = np.empty(shape[0] * shape[1], np.int16)
            out = self._buffers[thread][: shape[0] * shape[1]].reshape(shape)
            widen_kernel(block, out, 0, shape[0])
            block = out
        return torch.from_numpy(block).view(torch.bfloat16)


def _runs(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[i : i + TOKENS_AT_ONCE] for i in range(0, len(rows), TOKENS_AT_ONCE)]
