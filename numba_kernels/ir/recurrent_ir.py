"""Vector IR of recurrent layers: sums of scaled rows, products of two vectors with one row.

Every sum has an order of its own, which does not depend on what is computed beside it: rows follow
each other, and a product's lanes are added up by halving. So bits are the same on every CPU.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from hotcold.numba_kernels.ir.target import LANES
from hotcold.numba_kernels.ir.vec import (
    F32,
    Arguments,
    Ptr,
    Var,
    Vec,
    codegen_of,
    for_range,
    for_vectors,
    whole_steps,
)

_ROWS_AT_ONCE = 4
_INDEX = types.int64
_PAIR = types.UniTuple(types.float32, 2)


@intrinsic
def add_scaled_rows2(
    typingctx, out, out_a, out_b, rows, first, step, factors, factors_a, factors_b, count, length
):
    """Two sums of the same `count` rows, each row read once, in memory's order.

    out[out_a + i] += sum over s of factors[factors_a + s] * rows[first + s * step + i], i < length
    and the same with out_b and factors_b. A sum goes from s = 0 on, each product rounded with it.
    Shapes:  out, rows, factors 1-D float32, contiguous; out overlaps neither of the others
    """

    def emit(given: Arguments) -> None:
        sums, rows_, scales = given.array(0), given.array(3), given.array(6)
        first_, step_, count_, length_ = given.numbers(4, 5, 9, 10)
        outs = [sums.at(place) for place in given.numbers(1, 2)]
        factors_of = [scales.at(place) for place in given.numbers(7, 8)]

        def some(row: Vec, num_rows: int) -> None:
            start = rows_.at(first_ + row * step_)
            starts = [start + step_ * (4 * r) for r in range(num_rows)]
            own = [
                [(each + (row + r) * 4).load(F32) for r in range(num_rows)] for each in factors_of
            ]

            def columns(index: Vec, lanes: int) -> None:
                values = [(each + index * 4).load(F32, lanes) for each in starts]
                for out_, scale in zip(outs, own, strict=True):
                    place = out_ + index * 4
                    total = place.load(F32, lanes)
                    for value, one in zip(values, scale, strict=True):
                        total = value.fma(one.spread(lanes) if lanes > 1 else one, total)
                    place.store(total)

            for_vectors(length_, LANES, columns)

        whole = whole_steps(count_, _ROWS_AT_ONCE)
        for_range(0, whole, _ROWS_AT_ONCE, lambda row: some(row, _ROWS_AT_ONCE))
        for_range(whole, count_, 1, lambda row: some(row, 1))

    kinds = (out, _INDEX, _INDEX, rows, _INDEX, _INDEX, factors, *(_INDEX,) * 4)
    return types.void(*kinds), codegen_of(emit)


@intrinsic
def dots2(typingctx, row, place, vectors, first_a, first_b, length):
    """(row[place:] . vectors[first_a:], row[place:] . vectors[first_b:]) of `length` numbers.

    Shapes:  row, vectors 1-D float32, contiguous
    """

    def emit(given: Arguments) -> list[Vec]:
        length_ = given.number(5)
        own = given.array(0).at(given.number(1))
        others = [given.array(2).at(start) for start in given.numbers(3, 4)]
        builder = length_.builder
        lanes = [Var(Vec.full(builder, 0, F32, LANES)) for _ in others]

        def add(index: Vec, width: int, sums: list[Var], starts: list[Ptr]) -> None:
            value = (own + index * 4).load(F32, width)
            for total, start in zip(sums, starts, strict=True):
                total.set(value.fma((start + index * 4).load(F32, width), total.get()))

        whole = whole_steps(length_, LANES)
        for_range(0, whole, LANES, lambda index: add(index, LANES, lanes, others))
        sums = [Var(each.get().sum()) for each in lanes]
        for_range(whole, length_, 1, lambda index: add(index, 1, sums, others))
        return [each.get() for each in sums]

    return _PAIR(row, _INDEX, vectors, *(_INDEX,) * 3), codegen_of(emit)
