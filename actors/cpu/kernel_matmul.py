"""Matmul of many tokens' vectors by this project's kernels, one class a format of operands.

Each thread has rows of `linear`, or columns of `combine`, and a buffer of its own. What is
multiplied goes by in blocks (`block_tokens.py`): rows of weights and the tokens that chose them.
All blocks are one phase, each divided among the threads.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hotcold.actors.cpu.thread_team import Shared, Then
from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.block_rows import BEGIN, END
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import QuantizedVectors, empty_vectors
from hotcold.numba_kernels.formats import QUANT_GROUP
from hotcold.numba_kernels.ir.int16_ir import GROUP_PAIRS
from hotcold.numba_kernels.ir.target import LANES
from hotcold.numba_kernels.prefill import float_tiles, int16_matmul
from hotcold.numba_kernels.prefill.block_tokens import (
    BlockTokens,
    CutRows,
    Rows,
    StripeSums,
    WeightBlocks,
)
from hotcold.numba_kernels.prefill.float_items import num_items, row_stride, row_unit
from hotcold.numba_kernels.prefill.float_matmul import (
    combine_kernel,
    linear_kernel,
    num_groups,
    pack_rows_kernel,
    pack_tokens_kernel,
)
from hotcold.numba_kernels.prefill.int16_matmul import (
    linear_int16_kernel,
    num_column_groups,
    pack_int16_kernel,
)
from hotcold.numba_kernels.prefill.quantized_matmul import (
    SUM_ROWS,
    TOKENS_AT_ONCE,
    matmul_kernel,
    quantize_kernel,
)


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


def row_widths(rows: Rows, tokens: BlockTokens) -> np.ndarray:
    """How many numbers a row has in each block (B,) int64."""
    counts = np.diff(tokens.starts)
    if isinstance(rows, np.ndarray):
        return np.full(counts.size, rows.shape[1])
    if isinstance(rows, CutRows):
        return np.diff(rows.columns).ravel()
    assert not isinstance(rows, StripeSums)
    return np.diff(rows.starts) // np.maximum(counts, 1)


def num_products(weights: WeightBlocks, tokens: BlockTokens) -> int:
    """Multiplications of each block's weights with its choices, or of its bytes if quantized."""
    items = weights.places[:, END] - weights.places[:, BEGIN]
    return int(items @ np.diff(tokens.starts))


class FloatOperand(NamedTuple):
    """Items of each block's choices; see `pack_tokens_kernel`."""

    tokens: BlockTokens
    packed: np.ndarray
    starts: np.ndarray


class FloatMatmul:
    """Weights times activations, both in one float format; sums are float32.

    Each token's sums have one order, whatever its batch-mates and however many threads there are.
    """

    items: type  # what numbers are multiplied as; see `numba_kernels.prefill.float_matmul`
    # Up to this share of a choice's neurons that fire, one by one is faster than `combine`, and
    # what makes its numbers, over all (docs/decisions.md).
    few = 0.18

    def __init__(self, num_threads: int, then: Then) -> None:
        """`then` has a function called with every thread's number, after those before."""
        self._num_threads, self._then = num_threads, then
        self._buffers = _buffers(float_tiles.BUFFER_ITEMS, num_threads, self.items)
        self._tokens, self._sums = _Space(self.items), _Space(np.float32)

    def operand(self, x: Rows, weights: WeightBlocks, tokens: BlockTokens) -> FloatOperand:
        """x in items, LANES choices side by side, in space that is kept from call to call."""
        widths = num_items(row_widths(x, tokens), self.items)
        starts = _packed_starts(tokens, widths)
        packed = self._tokens.shaped(int(starts[-1]))

        def pack(thread: int) -> None:
            buffer = self._buffers[thread]
            pack_tokens_kernel(x, tokens, packed, starts, buffer, thread, self._num_threads)

        self._then(pack)
        return FloatOperand(tokens, packed, starts)

    def linear(self, operand: FloatOperand, weights: WeightBlocks, out: Rows) -> None:
        """out = x @ weights.T of each block's choices.

        Shapes:  out: `ChoiceRows`, or `StripeSums`, which they are added to
        Dtypes:  out float32; weights float32, uint16 (float16 bits) or int16 (bfloat16 bits)
        """
        work, most = num_products(weights, operand.tokens), _most_groups(operand.tokens) * LANES
        self._multiply(linear_kernel, operand, weights, out, most, work)

    def combine(self, h: CutRows, tokens: BlockTokens, rows: WeightBlocks, out: StripeSums) -> None:
        """out = h @ rows of each block's choices, added up as `out` says.

        Shapes:  h: as many numbers for each choice as its block has rows
        Dtypes:  h float32; rows as in `linear`, or of ROW_FORMATS
        """
        counts, items = np.diff(tokens.starts), num_items(row_widths(h, tokens), self.items)
        strides, unit = row_stride(items, self.items), row_unit(self.items)
        starts = _starts(counts * strides)
        packed = self._tokens.shaped(int(starts[-1]) + unit * int(strides.max(initial=0)))
        most = -(-int(counts.max(initial=0)) // unit) * unit

        def pack(thread: int) -> None:
            pack_rows_kernel(h, tokens, packed, starts, thread, self._num_threads)

        self._then(pack)
        # Fewer columns than a block has take longer: no thread's columns are cut.
        self._multiply(combine_kernel, FloatOperand(tokens, packed, starts), rows, out, most, 0)

    def _multiply(
        self,
        kernel: Callable[..., None],
        operand: FloatOperand,
        weights: WeightBlocks,
        out: Rows,
        num_tokens: int,
        work: int,
    ) -> None:
        sums = self._sums.shaped(self._num_threads, float_tiles.MAX_SUMS * num_tokens)

        def multiply(thread: int, part: int, count: int) -> None:
            buffer, own = self._buffers[thread], sums[thread]
            kernel(*weights, *operand, buffer, own, out, part, count)

        self._then(Shared(self._num_threads, work, multiply))


class Bfloat16Matmul(FloatMatmul):
    """In bfloat16, to which weights and activations are rounded."""

    items: type = np.int32


class AmxMatmul(Bfloat16Matmul):
    """In bfloat16 by tiles of AMX."""

    items = np.uint32
    few = 0.05


class Float32Matmul(FloatMatmul):
    """In float32."""

    items = np.float32


class Int16Operand(NamedTuple):
    """Pairs of int16 of each block's choices, and scales; see `pack_int16_kernel`."""

    tokens: BlockTokens
    packed: np.ndarray
    scales: np.ndarray
    starts: np.ndarray


class Int16Matmul:
    """16-bit weights times activations, both rounded to int16 with a scale a group of columns."""

    def __init__(self, num_threads: int, then: Then) -> None:
        """As `FloatMatmul`."""
        self._num_threads, self._then = num_threads, then
        self._buffers = _buffers(int16_matmul.BUFFER_PAIRS, num_threads, np.int32)
        self._tokens, self._scales, self._sums = (
            _Space(dtype) for dtype in (np.int32, np.float32, np.float32)
        )

    def operand(self, x: Rows, weights: WeightBlocks, tokens: BlockTokens) -> Int16Operand:
        """x in pairs with scales, LANES choices side by side, in space kept."""
        parts = num_column_groups(row_widths(x, tokens))
        starts = _packed_starts(tokens, parts * GROUP_PAIRS)
        packed = self._tokens.shaped(int(starts[-1]))
        scales = self._scales.shaped(int(starts[-1]) // GROUP_PAIRS)

        def pack(thread: int) -> None:
            buffer = self._buffers[thread]
            pack_int16_kernel(x, tokens, packed, scales, starts, buffer, thread, self._num_threads)

        self._then(pack)
        return Int16Operand(tokens, packed, scales, starts)

    def linear(self, operand: Int16Operand, weights: WeightBlocks, out: Rows) -> None:
        """out = x @ weights.T of each block, as `FloatMatmul.linear`."""
        groups = _most_groups(operand.tokens)
        sums = self._sums.shaped(self._num_threads, int16_matmul.MAX_SUMS * groups * LANES)

        def multiply(thread: int, part: int, count: int) -> None:
            buffer, own = self._buffers[thread], sums[thread]
            linear_int16_kernel(*weights, *operand, buffer, own, out, part, count)

        work = num_products(weights, operand.tokens)
        self._then(Shared(self._num_threads, work, multiply))


class QuantizedOperand(NamedTuple):
    """The vectors of all blocks' choices, one after the other."""

    tokens: BlockTokens
    vectors: QuantizedVectors


class QuantizedMatmul:
    """Quantized weights times vectors quantized like them, as integers."""

    def __init__(self, num_threads: int, then: Then) -> None:
        """As `FloatMatmul`."""
        self._num_threads, self._then = num_threads, then
        self._vectors = QuantizedVectors(*empty_vectors(1, 1, 0))
        self._sums = _buffers(TOKENS_AT_ONCE * SUM_ROWS, num_threads, np.float32)

    def operand(self, x: Rows, weights: WeightBlocks, tokens: BlockTokens) -> QuantizedOperand:
        """The vectors of x, in space that is kept from call to call."""
        count, width = tokens.ids.size, int(row_widths(x, tokens).max(initial=0))
        groups = -(-width // QUANT_GROUP)
        if self._vectors.values.size < count * groups * QUANT_GROUP:
            self._vectors = empty_vectors(1, count, width)
        vectors = QuantizedVectors(
            *(
                array.reshape(-1)[: count * size].reshape(count, size)
                for array, size in zip(
                    self._vectors, (groups * QUANT_GROUP, groups, groups), strict=True
                )
            )
        )

        def quantize(thread: int) -> None:
            part = split_range(count, thread, self._num_threads, 1)
            quantize_kernel(weights.array, x, tokens, vectors, *part)

        self._then(quantize)
        return QuantizedOperand(tokens, vectors)

    def linear(self, operand: QuantizedOperand, weights: WeightBlocks, out: Rows) -> None:
        """out = vectors @ weights.T of each block, of ROW_FORMATS, as `FloatMatmul.linear`."""

        def multiply(thread: int, part: int, count: int) -> None:
            sums = self._sums[thread].reshape(TOKENS_AT_ONCE, SUM_ROWS)
            matmul_kernel(*weights, *operand, sums, out, part, count)

        work = num_products(weights, operand.tokens)
        self._then(Shared(self._num_threads, work, multiply))


def _packed_starts(tokens: BlockTokens, widths: np.ndarray) -> np.ndarray:
    """Where each block begins in an array of whole groups of LANES choices, and the end."""
    return _starts(num_groups(np.diff(tokens.starts)) * LANES * widths)


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _most_groups(tokens: BlockTokens) -> int:
    return int(num_groups(np.diff(tokens.starts)).max(initial=0))


def _buffers(count: int, num_threads: int, dtype: type) -> list[np.ndarray]:
    return [aligned_empty((count,), dtype) for _ in range(num_threads)]
