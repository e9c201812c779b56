"""Tokens by the block of neurons that they chose, and rows of numbers, one for each such choice.

A dense layer is the case of one block that all tokens chose. Products go through blocks in their
order; a choice's bits do not depend on how many tokens chose the same block.
"""

from typing import NamedTuple

import numpy as np
from numba.core import types
from numba.extending import overload

from hotcold.numba_kernels.compiler import njit


class BlockTokens(NamedTuple):
    """Which tokens chose which of B blocks: P choices, block after block.

    ids (P,) int64: each choice's token, ascending within a block
    starts (B + 1,) int64: block b's choices are starts[b]:starts[b + 1]
    order (at least the most choices of a block,) int64: 0, 1, 2, ...
    """

    ids: np.ndarray
    starts: np.ndarray
    order: np.ndarray


class ChoiceRows(NamedTuple):
    """A row for each choice, in each block of another width.

    values (all numbers,) float32; starts (B + 1,) int64: block b's rows are
    values[starts[b]:starts[b + 1]], one after the other
    """

    values: np.ndarray
    starts: np.ndarray


def every_token(num_tokens: int) -> BlockTokens:
    """One block that all tokens chose."""
    ids = np.arange(num_tokens, dtype=np.int64)
    return BlockTokens(ids, np.array([0, num_tokens], np.int64), ids)


def chosen_tokens(is_chosen: np.ndarray) -> BlockTokens:
    """By the choices is_chosen (T, B) bool."""
    counts = np.count_nonzero(is_chosen, axis=0)
    _, ids = np.nonzero(is_chosen.T)
    return BlockTokens(ids, _starts(counts), np.arange(len(is_chosen), dtype=np.int64))


def listed_tokens(tokens: BlockTokens, is_listed: np.ndarray) -> BlockTokens:
    """Only the choices of which is_listed (P,) bool is set."""
    before = _starts(is_listed)
    return BlockTokens(tokens.ids[is_listed], before[tokens.starts], tokens.order)


def row_starts(tokens: BlockTokens, widths: np.ndarray) -> np.ndarray:
    """Of `ChoiceRows` with rows of widths[b] numbers in block b."""
    return _starts(np.diff(tokens.starts) * widths)


def one_block(matrix: np.ndarray) -> ChoiceRows:
    """The rows of a contiguous matrix, as those of one block."""
    return ChoiceRows(_flat(matrix), np.array([0, matrix.size], np.int64))


class WeightBlocks(NamedTuple):
    """Of each block a matrix, all in one format.

    array (items,): the weights; places (B, 3) int64: block b's are array[first:last] in rows of so
    many items, (first, last, items of a row) == places[b]; first == last where it has none
    """

    array: np.ndarray
    places: np.ndarray

    @property
    def heights(self) -> np.ndarray:
        """Rows of each block (B,) int64."""
        first, last, items = self.places.T
        return (last - first) // np.maximum(items, 1)


def weight_blocks(matrix: np.ndarray, bounds: np.ndarray | None = None) -> WeightBlocks:
    """Blocks of rows of a contiguous matrix: block b is matrix[bounds[b] : bounds[b + 1]].

    Without `bounds` it is one block.
    """
    if bounds is None:
        bounds = np.array([0, len(matrix)], np.int64)
    ends = bounds * matrix.shape[1]
    places = np.stack([ends[:-1], ends[1:], np.full(len(bounds) - 1, matrix.shape[1])], axis=1)
    return WeightBlocks(_flat(matrix), places)


def matrix_of_block(weights: WeightBlocks, block: int) -> np.ndarray:
    """The block's matrix, a view."""
    first, last, items = weights.places[block]
    return weights.array[first:last].reshape((last - first) // max(items, 1), items)


@njit(nogil=True, cache=True)
def block_matrix(array, place):
    """The matrix at `place` (3,) of an array of weights; see `WeightBlocks`."""
    first, last, items = place[0], place[1], place[2]
    return array[first:last].reshape((last - first) // max(items, 1), items)


def _flat(matrix: np.ndarray) -> np.ndarray:
    """All numbers of a matrix, as a view. Errors: ValueError where it is not contiguous."""
    if not matrix.flags.c_contiguous:
        raise ValueError("a matrix is not contiguous")
    return matrix.reshape(-1)


def rows_of_block(
    rows: np.ndarray | ChoiceRows, tokens: BlockTokens, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """`block_rows` outside of compiled code; nothing is copied."""
    first, last = tokens.starts[block : block + 2]
    if isinstance(rows, np.ndarray):
        return rows, tokens.ids[first:last]
    values = rows.values[rows.starts[block] : rows.starts[block + 1]]
    return values.reshape(last - first, values.size // max(last - first, 1)), tokens.order[
        : last - first
    ]


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def block_rows(rows, tokens, block):  # type: ignore[no-untyped-def]
    """A matrix with the rows of a block's choices, and their places in it; for compiled code.

    `rows`: `ChoiceRows`, or an array (T, width) with a row for each token
    """
    raise NotImplementedError("block_rows() is for compiled code")


@overload(block_rows)
def _block_rows(rows, tokens, block):  # type: ignore[no-untyped-def]
    def of_choices(rows, tokens, block):  # type: ignore[no-untyped-def]
        count = tokens.starts[block + 1] - tokens.starts[block]
        values = rows.values[rows.starts[block] : rows.starts[block + 1]]
        return values.reshape(count, values.shape[0] // max(count, 1)), tokens.order[:count]

    def of_tokens(rows, tokens, block):  # type: ignore[no-untyped-def]
        return rows, tokens.ids[tokens.starts[block] : tokens.starts[block + 1]]

    return of_tokens if isinstance(rows, types.Array) else of_choices


def adds_rows(rows):  # type: ignore[no-untyped-def]
    """Whether products are added to these rows, which are then of tokens; for compiled code."""
    raise NotImplementedError("adds_rows() is for compiled code")


@overload(adds_rows)
def _adds_rows(rows):  # type: ignore[no-untyped-def]
    adds = isinstance(rows, types.Array)
    return lambda rows: adds


@njit(nogil=True, cache=True)
def choice_share(tokens, block, first, last):
    """Those of a block's choices that are among choices first..last-1, counted from its first."""
    begin, end = tokens.starts[block], tokens.starts[block + 1]
    first = min(max(first, begin), end)
    return first - begin, min(max(last, first), end) - begin
