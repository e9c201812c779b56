"""Matrix products of prefill by torch, over weights that stay bits of their checkpoint's format.

float32 weights multiply as they are. 16-bit ones go block by block through small buffers that stay
in the cache: as bfloat16 where the CPU multiplies that natively (several times as fast as float32;
docs/lab_log.md has the figures), else as float32. Each thread converts and multiplies rows of its
own: cores then share nothing but the input, which matters where they share no cache.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

# OpenMP's threads otherwise spin for milliseconds after every loop of torch's, on cores that the
# products need: 120 instead of 170 prompt tokens a second. It is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from numba_kernels.convert import bfloat16_kernel
from numba_kernels.rows import share
from placement.sysfs import read_cpu

_BLOCK_BYTES = 4 << 20  # of converted weights, in each thread


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
        """`num_threads` cores, each with its own rows."""
        self.num_threads = num_threads
        self._native_bfloat16 = bool({"avx512_bf16", "amx_bf16"} & set(read_cpu().features))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="products")
        self._buffers = [np.empty(_BLOCK_BYTES // 2, np.int16) for _ in range(num_threads)]
        if self._native_bfloat16:  # so that no prompt waits until this is compiled
            bfloat16_kernel(np.zeros((1, 1), np.uint16), np.zeros((1, 1), np.int16), 0, 1)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def linear(self, x: torch.Tensor, weights: np.ndarray, bias: np.ndarray) -> torch.Tensor:
        """x @ weights.T + bias.

        Shapes:  x (T, d), weights (N, d), bias (N,) or (0,), result (T, N)
        Dtypes:  x, bias, result float32; weights bits
        """
        operand = self._operand(x, weights)
        out = torch.empty(x.shape[0], weights.shape[0])

        def multiply(thread: int, first: int, last: int) -> None:
            out[:, first:last] = operand @ self._block(thread, weights[first:last]).T

        self._each_block(weights, multiply)
        return out.add_(torch.from_numpy(bias)) if bias.size else out

    def combine(self, h: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """h @ rows: rows weighted and summed.

        Shapes:  h (T, N), rows (N, d), result (T, d)
        Dtypes:  h, result float32; rows bits
        """
        operand = self._operand(h, rows)
        sums = torch.zeros(self.num_threads, h.shape[0], rows.shape[1])

        def multiply(thread: int, first: int, last: int) -> None:
            sums[thread] += operand[:, first:last] @ self._block(thread, rows[first:last])

        self._each_block(rows, multiply)
        return sums.sum(dim=0)

    def _operand(self, x: torch.Tensor, weights: np.ndarray) -> torch.Tensor:
        if weights.dtype == np.float32 or not self._native_bfloat16:
            return x
        return x.to(torch.bfloat16)

    def _each_block(self, weights: np.ndarray, multiply: Callable[[int, int, int], None]) -> None:
        """Call multiply(thread, first, last) for blocks of rows, each thread over its share."""
        size = max(1, _BLOCK_BYTES // 2 // weights.shape[1])

        def run(thread: int) -> None:
            torch.set_num_threads(1)
            begin, end = share(weights.shape[0], thread, self.num_threads, 1)
            for first in range(begin, end, size):
                multiply(thread, first, min(first + size, end))

        calls = [self._pool.submit(run, thread) for thread in range(self.num_threads)]
        wait(calls)  # all of them, for the next product uses the same buffers
        for call in calls:
            call.result()
        torch.set_num_threads(self.num_threads)  # for what is not a product with weights

    def _block(self, thread: int, block: np.ndarray) -> torch.Tensor:
        """The block's weights in the format that is multiplied."""
        if block.dtype == np.float32:
            return as_tensor(block)
        if not self._native_bfloat16:
            return as_tensor(block).to(torch.float32)
        if block.dtype == np.int16:
            return as_tensor(block)
        if self._buffers[thread].size < block.size:  # a single row that is longer than a buffer
            self._buffers[thread] = np.empty(block.size, np.int16)
        out = self._buffers[thread][: block.size].reshape(block.shape)
        bfloat16_kernel(block, out, 0, block.shape[0])
        return as_tensor(out)
