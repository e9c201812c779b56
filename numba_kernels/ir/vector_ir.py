"""Vector code that LLVM does not find by itself: dot products and scaled sums of weight rows.

Each intrinsic emits LLVM vector IR of 16 lanes; LLVM splits or joins the lanes for what the CPU
has (AVX-512, AVX2, NEON). float16 widens by `fpext`, bfloat16 by a 16-bit shift, quantized rows
multiply as integers. Nothing here checks its arguments. Rows must be contiguous; their distance
(stride) is free, so a row of a [N, 3, d] bundle array works as well as a row of a matrix.

A product of one row and one vector is added up in the same order by all of these, so its bits do
not depend on what is computed beside it. `x` is what `numba_kernels.decode.vectors.prepared` gave.
"""

from typing import Any

from numba.core import types
from numba.extending import intrinsic

from numba_kernels.formats import QUANT_GROUP
from numba_kernels.ir.llvm_vectors import (
    I64,
    LANES,
    LINE_BYTES,
    LINES_AHEAD,
    PAGE_BYTES,
    counted_loop,
    has_feature,
    item_pointer,
    prefetch_line,
    round_to_bfloat16,
    row_pointer,
    vector_pointer,
    whole_steps,
    widen,
)
from numba_kernels.ir.operands import PART_COLUMNS, Vectors, Weights, store_float
from numba_kernels.ir.panel_ir import read_through
from numba_kernels.ir.quantize_ir import emit_quantize, emit_widened
from numba_kernels.ir.quantized_ir import Vector, bits_of
from numba_kernels.ir.vec import Ptr, Vec

# Rows and tokens of a tile: as many sums as registers hold beside a column of weights. 32 registers
# of a whole vector with AVX-512, fewer or smaller ones elsewhere; docs/lab_log.md has the figures.
_WIDE = has_feature("avx512f")
FLOAT_TILE = (6, 4) if _WIDE else (3, 2)
# Tiles that are read through before they are multiplied: 24 rows, which stay in the second-level
# cache, or 12.
PANEL_TILES = 4  # of float rows
_FEW_TOKENS = {0: 3, 8: 2, 4: 1}  # by bits of quantized weights
QUANTIZED_TILE = (8, 2) if _WIDE else (3, 2)
_QUANTIZED_TILES = 3 if _WIDE else 4


def _tile_of(weights: Any) -> tuple[int, int]:
    return QUANTIZED_TILE if bits_of(weights.dtype) else FLOAT_TILE


@intrinsic
def tile_shape(typingctx, weights):
    """(rows, tokens, few tokens, tiles) for weights of this format.

    Rows and tokens are those of `tile_wide`; few tokens' products with a row take no longer than
    reading it; so many tiles lie side by side in what `tile_kernel` multiplies at once.
    """
    signature = types.UniTuple(types.int64, 4)(weights)
    bits = bits_of(weights.dtype)
    few_tokens = _FEW_TOKENS[bits]
    tiles = _QUANTIZED_TILES if bits else PANEL_TILES

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sizes = [I64(size) for size in (*_tile_of(weights), few_tokens, tiles)]
        return context.make_tuple(builder, signature.return_type, sizes)

    return signature, codegen


@intrinsic
def dot4(typingctx, weights, row0, row1, row2, row3, x):
    """(weights[row0] . x, ..., weights[row3] . x); float weights (N, d), x (d,) float32."""
    signature = types.UniTuple(types.float32, 4)(weights, *(types.int64,) * 4, x)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = Weights(context, builder, weights, args[0])
        pointer, _ = vector_pointer(context, builder, x, args[5])
        results = matrix.products([matrix.row(row) for row in args[1:5]], [pointer])
        return context.make_tuple(builder, signature.return_type, results)

    return signature, codegen


@intrinsic
def dot1(typingctx, weights, row, x):
    """weights[row] . x; float weights (N, d), x (d,) float32."""
    signature = types.float32(weights, types.int64, x)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = Weights(context, builder, weights, args[0])
        pointer, _ = vector_pointer(context, builder, x, args[2])
        return matrix.products([matrix.row(args[1])], [pointer])[0]

    return signature, codegen


@intrinsic
def dot_ahead(typingctx, weights, row, following, x, token):
    """weights[row] . x[token], while the lines of weights[following] are prefetched in step.

    One stream a core with the row after it on its way reads as fast as memory gives; several rows
    side by side reach less of that (docs/lab_log.md).
    """
    signature = types.float32(weights, types.int64, types.int64, x, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = Weights(context, builder, weights, args[0])
        vector = Vectors(context, builder, x, args[3]).vector(args[4])
        return matrix.products([matrix.row(args[1])], [vector], [matrix.row(args[2])])[0]

    return signature, codegen


@intrinsic
def dot_tokens2(typingctx, weights, row, following, x, token0, token1):
    """(weights[row] . x[token0], weights[row] . x[token1]); prefetches as `dot_ahead`."""
    ids = (types.int64,) * 2
    return types.UniTuple(types.float32, 2)(weights, *ids, x, *ids), _dot_tokens(weights, x)


@intrinsic
def dot_tokens4(typingctx, weights, row, following, x, token0, token1, token2, token3):
    """(weights[row] . x[token0], ..., weights[row] . x[token3]); prefetches as `dot_ahead`."""
    ids = (types.int64,) * 4
    signature = types.UniTuple(types.float32, 4)(weights, types.int64, types.int64, x, *ids)
    return signature, _dot_tokens(weights, x)


def _dot_tokens(weights: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = Weights(context, builder, weights, args[0])
        vectors = Vectors(context, builder, x, args[3])
        tokens = [vectors.vector(token) for token in args[4:]]
        results = matrix.products([matrix.row(args[1])], tokens, [matrix.row(args[2])])
        return context.make_tuple(builder, signature.return_type, results)

    return codegen


def _emit_tile(
    context: Any,
    builder: Any,
    weights: Any,
    x: Any,
    out: Any,
    args: Any,
    num_tokens: int,
) -> None:
    """args: weights, row, x, token, out, column."""
    matrix = Weights(context, builder, weights, args[0])
    vectors = Vectors(context, builder, x, args[2])
    num_rows = _tile_of(weights)[0]
    rows = [matrix.row(builder.add(args[1], I64(r))) for r in range(num_rows)]
    tokens = [builder.add(args[3], I64(t)) for t in range(num_tokens)]
    products = matrix.products(rows, [vectors.vector(token) for token in tokens])
    targets = [row_pointer(context, builder, out, args[4], token) for token in tokens]
    strides = context.make_array(out)(context, builder, args[4]).strides
    item_bytes = builder.extract_value(strides, 1)
    for r in range(num_rows):
        at = builder.mul(builder.add(args[5], I64(r)), item_bytes)
        for t in range(num_tokens):
            store_float(builder, products[r * num_tokens + t], targets[t], at)


@intrinsic
def tile_wide(typingctx, weights, row, x, token, out, column):
    """out[token + t, column + r] = weights[row + r] . x[token + t] for a tile of rows and tokens.

    A row is widened once for all tokens and a token's vector loaded once for all rows, so that
    vectors which do not fit the first-level cache do not hold up the multiplication.
    """
    signature = types.void(weights, types.int64, x, types.int64, out, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_tile(context, builder, weights, x, out, args, _tile_of(weights)[1])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def read_rows(typingctx, weights, row, num_rows):
    """Bring rows row..row + num_rows - 1, which lie one after the other, into the cache."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = Weights(context, builder, weights, args[0])
        read_through(builder, matrix.pointer(args[1]), builder.mul(matrix.row_bytes, args[2]))
        return context.get_dummy_value()

    return types.void(weights, types.int64, types.int64), codegen


@intrinsic
def tile_panel(typingctx, weights, row, x, token, out, column):
    """`tile_wide` for PANEL_TILES tiles of float rows; see `numba_kernels.ir.panel_ir`."""
    signature = types.void(weights, types.int64, x, types.int64, out, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = Weights(context, builder, weights, args[0])
        vectors = Vectors(context, builder, x, args[2])
        num_rows, num_tokens = _tile_of(weights)
        tokens = [builder.add(args[3], I64(t)) for t in range(num_tokens)]
        operands = [vectors.vector(token) for token in tokens]
        panel = matrix.panel(args[1], operands, num_rows, PANEL_TILES)
        targets = [row_pointer(context, builder, out, args[4], token) for token in tokens]
        strides = context.make_array(out)(context, builder, args[4]).strides
        item_bytes = builder.extract_value(strides, 1)

        def store(row: Any, token: int, product: Any) -> None:
            at = builder.mul(builder.add(args[5], row), item_bytes)
            store_float(builder, product, targets[token], at)

        panel.emit(matrix.width, store)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def tile_narrow(typingctx, weights, row, x, token, out, column):
    """`tile_wide` for one token."""
    signature = types.void(weights, types.int64, x, types.int64, out, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _emit_tile(context, builder, weights, x, out, args, 1)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_scaled4(typingctx, out, weights, row0, row1, row2, row3, c0, c1, c2, c3):
    """out += c0 * weights[row0] + ... + c3 * weights[row3], in this order; out (d,) float32.

    For quantized weights `out` is in lane order; see `numba_kernels.decode.rows.add_in_order`.
    """
    ids, scales = (types.int64,) * 4, (types.float32,) * 4
    signature = types.void(out, weights, *ids, *scales)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, _ = vector_pointer(context, builder, out, args[0])
        matrix = Weights(context, builder, weights, args[1])
        matrix.add_scaled(pointer, [matrix.row(row) for row in args[2:6]], list(args[6:10]), [])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_scaled4_ahead(
    typingctx, out, weights, row0, row1, row2, row3, c0, c1, c2, c3, a0, a1, a2, a3
):
    """`add_scaled4`, while rows a0..a3 are prefetched in step."""
    ids, scales = (types.int64,) * 4, (types.float32,) * 4
    signature = types.void(out, weights, *ids, *scales, *ids)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, _ = vector_pointer(context, builder, out, args[0])
        matrix = Weights(context, builder, weights, args[1])
        rows, ahead = ([matrix.row(row) for row in ids] for ids in (args[2:6], args[10:14]))
        matrix.add_scaled(pointer, rows, list(args[6:10]), ahead)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_scaled1(typingctx, out, weights, row, scale):
    """out += scale * weights[row]; out (d,) float32, in lane order for quantized weights."""
    signature = types.void(out, weights, types.int64, types.float32)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, _ = vector_pointer(context, builder, out, args[0])
        matrix = Weights(context, builder, weights, args[1])
        matrix.add_scaled(pointer, [matrix.row(args[2])], [args[3]], [])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def dot_rows4(typingctx, weights, row0, row1, row2, row3, x, token):
    """(weights[row0] . x[token], ..., weights[row3] . x[token])."""
    ids = (types.int64,) * 4
    signature = types.UniTuple(types.float32, 4)(weights, *ids, x, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = Weights(context, builder, weights, args[0])
        vector = Vectors(context, builder, x, args[5]).vector(args[6])
        results = matrix.products([matrix.row(row) for row in args[1:5]], [vector])
        return context.make_tuple(builder, signature.return_type, results)

    return signature, codegen


@intrinsic
def add_part4(typingctx, out, token, weights, row0, row1, row2, row3, c0, c1, c2, c3, part):
    """`add_scaled4` of part `part` of the columns, which alone out (T, PART_COLUMNS) holds."""
    ids, scales = (types.int64,) * 4, (types.float32,) * 4
    signature = types.void(out, types.int64, weights, *ids, *scales, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = Weights(context, builder, weights, args[2])
        target = row_pointer(context, builder, out, args[0], args[1])
        rows = [matrix.row(row) for row in args[3:7]]
        matrix.add_part(target, rows, list(args[7:11]), args[11])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def add_part1(typingctx, out, token, weights, row, scale, part):
    """`add_part4` for one row."""
    signature = types.void(out, types.int64, weights, types.int64, types.float32, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = Weights(context, builder, weights, args[2])
        target = row_pointer(context, builder, out, args[0], args[1])
        matrix.add_part(target, [matrix.row(args[3])], [args[4]], args[5])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def prefetch_row(typingctx, weights, row):
    """Ask for the first lines of weights[row], and of each 4 KiB page in it.

    A jump there then costs less: the hardware's prefetcher starts early, and ends with a page.
    """
    signature = types.void(weights, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = Weights(context, builder, weights, args[0])
        start = matrix.pointer(args[1])

        def first_lines(index: Any) -> None:
            for line in range(LINES_AHEAD):
                prefetch_line(builder, item_pointer(builder, start, index, 1), line * LINE_BYTES)

        address = builder.ptrtoint(start, I64)
        next_page = builder.sub(I64(PAGE_BYTES), builder.and_(address, I64(PAGE_BYTES - 1)))
        first_lines(I64(0))
        counted_loop(builder, next_page, matrix.row_bytes, PAGE_BYTES, first_lines)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def prefetch_part(typingctx, weights, row, part):
    """Ask for all lines of weights[row] in part `part` of its columns."""
    signature = types.void(weights, types.int64, types.int64)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = Weights(context, builder, weights, args[0])
        part_bytes = PART_COLUMNS * (matrix.bits or weights.dtype.bitwidth) // 8
        start = builder.mul(args[2], I64(part_bytes))
        left = builder.sub(matrix.row_bytes, start)
        whole = builder.icmp_signed("<", I64(part_bytes), left)
        length = builder.select(whole, I64(part_bytes), left)
        at = item_pointer(builder, matrix.pointer(args[1]), start, 1)

        def line(index: Any) -> None:
            prefetch_line(builder, item_pointer(builder, at, index, 1), 0)

        counted_loop(builder, I64(0), length, LINE_BYTES, line)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def quantize_vector(typingctx, x, token, into):
    """into[token] = x[token] quantized; x (T, d) float32, into QuantizedVectors."""
    signature = types.void(x, types.int64, into)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = builder.extract_value(context.make_array(x)(context, builder, args[0]).shape, 1)
        source = row_pointer(context, builder, x, args[0], args[1])
        target = Vectors(context, builder, into, args[2]).vector(args[1])
        assert isinstance(target, Vector)
        emit_quantize(Ptr(builder, source), target, Vec(builder, width) // QUANT_GROUP)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def widen_row(typingctx, weights, row, out):
    """out[:] = weights[row], out (d,) int16 (nearest bfloat16, ties to even) or float32."""
    signature = types.void(weights, types.int64, out)
    to_bfloat16 = out.dtype == types.int16

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrix = Weights(context, builder, weights, args[0])
        pointer, _ = vector_pointer(context, builder, out, args[2])
        row = matrix.row(args[1])
        if matrix.bits:
            out_at = Ptr(builder, pointer)
            emit_widened(matrix.bits, row, Vec(builder, matrix.groups), out_at, to_bfloat16)
        else:
            _emit_float_row(builder, weights.dtype, row, matrix.width, pointer, to_bfloat16)
        return context.get_dummy_value()

    return signature, codegen


def _emit_float_row(
    builder: Any, dtype: Any, row: Any, length: Any, out: Any, to_bfloat16: bool
) -> None:
    def convert(index: Any, lanes: int) -> None:
        at = item_pointer(builder, row, index, dtype.bitwidth // 8)
        values = widen(builder, dtype, at, lanes)
        if to_bfloat16:
            values = round_to_bfloat16(builder, values)
        item_bytes = 2 if to_bfloat16 else 4
        target = item_pointer(builder, out, index, item_bytes)
        builder.store(values, builder.bitcast(target, values.type.as_pointer()), align=item_bytes)

    vectors = whole_steps(builder, length, LANES)
    counted_loop(builder, I64(0), vectors, LANES, lambda index: convert(index, LANES))
    counted_loop(builder, vectors, length, 1, lambda index: convert(index, 1))
