"""Matmul of many tokens' vectors by this project's kernels, one class a format of operands.

Each thread has rows of `linear`, or columns of `combine`, and a buffer of its own.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hotcold.actors.cpu.thread_team import Then
from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import QuantizedVectors, empty_vectors
from hotcold.numba_kernels.ir.int16_ir import GROUP_PAIRS
from hotcold.numba_kernels.ir.target import LANES
from hotcold.numba_kernels.prompt import float_matmul, int16_matmul
from hotcold.numba_kernels.prompt.float_matmul import (
    combine_kernel,
    linear_kernel,
    num_groups,
    num_items,
    pack_tokens_kernel,
)
from hotcold.numba_kernels.prompt.int16_matmul import (
    linear_int16_kernel,
    num_column_groups,
    pack_int16_kernel,
)
from hotcold.numba_kernels.prompt.quantized_matmul import matmul_kernel, quantize_kernel

_ROWS = 8  # of quantized weights a thread has whole ones: as many as some tile takes side by side


class _Space:
    """An array that is kept from call to call: new memory takes long to get."""

    def __init__(self, dtype: type) -> None:
        self._items = aligned_empty((0,), dtype)

    def shaped(self, *shape: int) -> np.ndarray:
        """An array of that shape; what was got before is in the same place."""
        count = int(np.prod(shape))
        if self._items.size < count:
            self._items = aligned_empty((count,), self._items.dtype)
        return self._items[:count].reshape(shape)


class FloatMatmul:
    """Weights times activations, both in one float format; sums are float32.

    Each token's sums have one order, whatever its batch-mates and however many threads there are.
    """

    _items: type  # what numbers are multiplied as; see `numba_kernels.prompt.float_matmul`

    def __init__(self, num_threads: int, then: Then) -> None:
        """`then` has a function called with every thread's number, after those before."""
        self._num_threads, self._then = num_threads, then
        self._buffers = _buffers(float_matmul.BUFFER_ITEMS, num_threads, self._items)
        self._tokens, self._sums = _Space(self._items), _Space(np.float32)

    def operand(self, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """x (T, d) float32 in items, LANES tokens side by side, in space that is kept."""
        groups = num_groups(x.shape[0])
        tokens = self._tokens.shaped(groups, num_items(x.shape[1], self._items), LANES)

        def pack(thread: int) -> None:
            part = split_range(groups, thread, self._num_threads, 1)
            pack_tokens_kernel(x, tokens, self._buffers[thread], *part)

        self._then(pack)
        return tokens

    def linear(self, operand: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
        """out = x @ weights.T.

        Shapes:  operand of x (T, d), weights (N, d), out (T, N)
        Dtypes:  out float32; weights float32, uint16 (float16 bits) or int16 (bfloat16 bits)
        """
        self._multiply(linear_kernel, operand, weights, out)

    def combine(self, h: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
        """out = h @ rows.

        Shapes:  h (T, N), rows (N, d) or (N, row bytes), out (T, d)
        Dtypes:  h float32; rows as in `linear`, or of ROW_FORMATS
        """
        self._multiply(combine_kernel, self.operand(h, rows), rows, out)

    def _multiply(
        self, kernel: Callable[..., None], tokens: np.ndarray, weights: np.ndarray, out: np.ndarray
    ) -> None:
        groups = tokens.shape[0]
        sums = self._sums.shaped(self._num_threads, float_matmul.MAX_SUMS, groups, LANES)

        def multiply(thread: int) -> None:
            part = split_range(out.shape[1], thread, self._num_threads, LANES)
            kernel(weights, tokens, self._buffers[thread], sums[thread], out, *part)

        self._then(multiply)


class Bfloat16Matmul(FloatMatmul):
    """In bfloat16, to which weights and activations are rounded."""

    _items = np.int32


class Float32Matmul(FloatMatmul):
    """In float32."""

    _items = np.float32


class Int16Tokens(NamedTuple):
    """Tokens in pairs of int16, and the scales of their groups of columns."""

    tokens: np.ndarray
    scales: np.ndarray


class Int16Matmul:
    """16-bit weights times activations, both rounded to int16 with a scale a group of columns."""

    def __init__(self, num_threads: int, then: Then) -> None:
        """As `FloatMatmul`."""
        self._num_threads, self._then = num_threads, then
        self._buffers = _buffers(int16_matmul.BUFFER_PAIRS, num_threads, np.int32)
        self._tokens, self._scales, self._sums = (
            _Space(dtype) for dtype in (np.int32, np.float32, np.float32)
        )

    def operand(self, x: np.ndarray, weights: np.ndarray) -> Int16Tokens:
        """x (T, d) float32 in pairs with scales, LANES tokens side by side, in space kept."""
        groups, parts = num_groups(x.shape[0]), num_column_groups(x.shape[1])
        tokens = self._tokens.shaped(groups, parts * GROUP_PAIRS, LANES)
        scales = self._scales.shaped(groups, parts, LANES)

        def pack(thread: int) -> None:
            part = split_range(groups, thread, self._num_threads, 1)
            pack_int16_kernel(x, tokens, scales, self._buffers[thread], *part)

        self._then(pack)
        return Int16Tokens(tokens, scales)

    def linear(self, operand: Int16Tokens, weights: np.ndarray, out: np.ndarray) -> None:
        """out = x @ weights.T, as `FloatMatmul.linear`."""
        groups = operand.tokens.shape[0]
        sums = self._sums.shaped(self._num_threads, int16_matmul.MAX_SUMS, groups, LANES)

        def multiply(thread: int) -> None:
            part = split_range(weights.shape[0], thread, self._num_threads, LANES)
            buffer = self._buffers[thread]
            linear_int16_kernel(weights, *operand, buffer, sums[thread], out, *part)

        self._then(multiply)


class QuantizedMatmul:
    """Quantized weights times vectors quantized like them, as integers."""

    def __init__(self, num_threads: int, then: Then) -> None:
        """As `FloatMatmul`."""
        self._num_threads, self._then = num_threads, then
        self._vectors = QuantizedVectors(*empty_vectors(1, 1, 0))

    def operand(self, x: np.ndarray, weights: np.ndarray) -> QuantizedVectors:
        """The vectors of x (T, d) float32, in space that is kept from call to call."""
        num_tokens, width = x.shape
        if self._vectors.values.shape[1] < num_tokens or self._vectors.values.shape[2] < width:
            self._vectors = empty_vectors(1, num_tokens, width)
        vectors = QuantizedVectors(*(array[0, :num_tokens] for array in self._vectors))

        def quantize(thread: int) -> None:
            part = split_range(num_tokens, thread, self._num_threads, 1)
            quantize_kernel(weights, x, vectors, *part)

        self._then(quantize)
        return vectors

    def linear(self, operand: QuantizedVectors, weights: np.ndarray, out: np.ndarray) -> None:
        """out (T, N) float32 = vectors @ weights.T; weights (N, row bytes) of ROW_FORMATS."""

        def multiply(thread: int) -> None:
            part = split_range(weights.shape[0], thread, self._num_threads, _ROWS)
            matmul_kernel(weights, operand, out, *part)

        self._then(multiply)


def _buffers(count: int, num_threads: int, dtype: type) -> list[np.ndarray]:
    return [aligned_empty((count,), dtype) for _ in range(num_threads)]
