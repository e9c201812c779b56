"""The most products that a core makes: the instructions of kernels over the first-level cache."""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from hotcold.numba_kernels.ir.byte_dot import ByteDot
from hotcold.numba_kernels.ir.quantized_ir import format_of
from hotcold.numba_kernels.ir.target import REGISTER_LANES
from hotcold.numba_kernels.ir.vec import F32, I32, I64, Arguments, Var, Vec, codegen_of, for_range

_ROWS, _VECTORS = 4, 2  # of a tile, whose sums stay in registers
_BYTES = 4 * REGISTER_LANES
_STEPS = 8  # after which the same registers are loaded again
PEAK_BYTES = (_ROWS + _VECTORS) * _STEPS * _BYTES


@intrinsic
def multiply_often(typingctx, weights, data, rounds):
    """(a sum of products, the number of products) of `rounds` tiles of registers.

    What rows like `weights` are multiplied with: four bytes a lane, or one float32. data: at least
    PEAK_BYTES bytes. Codes are not unpacked, and nothing is scaled.
    """

    def emit(given: Arguments) -> list[Vec]:
        start, rounds, builder = given.array(1).at(), given.number(2), given.builder
        row_format = format_of(weights.dtype)
        multiply = ByteDot(row_format, 1, of_parts=True) if row_format else None
        empty = Vec.full(builder, 0, F32, REGISTER_LANES)
        if multiply:
            empty = multiply.empty(builder, REGISTER_LANES)
        sums = [[Var(empty) for _ in range(_VECTORS)] for _ in range(_ROWS)]
        dtype = I32 if multiply else F32

        def load(place: int, step: Vec) -> Vec:
            at = start + place * _STEPS * _BYTES + step * _BYTES
            return at.load(dtype, REGISTER_LANES, align=1)

        def tile(index: Vec) -> None:
            step = index & _STEPS - 1
            vectors = [load(_ROWS + i, step) for i in range(_VECTORS)]
            for row, totals in enumerate(sums):
                codes = load(row, step)
                for vector, total in zip(vectors, totals, strict=True):
                    if multiply:
                        total.set(multiply.add_taken(total.get(), codes, vector))
                    else:
                        total.set(codes.fma(vector, total.get()))

        for_range(0, rounds, 1, tile)
        ends = [total.get() for totals in sums for total in totals]
        if multiply:
            ends = [multiply.end([end]).astype(F32) for end in ends]
        total = ends[0]
        for end in ends[1:]:
            total = total + end
        a_round = _ROWS * _VECTORS * REGISTER_LANES * (4 if multiply else 1)
        return [total.sum(), rounds * Vec.full(builder, a_round, I64)]

    result = types.Tuple((types.float32, types.int64))
    return result(weights, data, types.int64), codegen_of(emit)
