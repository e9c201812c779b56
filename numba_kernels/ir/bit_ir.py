"""Bits: weighted counts of those that differ in packed rows, and the bits of single numbers.

LLVM makes VPOPCNTQ of `ctpop` where the CPU has it, table look-ups by shuffle where it has not.
Single weights become float32 as the CPU does it; LLVM vectorises that.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hotcold.numba_kernels.ir.vec import (
    F32,
    HALF,
    I16,
    I32,
    I64,
    Arguments,
    Ptr,
    Var,
    Vec,
    codegen_of,
    for_range,
    whole_steps,
)

INPUT_PLANES = 3
MAX_WEIGHT_PLANES = 2
_WORDS = 8  # 64-bit words of one vector: a cache line
_BIT = ir.IntType(1)
_AHEAD_BYTES = 4096  # rows are read in order: so far before its use a line is asked for


def _popcount(words: Vec) -> Vec:
    suffix = "i64" if words.lanes == 1 else f"v{words.lanes}i64"
    return words.call(f"llvm.ctpop.{suffix}", words.value.type, words)


def _count_row(row: Ptr, planes: list[Ptr], length: Vec) -> tuple[Vec, Vec]:
    """Sum over planes k of 2**k * popcount(row ^ plane), as a vector and the rest beyond it."""
    zeros, zero = (Vec.full(row.builder, 0, I64, lanes) for lanes in (_WORDS, 1))
    sums, tails = [Var(zeros) for _ in planes], [Var(zero) for _ in planes]

    def count(index: Vec, lanes: int, totals: list[Var]) -> None:
        weights = (row + index * 8).load(I64, lanes)
        for plane, total in zip(planes, totals, strict=True):
            differing = weights ^ (plane + index * 8).load(I64, lanes)
            total.set(total.get() + _popcount(differing))

    def line(index: Vec) -> None:
        (row + index * 8 + _AHEAD_BYTES).prefetch()
        count(index, _WORDS, sums)

    whole = whole_steps(length, _WORDS)
    for_range(0, whole, _WORDS, line)
    for_range(whole, length, 1, lambda index: count(index, 1, tails))
    total, rest = zeros, zero
    for k in range(len(planes)):  # weighted before lanes are added up: that is done once then
        total += sums[k].get() << k
        rest += tails[k].get() << k
    return total, rest


def _count_rows(rows: list[Ptr], planes: list[Ptr], length: Vec) -> Vec:
    """Sum over rows p and planes k of 2**(p + k) * popcount(row ^ plane), `length` words each.

    Rows one after the other, as they lie in memory: one stream reads faster than two.
    """
    total, rest = _count_row(rows[0], planes, length)
    for p, row in enumerate(rows[1:], start=1):
        more, tail = _count_row(row, planes, length)
        total += more << p
        rest += tail << p
    words = total[0]
    for i in range(1, _WORDS):
        words += total[i]
    return words + rest


def _weighted_count(num_weight_planes: int) -> Callable[..., Any]:
    def weighted_count(typingctx: Any, bits: Any, neuron: Any, planes: Any) -> Any:
        def emit(given: Arguments) -> Vec:
            inputs, neuron = given.array(2), given.number(1)
            length = inputs.shape[1]
            first = given.array(0).at(neuron)
            rows = [first + length * (8 * p) for p in range(num_weight_planes)]
            return _count_rows(rows, inputs.rows(neuron.like(0), 0, INPUT_PLANES), length)

        return types.int64(bits, types.int64, planes), codegen_of(emit)

    weighted_count.__doc__ = f"""sum over p, k of 2**(p + k) * popcount(bits[n, p] ^ planes[k]).

    bits (N, {num_weight_planes} * W): a neuron's {num_weight_planes} weight planes one after the
    other; planes ({INPUT_PLANES}, W); both uint64.
    """
    weighted_count.__name__ = f"weighted_count{num_weight_planes}"
    return intrinsic(weighted_count)


weighted_count1 = _weighted_count(1)
weighted_count2 = _weighted_count(2)


@intrinsic
def float32_of(typingctx, weight):
    """A weight as float32: float32 itself, uint16 as float16 bits, int16 as bfloat16 bits."""
    if weight not in (types.float32, types.uint16, types.int16):
        return None

    def emit(given: Arguments) -> Vec:
        number = given.number(0)
        if weight == types.float32:
            return number
        if weight == types.uint16:
            return number.view(HALF).astype(F32)
        return (number.astype(I32, signed=False) << 16).view(F32)

    return types.float32(weight), codegen_of(emit)


@intrinsic
def half_bits(typingctx, value):
    """A float32 rounded to float16, ties to even, as uint16 bits."""
    emit = codegen_of(lambda given: given.number(0).astype(HALF).view(I16))
    return types.uint16(types.float32), emit


@intrinsic
def float32_bits(typingctx, value):
    """A float32's bits, uint32."""
    return types.uint32(types.float32), codegen_of(lambda given: given.number(0).view(I32))


@intrinsic
def float32_from_bits(typingctx, bits):
    """The float32 of these bits (uint32)."""
    return types.float32(types.uint32), codegen_of(lambda given: given.number(0).view(F32))


@intrinsic
def lowest_bit(typingctx, word):
    """The number of the lowest bit that is set in a word (uint32) other than 0."""

    def emit(given: Arguments) -> Vec:
        number = given.number(0)
        never_zero = Vec.full(given.builder, 1, _BIT)
        return number.call("llvm.cttz.i32", I32, number, never_zero).astype(I64, signed=False)

    return types.int64(types.uint32), codegen_of(emit)
