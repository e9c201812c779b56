"""Matmul of many tokens' vectors by torch in bfloat16, which uses AMX, with weights of any format.

Weights of another format are converted block by block, in small buffers that stay in the cache.
What torch's product of a row is may depend on how many rows there are. So every product is of
TOKENS_AT_ONCE tokens, the last ones filled up with zeros.
"""

from collections.abc import Callable

import numpy as np
import torch

from hotcold.actors.cpu.thread_team import Then
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.formats import row_width
from hotcold.numba_kernels.load.convert import widen_kernel

TOKENS_AT_ONCE = 64
_BLOCK_BYTES = 4 << 20  # of converted weights, in each thread


class TorchBfloat16Matmul:
    """Weights and activations rounded to bfloat16; results too, before they are float32.

    Each thread has rows of weights, and a buffer of its own.
    """

    def __init__(self, num_threads: int, then: Then) -> None:
        """`then` has a function called with every thread's number, after those before."""
        self._num_threads, self._then = num_threads, then
        self._buffers = [np.empty(_BLOCK_BYTES // 2, np.int16) for _ in range(num_threads)]

    def operand(self, x: np.ndarray, weights: np.ndarray) -> torch.Tensor:
        """x in bfloat16, in whole runs of TOKENS_AT_ONCE tokens: (runs, TOKENS_AT_ONCE, d)."""
        runs = -(-x.shape[0] // TOKENS_AT_ONCE)
        rounded = torch.zeros(runs * TOKENS_AT_ONCE, x.shape[1], dtype=torch.bfloat16)

        def round_(thread: int) -> None:
            torch.set_num_threads(1)
            first, last = split_range(x.shape[0], thread, self._num_threads, 1)
            rounded[first:last] = torch.from_numpy(x[first:last])

        self._then(round_)
        return rounded.view(runs, TOKENS_AT_ONCE, -1)

    def linear(self, operand: torch.Tensor, weights: np.ndarray, out: np.ndarray) -> None:
        """out (T, N) float32 = x @ weights.T, of what `operand` gave of x."""

        def multiply(thread: int) -> None:
            def put(block: torch.Tensor, first: int, last: int) -> None:
                for part, x in zip(_runs(out), operand, strict=True):
                    part[:, first:last] = (x @ block.T)[: len(part)].float().numpy()

            self._each_block(thread, weights, put)

        self._then(multiply)

    def combine(self, h: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        """out (T, d) float32 = h (T, N) @ rows, in each thread of its rows, then of all threads."""
        operand = self.operand(h, rows)
        sums = np.empty((self._num_threads, *out.shape), np.float32)

        def multiply(thread: int) -> None:
            own = sums[thread]
            own[:] = 0

            def add(block: torch.Tensor, first: int, last: int) -> None:
                for part, x in zip(_runs(own), operand, strict=True):
                    part += (x[:, first:last] @ block)[: len(part)].float().numpy()

            self._each_block(thread, rows, add)

        def add_up(thread: int) -> None:
            first, last = split_range(out.shape[0], thread, self._num_threads, 1)
            out[first:last] = sums[0, first:last]
            for own in sums[1:]:
                out[first:last] += own[first:last]

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


def _runs(out: np.ndarray) -> list[np.ndarray]:
    return [out[i : i + TOKENS_AT_ONCE] for i in range(0, len(out), TOKENS_AT_ONCE)]
