"""Matrix products of prefill, over weights that stay bits of their checkpoint's format.

float32 weights multiply as they are, by torch. 16-bit ones multiply as bfloat16 where the CPU is
fast at that, by this project's own kernels or torch's, whichever are faster; else as int16 with
scales where they are multiplied with vectors and the CPU is fast at that, or as float32. For torch
they go block by block through small buffers that stay in the cache. Quantized rows times
vectors are integer products, by own kernels too, where those are faster (`product_choice.py` tries;
docs/lab_log.md has figures). Each thread converts and multiplies rows of its own: cores then share
nothing but the input, which matters where they share no cache.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch

from actors.cpu.pair_products import PairProducts, WordProducts
from actors.cpu.product_choice import choose_products
from actors.protocol.step_sizes import ProductChoice
from numba_kernels.decode.rows import split_range
from numba_kernels.decode.vectors import QuantizedVectors, empty_vectors
from numba_kernels.formats import QUANT_GROUP, is_quantized, row_items, row_width
from numba_kernels.load.convert import widen_kernel
from numba_kernels.prompt.products import products_kernel, quantize_kernel
from placement.threads.pinning import pin_thread

_BLOCK_BYTES = 4 << 20  # of converted weights, in each thread
_HALVES = (np.uint16, np.int16)
ThreadCores = Sequence[Sequence[int]]


def _begin(cores: Sequence[int] | None) -> None:
    if cores is not None:
        pin_thread(cores)


def as_tensor(bits: np.ndarray) -> torch.Tensor:
    """A tensor over the same memory: uint16 is float16, int16 is bfloat16."""
    if bits.dtype == np.uint16:
        return torch.from_numpy(bits.view(np.float16))
    if bits.dtype == np.int16:
        return torch.from_numpy(bits).view(torch.bfloat16)
    return torch.from_numpy(bits)


class MatrixProducts:
    """Products of a service's weights with the hidden states of many tokens."""

    def __init__(
        self,
        num_threads: int,
        dtypes: Sequence[np.dtype],
        thread_cores: ThreadCores = (),
        choice: ProductChoice | None = None,
    ) -> None:
        """`num_threads` cores, each with its own rows; thread t kept on thread_cores[t] if any.

        `dtypes`: of the weights. Without a `choice` what is tried out in this process decides.
        """
        self.num_threads = num_threads
        self._choice = choose_products() if choice is None else choice
        # A pool for each, so that rows are always read from the same cores.
        pinned: Sequence[Sequence[int] | None] = thread_cores or [None] * num_threads
        self._pools = [ThreadPoolExecutor(1, "products", _begin, (cores,)) for cores in pinned]
        self._buffers = [np.empty(_BLOCK_BYTES, np.uint8) for _ in range(num_threads)]
        self._pairs = PairProducts(num_threads, self.each_thread)
        self._words = WordProducts(num_threads, self.each_thread)
        self._vectors = QuantizedVectors(*empty_vectors(1, 1, 0))
        self._dtypes = dtypes
        self._try_out()

    def choose(self, choice: ProductChoice) -> None:
        """Multiply as `choice` says from now on; between two products."""
        if choice != self._choice:
            self._choice = choice
            self._try_out()

    def _try_out(self) -> None:
        """So that no prompt waits until the kernels are compiled."""
        for dtype in self._dtypes:
            if dtype == np.float32:
                continue
            row = np.zeros((1, row_items(dtype, QUANT_GROUP)), dtype)
            self.linear(torch.zeros(1, QUANT_GROUP), row, np.empty(0, np.float32))
            self.combine(torch.zeros(1, 1), row)

    def close(self) -> None:
        """End the threads."""
        for pool in self._pools:
            pool.shutdown()

    def linear(self, x: torch.Tensor, weights: np.ndarray, bias: np.ndarray) -> torch.Tensor:
        """x @ weights.T + bias.

        Shapes:  x (T, d), weights (N, d) or (N, row bytes), bias (N,) or (0,), result (T, N)
        Dtypes:  x, bias, result float32; weights bits
        """
        out = torch.empty(x.shape[0], weights.shape[0])
        if is_quantized(weights.dtype) and self._choice.integers:
            self._integer_products(x, weights, out)
        elif self._has_pairs(weights):
            self._pairs.linear(x.contiguous().numpy(), weights, out.numpy())
        elif self._choice.words and weights.dtype in _HALVES:
            self._words.linear(x.contiguous().numpy(), weights, out.numpy())
        else:
            operand = self._operand(x, weights)

            def multiply(thread: int, first: int, last: int) -> None:
                out[:, first:last] = operand @ self._block(thread, weights[first:last]).T

            self._each_block(weights, multiply)
        return out.add_(torch.from_numpy(bias)) if bias.size else out

    def combine(self, h: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """h @ rows: rows weighted and summed.

        Shapes:  h (T, N), rows (N, d) or (N, row bytes), result (T, d)
        Dtypes:  h, result float32; rows bits
        """
        width = row_width(rows.dtype, rows.shape[1])
        if self._has_pairs(rows):
            out = torch.empty(h.shape[0], width)
            self._pairs.combine(h.contiguous().numpy(), rows, out.numpy())
            return out
        operand = self._operand(h, rows)
        sums = torch.zeros(self.num_threads, h.shape[0], width)

        def multiply(thread: int, first: int, last: int) -> None:
            sums[thread] += operand[:, first:last] @ self._block(thread, rows[first:last])

        self._each_block(rows, multiply)
        return sums.sum(dim=0)

    def _has_pairs(self, weights: np.ndarray) -> bool:
        """Whether own kernels multiply them as bfloat16."""
        choice = self._choice
        return choice.bfloat16 and choice.own_bfloat16 and weights.dtype in _HALVES

    def _integer_products(self, x: torch.Tensor, weights: np.ndarray, out: torch.Tensor) -> None:
        """out = x @ weights.T, x quantized in groups; each thread over its share of the rows."""
        vectors = self._quantized(x.contiguous().numpy())
        target = out.numpy()

        def multiply(thread: int) -> None:
            part = split_range(weights.shape[0], thread, self.num_threads, 8)
            products_kernel(weights, vectors, target, *part)

        self.each_thread(multiply)

    def operands(self, x: np.ndarray, weights: np.ndarray) -> np.ndarray | QuantizedVectors:
        """What kernels multiply `weights` with: x (T, d), or its vectors until the next call."""
        return self._quantized(x) if is_quantized(weights.dtype) else x

    def _quantized(self, x: np.ndarray) -> QuantizedVectors:
        """The vectors of x (T, d), quantized into space that is kept from call to call."""
        num_tokens, width = x.shape
        if self._vectors.values.shape[1] < num_tokens or self._vectors.values.shape[2] < width:
            self._vectors = empty_vectors(1, num_tokens, width)
        vectors = QuantizedVectors(*(array[0, :num_tokens] for array in self._vectors))

        def quantize(thread: int) -> None:
            quantize_kernel(x, vectors, *split_range(num_tokens, thread, self.num_threads, 1))

        self.each_thread(quantize)
        return vectors

    def _operand(self, x: torch.Tensor, weights: np.ndarray) -> torch.Tensor:
        if weights.dtype == np.float32 or not self._choice.bfloat16:
            return x
        return x.to(torch.bfloat16)

    def _each_block(self, weights: np.ndarray, multiply: Callable[[int, int, int], None]) -> None:
        """Call multiply(thread, first, last) for blocks of rows, each thread over its share."""
        size = max(1, _BLOCK_BYTES // 2 // row_width(weights.dtype, weights.shape[1]))

        def run(thread: int) -> None:
            torch.set_num_threads(1)
            begin, end = split_range(weights.shape[0], thread, self.num_threads, 1)
            for first in range(begin, end, size):
                multiply(thread, first, min(first + size, end))

        self.each_thread(run)

    def each_thread(self, run: Callable[[int], None]) -> None:
        """Call run(thread) in every thread; returns when all have."""
        calls = [pool.submit(run, thread) for thread, pool in enumerate(self._pools)]
        wait(calls)  # all of them: the next product uses the same buffers
        for call in calls:
            call.result()
        # For what is no product with weights. A thread of a Ray worker begins with one.
        torch.set_num_threads(self.num_threads)

    def _block(self, thread: int, block: np.ndarray) -> torch.Tensor:
        """The block's weights in the format that is multiplied."""
        if block.dtype == np.float32 or (block.dtype == np.int16 and self._choice.bfloat16):
            return as_tensor(block)
        shape = block.shape[0], row_width(block.dtype, block.shape[1])
        dtype = np.dtype(np.int16 if self._choice.bfloat16 else np.float32)
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        if self._buffers[thread].size < num_bytes:  # floats, or a row that is longer than a buffer
            self._buffers[thread] = np.empty(num_bytes, np.uint8)
        out = self._buffers[thread][:num_bytes].view(dtype).reshape(shape)
        widen_kernel(block, out, 0, shape[0])
        return as_tensor(out)
