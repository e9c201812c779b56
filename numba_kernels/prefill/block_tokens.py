"""Tokens by the block of neurons that they chose, and rows of numbers, one for each such choice.

A dense layer is the case of one block that all tokens chose. Products go through blocks in their
order; a choice's bits do not depend on how many tokens chose the same block.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import types

from hotcold.numba_kernels.block_rows import BEGIN, END, ROW_ITEMS
from hotcold.numba_kernels.compiler import by_types, njit


@njit(nogil=True, cache=True)
def block_height(place):
    """Rows of the matrix at a place of `block_rows`."""
    return (place[END] - place[BEGIN]) // max(np.int64(1), place[ROW_ITEMS])


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


class CutRows(NamedTuple):
    """Columns of rows of choices. Part s of S has some choices of block s % B, and its columns.

    values, starts: of `ChoiceRows` of B blocks, whose rows have widths (B,) int64 numbers
    columns (S, 2) int64: first column of a part, and the end
    rows (P,) int64: of all parts' choices, one part after another, the row in its block
    """

    values: np.ndarray
    starts: np.ndarray
    widths: np.ndarray
    columns: np.ndarray
    rows: np.ndarray


# Numbers of a step of `StripeSums`.
LEVEL, CLEARS, IS_WHOLE, MERGES = range(4)
NUM_STEP_NUMBERS = 4


class StripeSums(NamedTuple):
    """Sums of parts of blocks, stripe by stripe, and of stripes in a tree (`decode.stripes`).

    out (T, d), more (H, T, d) float32: the tree's sums that are not complete, `out` at level 0
    steps (S, 4) int64: of each part LEVEL, where its products are added; CLEARS, whether that is
    cleared before; IS_WHOLE: it is overwritten, by all tokens' products; MERGES: how many sums of
    levels below are then added to, each to the one below it
    """

    out: np.ndarray
    more: np.ndarray
    steps: np.ndarray


def is_of(rows: Any, kind: type) -> bool:
    """Whether a type of compiled code is that named tuple's."""
    return getattr(rows, "instance_class", None) is kind


@by_types
def block_rows(rows, tokens, block):  # type: ignore[no-untyped-def]
    """A matrix with the rows of a block's choices, and their places in it; for compiled code.

    `rows`: `ChoiceRows`, `CutRows`, `StripeSums` at the block's level, or an array (T, width) with
    a row for each token
    """

    def of_choices(rows, tokens, block):  # type: ignore[no-untyped-def]
        count = tokens.starts[block + 1] - tokens.starts[block]
        values = rows.values[rows.starts[block] : rows.starts[block + 1]]
        return values.reshape(count, values.shape[0] // max(count, 1)), tokens.order[:count]

    def cut(rows, tokens, block):  # type: ignore[no-untyped-def]
        own = block % rows.widths.shape[0]
        width, values = rows.widths[own], rows.values[rows.starts[own] : rows.starts[own + 1]]
        whole = values.reshape(values.shape[0] // max(np.int64(1), width), width)
        ids = rows.rows[tokens.starts[block] : tokens.starts[block + 1]]
        return whole[:, rows.columns[block, 0] : rows.columns[block, 1]], ids

    def of_stripes(rows, tokens, block):  # type: ignore[no-untyped-def]
        ids = tokens.ids[tokens.starts[block] : tokens.starts[block + 1]]
        return level_rows(rows, rows.steps[block, LEVEL]), ids

    def of_tokens(rows, tokens, block):  # type: ignore[no-untyped-def]
        return rows, tokens.ids[tokens.starts[block] : tokens.starts[block + 1]]

    if isinstance(rows, types.Array):
        return of_tokens
    if is_of(rows, CutRows):
        return cut
    return of_stripes if is_of(rows, StripeSums) else of_choices


@njit(nogil=True, cache=True)
def level_rows(sums, level):
    """The rows (T, d) of a level of `StripeSums`."""
    return sums.more[level - 1] if level else sums.out


@njit(nogil=True, cache=True)
def cut_row(rows, block, row):
    """The part's columns of a row of its block: `rows` are `CutRows`."""
    own = block % rows.widths.shape[0]
    begin = rows.starts[own] + row * rows.widths[own]
    return rows.values[begin + rows.columns[block, 0] : begin + rows.columns[block, 1]]


@by_types
def adds_rows(out, block):  # type: ignore[no-untyped-def]
    """Whether a block's products are added to `out`, instead of written; for compiled code."""
    if is_of(out, StripeSums):
        return lambda out, block: out.steps[block, IS_WHOLE] == 0
    return lambda out, block: False


@by_types
def num_outputs(out, height):  # type: ignore[no-untyped-def]
    """How many numbers of a row of `out` threads share: of `StripeSums` all; for compiled code."""
    if is_of(out, StripeSums):
        return lambda out, height: out.out.shape[1]
    return lambda out, height: height


@by_types
def begin_sums(out, block, first, last):  # type: ignore[no-untyped-def]
    """Clear columns first..last-1 where `StripeSums` say so; for compiled code."""
    if is_of(out, StripeSums):
        return lambda out, block, first, last: clear_level(out, block, first, last)
    return lambda out, block, first, last: None


@njit(nogil=True, cache=True)
def clear_level(out, block, first, last):
    """`begin_sums` of `StripeSums`."""
    if out.steps[block, CLEARS]:
        level_rows(out, out.steps[block, LEVEL])[:, first:last] = 0


@by_types
def end_sums(out, block, row, end_row, first, last):  # type: ignore[no-untyped-def]
    """Add up levels of `StripeSums` after a block's products, of some rows; for compiled code."""
    if is_of(out, StripeSums):
        return _merge_some
    return lambda out, block, row, end_row, first, last: None


def _merge_some(out, block, row, end_row, first, last):  # type: ignore[no-untyped-def]
    step = out.steps[block]
    merge_levels(out, step[LEVEL], step[MERGES], row, end_row, first, last)


@njit(nogil=True, cache=True)
def merge_levels(sums, level, count, row, end_row, first, last):
    """Add `level` of `StripeSums` to the one below, and so on `count` times, in a part of them."""
    for below in range(level - 1, level - 1 - count, -1):
        own, other = level_rows(sums, below), level_rows(sums, below + 1)
        for t in range(row, end_row):
            target, source = own[t, first:last], other[t, first:last]
            for i in range(target.shape[0]):
                target[i] += source[i]


@njit(nogil=True, cache=True)
def choice_share(tokens, block, first, last):
    """Those of a block's choices that are among choices first..last-1, counted from its first."""
    begin, end = tokens.starts[block], tokens.starts[block + 1]
    first = min(max(first, begin), end)
    return first - begin, min(max(last, first), end) - begin
