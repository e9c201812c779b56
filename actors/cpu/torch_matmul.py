"""Matmul of many tokens' vectors by torch, with weights of any format.

Weights of another format than is multiplied are converted block by block, in small buffers that
stay in the cache.
"""

from collections.abc import Callable

import numpy as np
import torch

from hotcold.actors.cpu.thread_team import Then
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.formats import row_width
from hotcold.numba_kernels.load.convert import widen_kernel

_BLOCK_BYTES = 4 << 20  # of converted weights, in each thread


def as_tensor(bits: np.ndarray) -> torch.Tensor:
    """A tensor over the same memory: uint16 is float16, int16 is bfloat16."""
    if bits.dtype == np.uint16:
        return torch.from_numpy(bits.view(np.float16))
    if bits.dtype == np.int16:
        return torch.from_numpy(bits).view(torch.bfloat16)
    return torch.from_numpy(bits)


class TorchMatmul:
    """In float32; each thread has rows, and a buffer of its own."""

    _dtype: type = np.float32  # that is multiplied; int16: bfloat16 bits

    def __init__(self, num_threads: int, then: Then) -> None:
        """`then` has a function called with every thread's number, after those before."""
        self._num_threads, self._then = num_threads, then
        self._buffers = [np.empty(_BLOCK_BYTES, np.uint8) for _ in range(num_threads)]

    def operand(self, x: np.ndarray, weights: np.ndarray) -> torch.Tensor:
        """x itself: each thread rounds it by itself, once for all of its blocks."""
        return torch.from_numpy(x)

    def linear(self, operand: torch.Tensor, weights: np.ndarray, out: np.ndarray) -> None:
        """out (T, N) float32 = operand (T, d) @ weights.T."""
        target = torch.from_numpy(out)

        def multiply(thread: int) -> None:
            x = self._rounded(operand)

            def add(block: torch.Tensor, first: int, last: int) -> None:
                target[:, first:last] = x @ block.T

            self._each_block(thread, weights, add)

        self._then(multiply)

    def combine(self, h: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        """out (T, d) float32 = h (T, N) @ rows, in each thread of its rows, then of all threads."""
        operand, target = torch.from_numpy(h), torch.from_numpy(out)
        sums = torch.empty(self._num_threads, *out.shape)

        def multiply(thread: int) -> None:
            own = sums[thread].zero_()

            def add(block: torch.Tensor, first: int, last: int) -> None:
                own.add_(self._rounded(operand[:, first:last]) @ block)

            self._each_block(thread, rows, add)

        def add_up(thread: int) -> None:
            first, last = split_range(out.shape[0], thread, self._num_threads, 1)
            torch.sum(sums[:, first:last], dim=0, out=target[first:last])

        self._then(multiply)
        self._then(add_up)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16) if self._dtype == np.int16 else x

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
        """The block's weights in the format that is multiplied."""
        if block.dtype == self._dtype:
            return as_tensor(block)
        shape = block.shape[0], row_width(block.dtype, block.shape[1])
        dtype = np.dtype(self._dtype)
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        if self._buffers[thread].size < num_bytes:  # floats, or a row that is longer than a buffer
            self._buffers[thread] = np.empty(num_bytes, np.uint8)
        out = self._buffers[thread][:num_bytes].view(dtype).reshape(shape)
        widen_kernel(block, out, 0, shape[0])
        return as_tensor(out)


class TorchBfloat16Matmul(TorchMatmul):
    """Weights and activations rounded to bfloat16; results too, before they are float32."""

    _dtype = np.int16
