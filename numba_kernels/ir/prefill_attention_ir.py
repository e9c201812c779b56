"""Steps of attention over a block of queries, whose tokens lie in the lanes, in LLVM vector IR.

A group is one query head of LANES tokens; a few groups go through a page of positions together. A
lane's sums follow the positions and dimensions in their order, so its bits do not depend on other
lanes, on other groups, or on the CPU's vectors. Nothing here checks its arguments.

Arrays of float32, contiguous but for keys and values, whose rows may stand further apart:
queries (G, head_dim, LANES)     scaled
keys, values (positions, width)  of one page; width is head_dim in whole TILE_ROWS
scores (positions, GROUPS, LANES)
sums (G, 3, LANES)               of each group: largest score so far, sum of shares, correction
out (G, width, LANES)            values' weighted sums
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from hotcold.numba_kernels.ir.exp_ir import exp2, tanh_of_exponent
from hotcold.numba_kernels.ir.target import LANES, has_feature
from hotcold.numba_kernels.ir.vec import (
    F32,
    I32,
    Arguments,
    Array,
    Ptr,
    Var,
    Vec,
    codegen_of,
    for_range,
    whole_steps,
)

# Positions, or dimensions, and groups of a tile: its sums fill half of the vector registers, or
# with AVX2 the half of twice as many vectors.
TILE_ROWS, GROUPS = (8, 2) if has_feature("avx512f") else (4, 1)
_BYTES = 4 * LANES  # of a vector
_STEPS = 4  # of a tile, side by side in the code
_INDEX = types.int64


def _multiply(
    rows: list[Ptr],
    stride: Vec | int,
    first: Vec | int,
    last: Vec,
    columns: list[Ptr],
    column_stride: int,
    sums: list[list[Var]],
    skips_zeros: bool = False,
) -> None:
    """sums[r][g] += row r's number k * vector k of column g, for first <= k < last in order.

    With `skips_zeros` lanes of a vector that are 0 add nothing, not even of infinity or NaN.
    """

    def one(k: Vec) -> None:
        vectors = [
            column.load(F32, LANES, align=_BYTES) for column in _at(columns, k, column_stride)
        ]
        silent = [vector.equals(0) for vector in vectors] if skips_zeros else []
        for row, of_row in zip(_at(rows, k, stride), sums, strict=True):
            number = row.load(F32).spread(LANES)
            for g, (vector, total) in enumerate(zip(vectors, of_row, strict=True)):
                added = number.fma(vector, total.get())
                total.set(silent[g].where(total.get(), added) if skips_zeros else added)

    def some(k: Vec) -> None:
        for i in range(_STEPS):
            one(k + i)

    start = last.like(first) if isinstance(first, int) else first
    whole = start + whole_steps(last - start, _STEPS)
    for_range(start, whole, _STEPS, some)
    for_range(whole, last, 1, one)


def _at(starts: list[Ptr], index: Vec, stride: Vec | int) -> list[Ptr]:
    return [start + index * stride for start in starts]


def _zeros(like: Vec, num_groups: int) -> list[list[Var]]:
    zero = Vec.full(like.builder, 0, F32, LANES)
    return [[Var(zero) for _ in range(num_groups)] for _ in range(TILE_ROWS)]


@intrinsic(prefer_literal=True)
def score_rows(typingctx, queries, group, num_groups, keys, first, last, scores):
    """scores[p, g] = keys[p] . queries[group + g] for first <= p < last, whole TILE_ROWS of them.

    For g < num_groups, a literal, up to GROUPS.
    """
    count = num_groups.literal_value

    def emit(given: Arguments) -> None:
        q, k, target = (given.array(place) for place in (0, 3, 6))
        group, first, last = given.numbers(1, 4, 5)
        columns = [q.at(group + g) for g in range(count)]

        def tile(row: Vec) -> None:
            sums = _zeros(row, count)
            _multiply(k.rows(row, 0, TILE_ROWS), 4, 0, q.shape[1], columns, _BYTES, sums)
            for r, of_row in enumerate(sums):
                for g, total in enumerate(of_row):
                    target.at(row + r, row.like(g)).store(total.get(), align=_BYTES)

        for_range(first, last, TILE_ROWS, tile)

    signature = types.void(queries, _INDEX, num_groups, keys, _INDEX, _INDEX, scores)
    return signature, codegen_of(emit)


@intrinsic(prefer_literal=True)
def add_values(typingctx, shares, values, first, last, sums, out, group, num_groups, skips_zeros):
    """out[group + g] = out[group + g] * correction + sum over p of shares[p, g] * values[p].

    For first <= p < last, g < num_groups, a literal, up to GROUPS. With `skips_zeros`, a literal 1,
    a value whose share is 0 adds nothing, whatever it is.
    """
    count, skips = num_groups.literal_value, bool(skips_zeros.literal_value)

    def emit(given: Arguments) -> None:
        weights, v, state, target = (given.array(place) for place in (0, 1, 4, 5))
        first, last, group = given.numbers(2, 3, 6)
        columns = [weights.at(first.like(0), first.like(g)) for g in range(count)]
        corrections = [_sum_of(state, group + g, 2) for g in range(count)]

        def tile(row: Vec) -> None:
            places = [
                [target.at(group + g, row + r) for g in range(count)] for r in range(TILE_ROWS)
            ]
            found = [
                [
                    Var(place.load(F32, LANES, align=_BYTES) * corrections[g])
                    for g, place in enumerate(of_row)
                ]
                for of_row in places
            ]
            corner = v.at(row.like(0), row)
            rows = [corner + v.strides[1] * r for r in range(TILE_ROWS)]
            stride = GROUPS * _BYTES
            _multiply(rows, v.strides[0], first, last, columns, stride, found, skips)
            for of_row, of_place in zip(found, places, strict=True):
                for total, place in zip(of_row, of_place, strict=True):
                    place.store(total.get(), align=_BYTES)

        for_range(0, target.shape[1], TILE_ROWS, tile)

    signature = types.void(
        shares, values, _INDEX, _INDEX, sums, out, _INDEX, num_groups, skips_zeros
    )
    return signature, codegen_of(emit)


def _sum_of(sums: Array, group: Vec, which: int) -> Vec:
    return sums.at(group, group.like(which)).load(F32, LANES, align=_BYTES)


def _each_score(scores: Array, place: Vec, first: Vec, last: Vec, change: Any) -> None:
    """scores[p, place] = change(scores[p, place], p), or None to leave it, first <= p < last."""

    def one(row: Vec) -> None:
        at = scores.at(row, place)
        changed = change(at.load(F32, LANES, align=_BYTES), row)
        if changed is not None:
            at.store(changed, align=_BYTES)

    for_range(first, last, 1, one)


@intrinsic
def cap_scores(typingctx, scores, place, first, last, cap):
    """scores[p, place] = cap * tanh(y), where it was 2 log2(e) y, for first <= p < last."""

    def emit(given: Arguments) -> None:
        place, first, last, cap = given.numbers(1, 2, 3, 4)

        def capped(score: Vec, row: Vec) -> Vec:
            return tanh_of_exponent(score) * cap

        _each_score(given.array(0), place, first, last, capped)

    signature = types.void(scores, _INDEX, _INDEX, _INDEX, types.float32)
    return signature, codegen_of(emit)


@intrinsic
def mask_scores(typingctx, scores, place, first, last, start, token, most, window):
    """scores[p, place] = -infinity where a lane's token does not see position start + p.

    Lane i's token is at position min(token + i, most), and sees `window` positions up to its own.
    """

    def emit(given: Arguments) -> None:
        place, first, last = given.numbers(1, 2, 3)
        start, token, most, window = (each.astype(I32) for each in given.numbers(4, 5, 6, 7))
        lanes = Vec.of(start.builder, range(LANES), I32)
        tokens = (lanes + token).minimum(most)
        before = tokens - window

        def masked(score: Vec, row: Vec) -> Vec:
            position = (row.astype(I32) + start).spread(LANES)
            sees = (position < tokens + 1) & (before < position)
            return sees.where(score, float("-inf"))

        _each_score(given.array(0), place, first, last, masked)

    return types.void(scores, *(_INDEX,) * 7), codegen_of(emit)


@intrinsic
def share_scores(typingctx, scores, place, first, last, sums, group):
    """scores[p, place] = 2 ** (score - largest so far), for first <= p < last.

    sums[group]: the largest score so far; the sum of shares, with those before made smaller by the
    correction; the correction, 2 ** (largest before - largest now). Where all scores so far are
    -infinity, shares and correction are 0.
    Source:  Milakov and Gimelshein, arXiv 1805.02867
    """

    def emit(given: Arguments) -> None:
        scores, sums = given.array(0), given.array(4)
        place, first, last, group = given.numbers(1, 2, 3, 5)
        before = _sum_of(sums, group, 0)
        largest = Var(before)

        def compare(score: Vec, row: Vec) -> None:
            top = largest.get()
            largest.set((top < score).where(score, top))

        _each_score(scores, place, first, last, compare)
        top = largest.get()
        level = top.equals(float("-inf")).where(top.like(0), top)
        correction = exp2(before - level)
        total = Var(_sum_of(sums, group, 1) * correction)

        def share(score: Vec, row: Vec) -> Vec:
            found = exp2(score - level)
            total.set(total.get() + found)
            return found

        _each_score(scores, place, first, last, share)
        for which, vector in enumerate((top, total.get(), correction)):
            sums.at(group, group.like(which)).store(vector, align=_BYTES)

    signature = types.void(scores, _INDEX, _INDEX, _INDEX, sums, _INDEX)
    return signature, codegen_of(emit)
