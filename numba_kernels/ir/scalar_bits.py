"""Bits of single numbers. Weights become float32 as the CPU does it; LLVM vectorises that."""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_F32, _HALF = ir.FloatType(), ir.HalfType()
_I16, _I32 = ir.IntType(16), ir.IntType(32)


@intrinsic
def float32_of(typingctx, weight):
    """A weight as float32: float32 itself, uint16 as float16 bits, int16 as bfloat16 bits."""
    if weight not in (types.float32, types.uint16, types.int16):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if weight == types.float32:
            return args[0]
        if weight == types.uint16:
            return builder.fpext(builder.bitcast(args[0], _HALF), _F32)
        wide = builder.shl(builder.zext(args[0], _I32), _I32(16))
        return builder.bitcast(wide, _F32)

    return types.float32(weight), codegen


@intrinsic
def half_bits(typingctx, value):
    """A float32 rounded to float16, ties to even, as uint16 bits."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], _HALF), _I16)

    return types.uint16(types.float32), codegen


@intrinsic
def float32_bits(typingctx, value):
    """A float32's bits, uint32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), codegen


@intrinsic
def float32_from_bits(typingctx, bits):
    """The float32 of these bits (uint32)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.uint32), codegen


@intrinsic
def lowest_bit(typingctx, word):
    """The number of the lowest bit that is set in a word (uint32) other than 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = builder.cttz(args[0], ir.IntType(1)(1))
        return builder.zext(number, ir.IntType(64))

    return types.int64(types.uint32), codegen
