"""Vector code for packed bits: weighted counts of differing bits, by the CPU's vector popcount.

LLVM makes VPOPCNTQ of `ctpop` where the CPU has it, table look-ups by shuffle where it has not.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from numba_kernels.ir.llvm_vectors import (
    I64,
    counted_loop,
    item_pointer,
    new_cell,
    prefetch_line,
    row_pointer,
    whole_steps,
)

INPUT_PLANES = 3
MAX_WEIGHT_PLANES = 2
_WORDS = 8  # 64-bit words of one vector: a cache line
_AHEAD_BYTES = 4096  # rows are read in order: so far before its use a line is asked for


def _popcount(builder: Any, value: Any) -> Any:
    name = "llvm.ctpop.i64" if value.type == I64 else f"llvm.ctpop.v{_WORDS}i64"
    kind = ir.FunctionType(value.type, [value.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [value])


def _sum_words(builder: Any, vector: Any) -> Any:
    total = builder.extract_element(vector, ir.IntType(32)(0))
    for i in range(1, _WORDS):
        total = builder.add(total, builder.extract_element(vector, ir.IntType(32)(i)))
    return total


def _emit_row(builder: Any, row: Any, planes: list[Any], length: Any) -> tuple[Any, Any]:
    """Sum over planes k of 2**k * popcount(row ^ plane), as a vector and the rest beyond it."""
    vector = ir.VectorType(I64, _WORDS)
    zeros = ir.Constant(vector, [I64(0)] * _WORDS)
    sums = [new_cell(builder, zeros) for _ in planes]
    tails = [new_cell(builder, I64(0)) for _ in planes]

    def load(pointer: Any, index: Any, kind: Any) -> Any:
        at = builder.bitcast(item_pointer(builder, pointer, index, 8), kind.as_pointer())
        return builder.load(at, align=8, typ=kind)

    def count(index: Any, kind: Any, cells: list[Any]) -> None:
        weights = load(row, index, kind)
        for plane, cell in zip(planes, cells, strict=True):
            differing = _popcount(builder, builder.xor(weights, load(plane, index, kind)))
            builder.store(builder.add(builder.load(cell, typ=kind), differing), cell)

    def line(index: Any) -> None:
        prefetch_line(builder, item_pointer(builder, row, index, 8), _AHEAD_BYTES)
        count(index, vector, sums)

    whole = whole_steps(builder, length, _WORDS)
    counted_loop(builder, I64(0), whole, _WORDS, line)
    counted_loop(builder, whole, length, 1, lambda index: count(index, I64, tails))
    total, rest = zeros, I64(0)
    for k in range(len(planes)):  # weighted before lanes are added up: that is done once then
        shift = ir.Constant(vector, [I64(k)] * _WORDS)
        total = builder.add(total, builder.shl(builder.load(sums[k], typ=vector), shift))
        rest = builder.add(rest, builder.shl(builder.load(tails[k], typ=I64), I64(k)))
    return total, rest


def _emit_count(builder: Any, rows: list[Any], planes: list[Any], length: Any) -> Any:
    """Sum over rows p and planes k of 2**(p + k) * popcount(row ^ plane), `length` words each.

    Rows one after the other, as they lie in memory: one stream reads faster than two.
    """
    total, rest = _emit_row(builder, rows[0], planes, length)
    for p, row in enumerate(rows[1:], start=1):
        more, tail = _emit_row(builder, row, planes, length)
        shift = ir.Constant(total.type, [I64(p)] * _WORDS)
        total = builder.add(total, builder.shl(more, shift))
        rest = builder.add(rest, builder.shl(tail, I64(p)))
    return builder.add(_sum_words(builder, total), rest)


def _weighted_count(num_weight_planes: int) -> Callable[..., Any]:
    def weighted_count(typingctx: Any, bits: Any, neuron: Any, planes: Any) -> Any:
        signature = types.int64(bits, types.int64, planes)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            struct = context.make_array(planes)(context, builder, value=args[2])
            length = builder.extract_value(struct.shape, 1)
            first = row_pointer(context, builder, bits, args[0], args[1])
            rows = [
                item_pointer(builder, first, builder.mul(I64(p), length), 8)
                for p in range(num_weight_planes)
            ]
            inputs = [
                row_pointer(context, builder, planes, args[2], I64(k)) for k in range(INPUT_PLANES)
            ]
            return _emit_count(builder, rows, inputs, length)

        return signature, codegen

    weighted_count.__doc__ = f"""sum over p, k of 2**(p + k) * popcount(bits[n, p] ^ planes[k]).

    bits (N, {num_weight_planes} * W): a neuron's {num_weight_planes} weight planes one after the
    other; planes ({INPUT_PLANES}, W); both uint64.
    """
    weighted_count.__name__ = f"weighted_count{num_weight_planes}"
    return intrinsic(weighted_count)


weighted_count1 = _weighted_count(1)
weighted_count2 = _weighted_count(2)
