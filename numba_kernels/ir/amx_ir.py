"""Products by the tiles of AMX: matrix registers of 16 rows of 64 bytes.

An instruction adds to 16 x 16 sums the products of 16 rows of 16 pairs of bfloat16 with 16 pairs in
each of 16 columns. Its order of sums: `tests/kernels/test_amx.py` has it in plain loops.

Tiles are numbered; their shapes are loaded once for a kernel (`begin_tiles`), which gives them up
at its end, so that nobody has to save them when threads change. LLVM knows nothing of what is in
them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotcold.numba_kernels.amx import TILE_SHAPES
from hotcold.numba_kernels.ir.vec import (
    I8,
    I64,
    Arguments,
    Ptr,
    Vec,
    call_by_name,
    codegen_of,
    for_range,
)

AMX_ROWS = 16  # of a tile
AMX_ITEMS = 16  # of 32 bits, of a row of a tile
_ROW_BYTES = 64
_INDEX = types.int64
# Numbers of tiles: sums of two by two, then two of rows, then two of columns.
_SUMS, _LEFT, _RIGHT = ((0, 1), (2, 3)), (4, 5), (6, 7)


def call_tiles(builder: Any, name: str, *args: Any) -> None:
    """An instruction by its intrinsic's name."""
    call_by_name(builder, f"llvm.x86.{name}", ir.VoidType(), args)


def load_tile(tile: int, at: Ptr, stride: Vec) -> None:
    """Load a tile's rows, the first from `at`."""
    call_tiles(at.builder, "tileloadd64", I8(tile), at.value, stride.value)


def store_tile(tile: int, at: Ptr, stride: Vec) -> None:
    """Store a tile's rows, the first to `at`."""
    call_tiles(at.builder, "tilestored64", I8(tile), at.value, stride.value)


def load_shapes(builder: Any, shapes: bytes) -> None:
    """Give this thread's tiles shapes, of `amx.tile_shapes`."""
    content = cgutils.make_bytearray(shapes)
    place = cgutils.global_constant(builder.module, "amx_shapes", content)
    call_tiles(builder, "ldtilecfg", builder.bitcast(place, I8.as_pointer()))


@intrinsic
def begin_tiles(typingctx):
    """Give this thread's tiles their shapes."""
    return types.void(), codegen_of(lambda given: load_shapes(given.builder, TILE_SHAPES))


@intrinsic
def end_tiles(typingctx):
    """Give the tiles up."""
    return types.void(), codegen_of(lambda given: call_tiles(given.builder, "tilerelease"))


def _add_tiles(num_tiles: int, num_groups: int) -> Callable[..., Any]:
    """`add_tile` by so many tiles of rows times groups."""

    def add(  # type: ignore[no-untyped-def]
        typingctx, tokens, group, weights, row, first, last, out, ahead, ahead_row, column,
        ahead_bytes, rows_ahead,
    ):  # fmt: skip
        def emit(given: Arguments) -> None:
            x, w, target, following = (given.array(place) for place in (0, 2, 6, 7))
            group, row, first, last = given.numbers(1, 3, 4, 5)
            ahead_row, column, ahead_bytes, rows_ahead = given.numbers(8, 9, 10, 11)
            start, bytes_ahead = following.at(ahead_row, column), ahead_bytes * AMX_ITEMS
            right = [x.at(group + g, first) for g in range(num_groups)]
            left = [w.at(row + AMX_ROWS * r, 0) for r in range(num_tiles)]
            each = list(product(range(num_tiles), range(num_groups)))
            line = Vec.full(first.builder, _ROW_BYTES, I64)
            for r, g in each:
                load_tile(_SUMS[r][g], target.at(row + AMX_ROWS * r, group + g), target.strides[0])

            def step(index: Vec) -> None:
                line_at = start + index * bytes_ahead
                for_range(
                    0, rows_ahead, 1, lambda i: (line_at + following.strides[0] * i).prefetch(2)
                )
                for r, rows in enumerate(left):
                    load_tile(_LEFT[r], rows + index * (_ROW_BYTES), w.strides[0])
                for g, columns in enumerate(right):
                    load_tile(_RIGHT[g], columns + index * (_ROW_BYTES * AMX_ITEMS), line)
                for r, g in each:
                    call_tiles(
                        index.builder, "tdpbf16ps", I8(_SUMS[r][g]), I8(_LEFT[r]), I8(_RIGHT[g])
                    )

            for_range(0, (last - first) // AMX_ITEMS, 1, step)
            for r, g in each:
                store_tile(_SUMS[r][g], target.at(row + AMX_ROWS * r, group + g), target.strides[0])

        signature = types.void(
            tokens, _INDEX, weights, _INDEX, _INDEX, _INDEX, out, ahead, *(_INDEX,) * 4
        )
        return signature, codegen_of(emit)

    return add


# add_tiles_TG(tokens, group, weights, row, first, last, out, ahead, ahead_row, rows_ahead, column,
# ahead_bytes): as `panel_ir.add_tile`, for r < 16 T and g < G; first and last are multiples of
# AMX_ITEMS, and a row of weights lies item after item. It goes on with the sums in `out`.
add_tiles_11, add_tiles_12, add_tiles_21, add_tiles_22 = (
    intrinsic(_add_tiles(tiles, groups)) for tiles, groups in product((1, 2), (1, 2))
)
