"""Matrix products of prefill by torch, over weights that stay bits of their checkpoint's format.

float32 weights multiply as they are. 16-bit ones go block by block through a small buffer that
stays in the cache: as bfloat16 where the CPU multiplies that natively (several times as fast as
float32; docs/lab_log.md has the figures), else as float32.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from numba_kernels.convert import bfloat16_kernel
from numba_kernels.rows import share

_BLOCK_BYTES = (
    4 << 20
)  # of converted weights; both cores' second-level caches and some of the third


def as_tensor(bits: np.ndarray) -> torch.Tensor:
    """A tensor over the same memory: uint16 is float16, int16 is bfloat16."""
    if bits.dtype == np.uint16:
        return torch.from_numpy(bits.view(np.float16))
    if bits.dtype == np.int16:
        return torch.from_numpy(bits).view(torch.bfloat16)
    return torch.from_numpy(bits)


class MatrixProducts:
    """Products of a service's weights with the hidden states of many tokens."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads` cores multiply, the same number convert."""
        self.num_threads = num_threads
        self._native_bfloat16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="convert")
        self._buffer = np.empty(_BLOCK_BYTES // 2, np.int16)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def linear(self, x: torch.Tensor, weights: np.ndarray, bias: np.ndarray) -> torch.Tensor:
        """x @ weights.T + bias.

        Shapes:  x (T, d), weights (N, d), bias (N,) or (0,), result (T, N)
        Dtypes:  x, bias, result float32; weights bits
        """
        torch.set_num_threads(self.num_threads)
        if weights.dtype == np.float32:
            out = x @ as_tensor(weights).T
        else:
            x = self._operand(x)
            out = torch.empty(x.shape[0], weights.shape[0])
            for first, last in self._blocks(weights):
                out[:, first:last] = x @ self._converted(weights[first:last]).T
        return out.add_(torch.from_numpy(bias)) if bias.size else out

    def combine(self, h: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """h @ rows: rows weighted and summed.

        Shapes:  h (T, N), rows (N, d), result (T, d)
        Dtypes:  h, result float32; rows bits
        """
        torch.set_num_threads(self.num_threads)
        if rows.dtype == np.float32:
            return h @ as_tensor(rows)
        h = self._operand(h)
        out = torch.zeros(h.shape[0], rows.shape[1])
        for first, last in self._blocks(rows):
            out += h[:, first:last] @ self._converted(rows[first:last])
        return out

    def _operand(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16) if self._native_bfloat16 else x

    def _blocks(self, weights: np.ndarray) -> list[tuple[int, int]]:
        size = max(1, self._buffer.size // weights.shape[1])
        return [
            (first, min(first + size, weights.shape[0]))
            for first in range(0, weights.shape[0], size)
        ]

    def _converted(self, block: np.ndarray) -> torch.Tensor:
        if not self._native_bfloat16:
            return as_tensor(block).to(torch.float32)
        if block.dtype == np.int16:
            return as_tensor(block)
        if self._buffer.size < block.shape[1]:
            self._buffer = np.empty(block.shape[1], np.int16)
        out = self._buffer[: block.size].reshape(block.shape)
        parts = [share(block.shape[0], i, self.num_threads, 1) for i in range(self.num_threads)]
        calls = [self._pool.submit(bfloat16_kernel, block, out, *part) for part in parts]
        for call in calls:
            call.result()
        return as_tensor(out)
