"""Vector IR of attention over rows of a paged cache: scores, exponentials, weighted sums.

A row is a position's key or value of one head: float32, float16, or int8 with float32 scales behind
it, one for each 32 items. Up to four queries that read the same rows meet them together, so a row
is widened once.
Every sum has an order of its own, which does not depend on what is computed beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hotcold.numba_kernels.ir.float_ir import item_bytes, widen
from hotcold.numba_kernels.ir.target import LANES, LINE_BYTES, has_feature
from hotcold.numba_kernels.ir.vec import (
    F32,
    HALF,
    I8,
    I32,
    Arguments,
    Array,
    Ptr,
    Var,
    Vec,
    codegen_of,
    for_range,
    for_vectors,
    whole_steps,
)

POSITIONS_AT_ONCE = QUERIES_AT_ONCE = 4
CACHE_BLOCK = 32  # items of an int8 row with one scale; whole vectors
_HAS_MANY_REGISTERS = has_feature("avx512f")  # and wide ones: 32 of 16 lanes, else 16 of 8
# Queries whose products with four rows are kept side by side; vectors of sums for so many queries.
_SIDE_BY_SIDE = 4 if _HAS_MANY_REGISTERS else 1
_VECTORS = {1: 8, 2: 8, 3: 4, 4: 4} if _HAS_MANY_REGISTERS else {1: 4, 2: 2, 3: 1, 4: 1}
_INDEX, _NUMBER = types.int64, types.float32
_FLOATS = ir.VectorType(F32, LANES)

# exp(x) = 2^n * e^r with n = x / ln 2 rounded, by a polynomial of degree 7; source: Cephes, expf
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_COEFFICIENTS = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip
_ROUNDER = 12582912.0  # 1.5 * 2^23: added, a small number is rounded to a whole one
_LEAST = -87.0  # e^x is 0 below
_BEYOND_HALF = 65520.0  # the least that rounds to float16's infinity


def _scale_place(head_dim: Vec, column: Vec) -> Vec:
    """Where in an int8 row the scale of a column stands."""
    return head_dim + column // CACHE_BLOCK * 4


class _Rows:
    """Rows of one head in one page of a layer's cache (M, G, P, row)."""

    def __init__(self, cache: Array, page: Vec, group: Vec, head_dim: Vec) -> None:
        self._start, self._stride = cache.at(page, group), cache.strides[2]
        self._dtype, self._item = cache.kind.dtype, item_bytes(cache.kind.dtype)
        self._head_dim = head_dim

    def row(self, position: Vec) -> Ptr:
        """A position's row; `position` within the page."""
        return self._start + self._stride * position

    def items(self, row: Ptr, column: Vec, lanes: int, count: int = 1) -> list[Vec]:
        """So many vectors of a row as float32; of several the first one begins a block."""
        start = row + column * self._item
        found = [widen(self._dtype, start + i * lanes * self._item, lanes) for i in range(count)]
        if self._dtype != types.int8:
            return found
        first, scales = row + _scale_place(self._head_dim, column), []
        for block in range(-(-count * lanes // CACHE_BLOCK)):
            scale = (first + block * 4).load(F32, align=1)
            scales.append(scale.spread(lanes) if lanes > 1 else scale)
        return [vec * scales[i * lanes // CACHE_BLOCK] for i, vec in enumerate(found)]


class _Ahead:
    """What is read next: rows of a page that is asked for while another one is computed."""

    def __init__(self, cache: Array, page: Vec, group: Vec, is_wanted: Vec) -> None:
        self._start, self._stride = cache.at(page, group), cache.strides[2]
        self._is_wanted = is_wanted

    def prefetch(self, position: Vec, count: int) -> None:
        """Ask for so many rows from a position of the page on."""
        start = self._start + self._stride * position
        num_bytes = self._stride * self._is_wanted * count
        for_range(0, num_bytes, LINE_BYTES, lambda index: (start + index).prefetch(2))


def _sums_of_four(vectors: list[Vec]) -> Vec:
    """(sum of vectors[0], ..., of vectors[3]), each added up as `Vec.sum` does it."""
    span = LANES
    while span > 1:
        half, held = span // 2, vectors[0].lanes // span
        low = [leaf * span + lane for leaf in range(held) for lane in range(half)]
        high = [place + half for place in low]
        if len(vectors) > 1:
            lanes = vectors[0].lanes
            low += [place + lanes for place in low]
            high += [place + lanes for place in high]
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [a.take(low, b) + a.take(high, b) for a, b in pairs]
        else:
            vectors = [vectors[0].take(low) + vectors[0].take(high)]
        span = half
    return vectors[0]


def _emit_scores(given: Arguments, num_queries: int) -> None:
    page, group, first, last = given.numbers(1, 2, 3, 4)
    token, column, head_dim, factor = given.numbers(6, 7, 8, 9)
    row, place = given.numbers(11, 12)
    keys = _Rows(given.array(0), page, group, head_dim)
    query = given.array(5).at(token, column)
    queries = [query + head_dim * (4 * q) for q in range(num_queries)]
    scores = [given.array(10).at(row + q, place - first) for q in range(num_queries)]
    ahead = _Ahead(given.array(13), given.number(14), group, given.number(15))
    whole = whole_steps(head_dim, LANES)
    builder = head_dim.builder

    def some(own: range, position: Vec, rows: list[Ptr]) -> None:
        zero = Vec.full(builder, 0, F32, LANES)
        sums = [[Var(zero) for _ in rows] for _ in own]

        def add(index: Vec, lanes: int, into: list[list[Var]]) -> None:
            items = [keys.items(each, index, lanes)[0] for each in rows]
            for q, totals in zip(own, into, strict=True):
                x = widen(types.float32, queries[q] + index * 4, lanes)
                for item, total in zip(items, totals, strict=True):
                    total.set(item.fma(x, total.get()))

        for_range(0, whole, LANES, lambda index: add(index, LANES, sums))
        found = [Var(_sums_of_four([total.get() for total in totals])) for totals in sums]
        with builder.if_then(whole.differs(head_dim).value):
            tails = [[Var(Vec.full(builder, 0, F32)) for _ in rows] for _ in own]
            for_range(whole, head_dim, 1, lambda index: add(index, 1, tails))
            for four, totals in zip(found, tails, strict=True):
                last_items = Vec.full(builder, 0, F32, POSITIONS_AT_ONCE)
                for lane, total in enumerate(totals):
                    last_items = last_items.with_lane(lane, total.get())
                four.set(four.get() + last_items)
        for q, four in zip(own, found, strict=True):
            (scores[q] + position * 4).store(four.get() * factor)

    def four_rows(position: Vec) -> None:
        ahead.prefetch(position, POSITIONS_AT_ONCE)
        rows = [keys.row(position + k) for k in range(POSITIONS_AT_ONCE)]
        for start in range(0, num_queries, _SIDE_BY_SIDE):
            own_queries = range(start, min(start + _SIDE_BY_SIDE, num_queries))
            some(own_queries, position, rows)

    end = (last + (POSITIONS_AT_ONCE - 1)) // POSITIONS_AT_ONCE * POSITIONS_AT_ONCE
    for_range(first, end, POSITIONS_AT_ONCE, four_rows)


def _emit_values(given: Arguments, num_queries: int) -> None:
    page, group, first, last = given.numbers(1, 2, 3, 4)
    row, place, head_dim, out_row = given.numbers(6, 7, 8, 10)
    values = _Rows(given.array(0), page, group, head_dim)
    shares = [given.array(5).at(row + q, place - first) for q in range(num_queries)]
    targets = [given.array(9).at(out_row + q) for q in range(num_queries)]
    ahead = _Ahead(given.array(11), given.number(12), group, given.number(13))

    def columns(start: Vec, lanes: int, count: int, is_first: bool = False) -> None:
        places = [[at + (start + i * lanes) * 4 for i in range(count)] for at in targets]
        sums = [[Var(widen(types.float32, at, lanes)) for at in own] for own in places]

        def position(index: Vec) -> None:
            each = values.row(index)
            if is_first:
                ahead.prefetch(index, 1)
            items = values.items(each, start, lanes, count)
            for share_at, totals in zip(shares, sums, strict=True):
                share = (share_at + index * 4).load(F32)
                wide = share.spread(lanes) if lanes > 1 else share
                for item, total in zip(items, totals, strict=True):
                    total.set(item.fma(wide, total.get()))

        for_range(first, last, 1, position)
        for own, totals in zip(places, sums, strict=True):
            for at, total in zip(own, totals, strict=True):
                at.store(total.get())

    count = _VECTORS[num_queries]
    most, whole = whole_steps(head_dim, count * LANES), whole_steps(head_dim, LANES)
    for_range(0, most, count * LANES, lambda start: columns(start, LANES, count, True))
    for_range(most, whole, LANES, lambda start: columns(start, LANES, 1))
    for_range(whole, head_dim, 1, lambda start: columns(start, 1, 1))


def _for_count(count: Vec, emit: Callable[[int], None]) -> None:
    """Emit the code of each number of queries; `count` says at run time which one runs."""
    for number in range(1, QUERIES_AT_ONCE + 1):
        with count.builder.if_then(count.equals(number).value):
            emit(number)


@intrinsic
def score_page(
    typingctx, keys, page, group, first, last, qkv, token, column, head_dim, factor, scores, row,
    place, ahead, ahead_page, is_wanted, count,
):  # fmt: skip
    """scores[row + q, place + p - first] = factor * (key of the page's position p . query q).

    For q < count and first <= p < last, both in whole fours; query q is in qkv[token] from
    column + q * head_dim on. If `is_wanted`, the same rows of ahead[ahead_page, group] are
    prefetched in step. keys, ahead (M, G, P, row)
    """

    def emit(given: Arguments) -> None:
        _for_count(given.number(16), lambda number: _emit_scores(given, number))

    signature = types.void(
        keys, *(_INDEX,) * 4, qkv, *(_INDEX,) * 3, _NUMBER, scores, _INDEX, _INDEX, ahead,
        *(_INDEX,) * 3,
    )  # fmt: skip
    return signature, codegen_of(emit)


@intrinsic
def add_page_values(
    typingctx, values, page, group, first, last, scores, row, place, head_dim, out, out_row, ahead,
    ahead_page, is_wanted, count,
):  # fmt: skip
    """out[out_row + q] += sum over first <= p < last of scores[...] * value of position p.

    For q < count, in the order of positions; the arguments are those of `score_page`.
    """

    def emit(given: Arguments) -> None:
        _for_count(given.number(14), lambda number: _emit_values(given, number))

    signature = types.void(
        values, *(_INDEX,) * 4, scores, *(_INDEX,) * 3, out, _INDEX, ahead, *(_INDEX,) * 3
    )
    return signature, codegen_of(emit)


@intrinsic
def exponentials(typingctx, scores, row, first, last, softcap):
    """scores[row, p] = exp(score - the largest), first <= p < last; returns (largest, sum).

    Others of the vectors that they stand in become 0. With a softcap, scores are first brought
    between -softcap and softcap. Lane l of the sum has positions l, l + 16, ...
    """

    def emit(given: Arguments) -> list[Vec]:
        row, first, last, softcap = given.numbers(1, 2, 3, 4)
        start = given.array(0).at(row)
        begin, end = whole_steps(first, LANES), whole_steps(last + (LANES - 1), LANES)
        builder = row.builder

        def vectors(body: Callable[[Vec, Vec], Vec]) -> None:
            def one(index: Vec) -> None:
                at = start + index * 4
                at.store(body(index, at.load(F32, LANES)))

            for_range(begin, end, LANES, one)

        with builder.if_then((Vec.full(builder, 0, F32) < softcap).value):
            cap = softcap.spread(LANES)
            vectors(lambda index, x: cap * _tanh(x / cap))
        lowest = Vec.full(builder, float("-inf"), F32, LANES)
        top, lanes = Var(lowest), Vec.of(builder, range(LANES), I32)

        def largest(index: Vec, x: Vec) -> Vec:
            place = lanes + index.astype(I32)
            seen = (place >= first.astype(I32)).where(x, lowest)
            seen = (place < last.astype(I32)).where(seen, lowest)
            top.set((top.get() < seen).where(seen, top.get()))
            return seen

        vectors(largest)
        highest = top.get()
        while highest.lanes > 2:
            half = highest.lanes // 2
            low, high = highest.take(range(half)), highest.take(range(half, 2 * half))
            highest = (low < high).where(high, low)
        largest_score = (highest[0] < highest[1]).where(highest[1], highest[0])
        wide, total = largest_score.spread(LANES), Var(Vec.full(builder, 0, F32, LANES))

        def power(index: Vec, x: Vec) -> Vec:
            found = _exp(x - wide)
            total.set(total.get() + found)
            return found

        vectors(power)
        return [largest_score, total.get().sum()]

    signature = types.UniTuple(types.float32, 2)(scores, _INDEX, _INDEX, _INDEX, _NUMBER)
    return signature, codegen_of(emit)


def _exp(x: Vec) -> Vec:
    """e^x for x <= 0, to a unit or two of the last place; 0 below -87, NaN for NaN."""
    rounded = x.fma(x.like(_LOG2_E), x.like(_ROUNDER))
    n = rounded - _ROUNDER
    r = n.fma(x.like(-_LN2_LOW), n.fma(x.like(-_LN2_HIGH), x))
    sums = x.like(_COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        sums = sums.fma(r, x.like(coefficient))
    power = sums.fma(r * r, r) + 1
    scale = ((rounded.view(I32) << 23) + 0x3F800000).view(F32)
    return (x < _LEAST).where(x.like(0), power * scale)


def _tanh(x: Vec) -> Vec:
    """(1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x; absolute errors of about 1e-7."""
    e = _exp(_magnitude(x) * -2)
    return x.call("llvm.copysign.v16f32", _FLOATS, (x.like(1) - e) / (e + 1), x)


@intrinsic
def store_row(typingctx, cache, page, group, position, x, token, column, head_dim):
    """Write `head_dim` items of x[token] from `column` on to a row of the cache, in its format.

    In float16 a number beyond 65504 becomes a NaN: an infinite key may have a score of minus
    infinity, and hide. In 8 bits each 32 items have scale = max |x| / 127, value = x / scale
    rounded to the nearest, ties to even. A NaN or an infinity makes the scale NaN or infinite.
    cache (M, G, P, row); x (T, d) float32
    """

    def emit(given: Arguments) -> None:
        target, size = given.array(0).at(*given.numbers(1, 2, 3)), given.number(7)
        source = given.array(4).at(*given.numbers(5, 6))
        if cache.dtype == types.int8:

            def block(start: Vec) -> None:
                length = (size - start).minimum(CACHE_BLOCK)
                scale_at = target + _scale_place(size, start)
                _emit_quantized(source + start * 4, target + start, scale_at, length)

            for_range(0, size, CACHE_BLOCK, block)
            return
        kind, item = {types.float32: (F32, 4), types.uint16: (HALF, 2)}[cache.dtype]

        def copy(index: Vec, lanes: int) -> None:
            x = (source + index * 4).load(F32, lanes)
            (target + index * item).store(x if kind == F32 else _finite_half(x))

        for_vectors(size, LANES, copy)

    return types.void(cache, *(_INDEX,) * 3, x, *(_INDEX,) * 3), codegen_of(emit)


def _finite_half(x: Vec) -> Vec:
    """The nearest float16, ties to even; a NaN where that would be infinite."""
    return (_magnitude(x) < _BEYOND_HALF).where(x, math.nan).astype(HALF)


def _magnitude(x: Vec) -> Vec:
    name, kind = ("v16f32", _FLOATS) if x.lanes > 1 else ("f32", F32)
    return x.call(f"llvm.fabs.{name}", kind, x)


def _emit_quantized(source: Ptr, target: Ptr, scale_at: Ptr, size: Vec) -> None:
    builder = size.builder
    tops = {lanes: Var(Vec.full(builder, 0, F32, lanes)) for lanes in (LANES, 1)}

    def largest(index: Vec, lanes: int) -> None:
        x, top = (source + index * 4).load(F32, lanes), tops[lanes]
        name, kind = ("v16f32", _FLOATS) if lanes > 1 else ("f32", F32)
        top.set(x.call(f"llvm.maximum.{name}", kind, _magnitude(x), top.get()))

    for_vectors(size, LANES, largest)
    wide = tops[LANES].get()
    top = wide.call("llvm.vector.reduce.fmaximum.v16f32", F32, wide)
    top = top.call("llvm.maximum.f32", F32, top, tops[1].get())
    inverse = top.equals(0).where(top.like(0), top.like(127) / top)

    def store(index: Vec, lanes: int) -> None:
        scaled = (source + index * 4).load(F32, lanes) * inverse
        # Added to this, a number is rounded; its low bits are then a whole number's.
        whole = (scaled + _ROUNDER).view(I32)
        (target + index).store(whole.astype(I8), align=1)

    for_vectors(size, LANES, store)
    scale_at.store(top / 127, align=1)


@intrinsic
def widen_cached(typingctx, cache, page, group, position, head_dim, out, row):
    """out[row] = a row of the cache, as float32; out (N, head_dim)."""

    def emit(given: Arguments) -> None:
        page, group, position, head_dim = given.numbers(1, 2, 3, 4)
        rows = _Rows(given.array(0), page, group, head_dim)
        source, target = rows.row(position), given.array(5).at(given.number(6))

        def copy(index: Vec, lanes: int) -> None:
            (target + index * 4).store(rows.items(source, index, lanes)[0])

        for_vectors(head_dim, LANES, copy)

    return types.void(cache, *(_INDEX,) * 4, out, _INDEX), codegen_of(emit)
