"""Vector IR for products of pairs of 16-bit numbers, bfloat16 or integers.

A tile is TILE_ROWS rows of weights times up to MOST_GROUPS groups of LANES tokens. Tokens are the
lanes, so a pair of weights is broadcast to them and no sum crosses lanes; each token's sum has one
order, whatever its company. The tile's sums fill the registers: for each pair of columns, four
loads of tokens and six of weights feed 24 instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from numba_kernels.ir.llvm_vectors import (
    BYTES,
    I16,
    I32,
    I64,
    LANES,
    counted_loop,
    prefetch_line,
    whole_steps,
)

TILE_ROWS = 6
MOST_GROUPS = 4
ROWS_AHEAD = 3
WORDS = ir.VectorType(I32, LANES)
HALF_WORDS = ir.VectorType(I16, LANES)
_BYTE = ir.IntType(8)
_PAIRS_A_STEP = 4


def element(context: Any, builder: Any, array_type: Any, array: Any, indices: list[Any]) -> Any:
    """i8* of an element of an array of any strides, and those."""
    struct = context.make_array(array_type)(context, builder, value=array)
    strides = cgutils.unpack_tuple(builder, struct.strides)
    offset = I64(0)
    for index, stride in zip(indices, strides, strict=True):
        offset = builder.add(offset, builder.mul(index, stride))
    base = builder.bitcast(struct.data, BYTES)
    return builder.gep(base, [offset], source_etype=_BYTE), strides


def further(builder: Any, pointer: Any, stride: Any, counts: range) -> list[Any]:
    """i8* of so many strides behind `pointer`, for each count."""
    return [
        builder.gep(pointer, [builder.mul(stride, I64(count))], source_etype=_BYTE)
        for count in counts
    ]


def spread(builder: Any, word: Any) -> Any:
    """A vector of words that are all `word` (i32)."""
    undefined = ir.Constant(WORDS, ir.Undefined)
    one = builder.insert_element(undefined, word, I32(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(WORDS, [I32(0)] * LANES))


def multiply_pairs(
    builder: Any,
    streams: list[Any],
    rows: list[Any],
    stride: Any,
    first: Any,
    last: Any,
    cells: list[Any],
    add: Callable[[Any, Any, Any], Any],
    following: list[Any],
    ahead_bytes: Any,
) -> None:
    """cells[r * len(streams) + g] = add(that, tokens, weights) for pairs first..last-1.

    `streams` are i8* of each group's tokens, LANES words for each pair; `rows` of each row's pairs,
    `stride` bytes apart. What `add` gets is two vectors of words. Meanwhile `ahead_bytes` of each
    of `following` for each pair are brought into the second-level cache.
    """

    def multiply(pair: Any) -> None:
        at = builder.mul(pair, I64(LANES * 4))
        xs = []
        for stream in streams:
            pointer = builder.gep(stream, [at], source_etype=_BYTE)
            words = builder.bitcast(pointer, WORDS.as_pointer())
            xs.append(builder.load(words, align=64, typ=WORDS))
        step = builder.mul(pair, stride)
        for r, row in enumerate(rows):
            pointer = builder.gep(row, [step], source_etype=_BYTE)
            word = builder.load(builder.bitcast(pointer, I32.as_pointer()), align=4, typ=I32)
            weight = spread(builder, word)
            for cell, x in zip(cells[r * len(xs) :], xs, strict=False):
                total = builder.load(cell, typ=cell.allocated_type)
                builder.store(add(total, x, weight), cell)

    def multiply_several(pair: Any) -> None:
        for pointer in following:
            at = builder.mul(pair, ahead_bytes)
            line = builder.gep(pointer, [at], source_etype=_BYTE)
            prefetch_line(builder, line, 0, locality=2)
        for i in range(_PAIRS_A_STEP):
            multiply(builder.add(pair, I64(i)))

    whole = builder.add(first, whole_steps(builder, builder.sub(last, first), _PAIRS_A_STEP))
    counted_loop(builder, first, whole, _PAIRS_A_STEP, multiply_several)
    counted_loop(builder, whole, last, 1, multiply)


def emit_row(builder: Any, length: Any, convert: Callable[[Any, int], None]) -> None:
    """convert(index, lanes) for a whole row: vectors, then one by one."""
    vectors = whole_steps(builder, length, LANES)
    counted_loop(builder, I64(0), vectors, LANES, lambda index: convert(index, LANES))
    counted_loop(builder, vectors, length, 1, lambda index: convert(index, 1))
