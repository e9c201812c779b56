"""Matmul of many tokens' vectors by torch in bfloat16, which uses AMX, with weights of any format.

Weights of another format are converted block by block, in small buffers that stay in the cache.
What torch's product of a row is may depend on how many rows there are. So every product is of
TOKENS_AT_ONCE tokens, the last ones filled up with zeros.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hotcold.actors.cpu.kernel_matmul import row_widths
from hotcold.actors.cpu.thread_team import Then
from hotcold.numba_kernels.block_rows import BEGIN, END, ROW_ITEMS
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.formats import row_width
from hotcold.numba_kernels.load.convert import widen_kernel
from hotcold.numba_kernels.prompt.block_tokens import (
    IS_WHOLE,
    BlockTokens,
    ChoiceRows,
    CutRows,
    LaneSums,
    Rows,
    WeightBlocks,
    clear_level,
    merge_levels_of,
    rows_of_block,
)

TOKENS_AT_ONCE = 64
_BLOCK_BYTES = 4 << 20  # of converted weights, in each thread
_CONVERTED_BYTES = 32 << 20  # of converted weights that all threads share
_COLUMNS_AT_ONCE = 64


class TorchOperand(NamedTuple):
    """Of each block its runs (TOKENS_AT_ONCE, width)."""

    tokens: BlockTokens
    runs: list[Sequence[torch.Tensor]]


class TorchBfloat16Matmul:
    """Weights and activations rounded to bfloat16; results too, before they are float32.

    Each thread has rows of weights, and a buffer of its own, or columns of what is summed.
    """

    def __init__(self, num_threads: int, then: Then) -> None:
        """`then` has a function called with every thread's number, after those before."""
        self._num_threads, self._then = num_threads, then
        self._buffers = [np.empty(_BLOCK_BYTES // 2, np.int16) for _ in range(num_threads)]
        self._converted = np.empty(0, np.int16)

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

    def linear(
        self, operand: TorchOperand, weights: WeightBlocks, out: ChoiceRows | LaneSums
    ) -> None:
        """out = x @ weights.T of each block, as `kernel_matmul.FloatMatmul.linear`."""

        def multiply(thread: int) -> None:
            for number, runs in enumerate(operand.runs):
                own, ids = rows_of_block(out, operand.tokens, number)
                matrix = weights.matrix(number)

                def put(block: torch.Tensor, first: int, last: int) -> None:
                    for part, x in zip(_runs(ids), runs, strict=True):  # noqa: B023
                        product = (x @ block.T)[: len(part)].float().numpy()
                        _put(out, number, own, part, product, first, last)  # noqa: B023

                if isinstance(out, LaneSums):
                    height = out.out.shape[1]
                    begin, end = split_range(height, thread, self._num_threads, 1)
                    clear_level(out, number, begin, end)
                if ids.size and len(matrix):
                    self._each_block(thread, matrix, put)
                if isinstance(out, LaneSums):
                    merge_levels_of(out, number, begin, end)

        self._then(multiply)

    def combine(self, h: CutRows, tokens: BlockTokens, rows: WeightBlocks, out: LaneSums) -> None:
        """out = h @ rows of each block, as `kernel_matmul.FloatMatmul.combine`.

        Some blocks at once: threads convert rows, then each sums columns of its own, always as many
        at once, as what torch's products are may depend on that, too.
        """
        operand = self.operand(h, rows, tokens)
        width, places = out.out.shape[1], rows.places
        counts = (places[:, END] - places[:, BEGIN]) // np.maximum(places[:, ROW_ITEMS], 1)
        counts[np.diff(tokens.starts) == 0] = 0
        most = max(_CONVERTED_BYTES // 2 // width, int(counts.max(initial=0)))
        if self._converted.size < most * width:
            self._converted = np.empty(most * width, np.int16)
        space, first, ends = self._converted.reshape(-1)[: most * width], 0, np.cumsum(counts)
        while first < counts.size:
            base = int(ends[first] - counts[first])
            last = int(np.searchsorted(ends, base + most, side="right"))
            begins = ends[first:last] - counts[first:last] - base
            self._combine_some(operand, rows, range(first, last), begins, counts, space, out)
            first = last

    def _combine_some(
        self,
        operand: TorchOperand,
        rows: WeightBlocks,
        blocks: range,
        begins: np.ndarray,
        counts: np.ndarray,
        space: np.ndarray,
        out: LaneSums,
    ) -> None:
        """Convert the rows of `blocks` to begins[i] of `space`, and add their products to `out`."""
        width = out.out.shape[1]
        matrix = space.reshape(-1, width)

        def convert(thread: int) -> None:
            for block, begin in zip(blocks, begins.tolist(), strict=True):
                part = split_range(int(counts[block]), thread, self._num_threads, 1)
                if part[0] < part[1]:
                    target = matrix[begin : begin + int(counts[block])]
                    source = rows.matrix(block)
                    if source.dtype == np.int16:
                        target[slice(*part)] = source[slice(*part)]
                    else:
                        widen_kernel(source, target, *part)

        def multiply(thread: int) -> None:
            first, last = split_range(width, thread, self._num_threads, _COLUMNS_AT_ONCE)
            for block, begin in zip(blocks, begins.tolist(), strict=True):
                own, ids = rows_of_block(out, operand.tokens, block)
                clear_level(out, block, first, last)
                weights = torch.from_numpy(matrix[begin : begin + int(counts[block])])
                weights = weights.view(torch.bfloat16)
                for column in range(first, last if len(weights) else first, _COLUMNS_AT_ONCE):
                    end = min(column + _COLUMNS_AT_ONCE, last)
                    for part, x in zip(_runs(ids), operand.runs[block], strict=True):
                        product = (x @ weights[:, column:end])[: len(part)].float().numpy()
                        _put(out, block, own, part, product, column, end)
                merge_levels_of(out, block, first, last)

        self._then(convert)
        self._then(multiply)

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


def _put(
    out: Rows,
    block: int,
    own: np.ndarray,
    rows: np.ndarray,
    product: np.ndarray,
    first: int,
    last: int,
) -> None:
    """Write products to columns first..last-1 of rows, or add them, as `out` says."""
    if isinstance(out, LaneSums) and not out.steps[block, IS_WHOLE]:
        product = own[rows, first:last] + product
    own[rows, first:last] = product


def _runs(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[i : i + TOKENS_AT_ONCE] for i in range(0, len(rows), TOKENS_AT_ONCE)]
