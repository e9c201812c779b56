"""Bits of single numbers. Weights become float32 as the CPU does it; LLVM vectorises that."""

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from numba_kernels.ir.arguments import Arguments, codegen_of
from numba_kernels.ir.vec import F32, HALF, I16, I32, I64, Vec

_BIT = ir.IntType(1)


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
