"""Tokens by the block of neurons that they chose, and rows of numbers, one for each such choice.

A dense layer is the case of one block that all tokens chose. Products go through blocks in their
order; a choice's bits do not depend on how many tokens chose the same block.
"""

from typing import NamedTuple

import numpy as np
from numba.core import types
from numba.extending import overload

from hotcold.numba_kernels import block_rows as places_of_blocks
from hotcold.numba_kernels.block_rows import (
    BEGIN,
    END,
    IS_SECOND,
    NUM_PLACE_NUMBERS,
    ROW_ITEMS,
    BlockRows,
)
from hotcold.numba_kernels.compiler import njit

block_matrix = njit(nogil=True, cache=True)(places_of_blocks.block_matrix)


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


def choices(
    sizes: np.ndarray, num_tokens: int, weights: np.ndarray
) -> tuple[BlockTokens, np.ndarray]:
    """Which tokens chose which blocks, and with what weights (P,) float32.

    Blocks of sizes[b] > 0 neurons are chosen where weights (T, B) float32 are not 0; with weights
    (0, 0) by all tokens, and the result's are (0,).
    """
    order = np.arange(num_tokens, dtype=np.int64)
    is_chosen = np.ones((sizes.size, num_tokens), bool)
    if weights.size:
        is_chosen = np.ascontiguousarray(weights.T != 0)
    is_chosen[sizes == 0] = False
    blocks, ids = map(np.ascontiguousarray, np.nonzero(is_chosen))  # one type for compiled code
    starts = _starts(np.count_nonzero(is_chosen, axis=1))
    chosen = weights[ids, blocks] if weights.size else np.empty(0, np.float32)
    return BlockTokens(ids, starts, order), chosen


def listed(tokens: BlockTokens, is_listed: np.ndarray) -> BlockTokens:
    """Only the choices of which is_listed (P,) bool is set."""
    return tokens._replace(ids=tokens.ids[is_listed], starts=_starts(is_listed)[tokens.starts])


def row_starts(tokens: BlockTokens, widths: np.ndarray) -> np.ndarray:
    """Of `ChoiceRows` with rows of widths[b] numbers in block b."""
    return _starts(np.diff(tokens.starts) * widths)


def token_rows(tokens: BlockTokens, matrix: np.ndarray) -> ChoiceRows:
    """The rows of a contiguous matrix (T, width), where each token has one choice, in order."""
    return ChoiceRows(_flat(matrix), tokens.starts * matrix.shape[1])


def one_block(matrix: np.ndarray) -> ChoiceRows:
    """The rows of a contiguous matrix, as those of one block."""
    return ChoiceRows(_flat(matrix), np.array([0, matrix.size], np.int64))


class WeightBlocks(NamedTuple):
    """Of each of B blocks a matrix, all in one format.

    array (items,): the weights; places (B, 4) int64: where the matrices are, as in
    `hotcold.numba_kernels.block_rows`; a block without rows has no items
    """

    array: np.ndarray
    places: np.ndarray

    def matrix(self, block: int) -> np.ndarray:
        """The rows of a block, a view."""
        return places_of_blocks.block_matrix(self.array, self.places[block])


def weight_blocks(
    matrix: np.ndarray, firsts: np.ndarray | None = None, heights: np.ndarray | None = None
) -> WeightBlocks:
    """Blocks of rows of a contiguous matrix: block b has heights[b] rows from firsts[b] on.

    Without `firsts` it is one block.
    """
    if firsts is None or heights is None:
        firsts, heights = np.zeros(1, np.int64), np.array([len(matrix)])
    places = np.zeros((len(firsts), NUM_PLACE_NUMBERS), np.int64)
    places[:, BEGIN] = firsts * matrix.shape[1] * (heights > 0)
    places[:, END] = places[:, BEGIN] + heights * matrix.shape[1]
    places[:, ROW_ITEMS] = matrix.shape[1]
    return WeightBlocks(_flat(matrix), places)


def layer_blocks(rows: BlockRows, layer: int) -> list[WeightBlocks]:
    """A layer's blocks, once for each format that it has; those in the other one have no rows."""
    found = []
    for is_second, array in enumerate((rows.first, rows.second)):
        places = rows.places[layer].copy()
        places[places[:, IS_SECOND] != is_second, END] = 0
        places[places[:, END] == 0, BEGIN] = 0
        if places[:, END].any():
            found.append(WeightBlocks(array, places))
    return found


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
