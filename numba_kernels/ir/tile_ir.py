"""Tiles: weight rows and several tokens multiplied side by side, in LLVM vector IR.

A row is widened once for all tokens of a tile, and a token's vector loaded once for all its rows.
A dot product has the same bits as in `numba_kernels.ir.vector_ir`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hotcold.numba_kernels.formats import CHUNK_GROUPS
from hotcold.numba_kernels.ir.float_ir import FloatPanel, FloatStream
from hotcold.numba_kernels.ir.operands import Vectors, Weights
from hotcold.numba_kernels.ir.quantized_ir import format_of
from hotcold.numba_kernels.ir.target import has_feature, vnni_lanes
from hotcold.numba_kernels.ir.unpacked_ir import TOKENS, UnpackedRows
from hotcold.numba_kernels.ir.vec import I64, Arguments, Ptr, Vec, codegen_of

NEVER = 1 << 30  # so many tokens
# Of plain quantized rows without AVX-512: the fewest tokens that are worth unpacking rows for.
# Without VNNI fewer are where rows are shorter than this and end with a part of a chunk.
_FEWEST_PLAIN, _SHORT_GROUPS = 8, 3 * CHUNK_GROUPS
_MAX_TOKEN_BYTES = 1 << 14  # of vectors that stay in the first-level cache beside rows: half of it


@dataclass(frozen=True)
class Tiles:
    """How rows and several tokens are multiplied side by side.

    A tile has as many sums as registers hold beside a column of weights. So many tiles at least are
    read before they are multiplied: their rows stay in the second-level cache. Rows that are
    unpacked for all tokens are so in blocks of `num_tiles`. Fewer tokens than `fewest_tokens` go
    one after the other. docs/decisions.md has the figures.
    """

    num_rows: int
    num_tokens: int
    num_tiles: int
    fewest_tokens: int


# Whether quantized rows are unpacked once for all tokens. AVX-512 unpacks them in each tile: 32
# registers make those large enough.
UNPACKS = not has_feature("avx512f")
# By how many vectors of LANES floats the registers hold: 32 with AVX-512, 8 with AVX2 and NEON.
_TILES = {
    True: (Tiles(6, 4, 4, 2), Tiles(8, 2, 3, 2)),
    False: (Tiles(2, 4, 12, 2), Tiles(6, 2, 1, 4) if vnni_lanes() else Tiles(4, 2, 4, 4)),
}
FLOAT_TILES, QUANTIZED_TILES = _TILES[has_feature("avx512f")]
# Of quantized rows that take long to unpack, so that more tokens share it.
UNPACKED_TILES = QUANTIZED_TILES if UNPACKS else Tiles(4, 4, 6, 2)
# Of a block of float rows, for tokens that four do not divide: as many rows in all.
FLOAT_THREES = Tiles(8, 3, 3, 2) if has_feature("avx512f") else Tiles(3, 3, 8, 2)
# Of as many rows, for two to four tokens that come first and take them from memory: how many rows,
# which have two sums for each token, and of so many vectors how many pairs of blocks stay in the
# first-level cache. Only where it has been measured.
_STREAM_ROWS = 2 if has_feature("avx512f") else 1
_STREAM_PAIRS = {2: 8, 3: 6, 4: 4}
HAS_STREAMS = has_feature("avx2")
# Whether tiles ask for the next block: then only a first one, or few tokens, are a stream.
ASKS_AHEAD = not has_feature("avx512f")

_BIT = ir.IntType(1)
_INDEX = types.int64


def tiles_of(weights: Any) -> Tiles:
    """The tiles of an array's format."""
    row_format = format_of(weights.dtype)
    if not row_format:
        return FLOAT_TILES
    return QUANTIZED_TILES if row_format.is_plain else UNPACKED_TILES


@intrinsic
def tile_shape(typingctx, weights):
    """(rows, tokens, tiles) for weights of this format."""
    tiles = tiles_of(weights)

    def emit(given: Arguments) -> list[Vec]:
        sizes = (tiles.num_rows, tiles.num_tokens, tiles.num_tiles)
        return [Vec.full(given.builder, size, I64) for size in sizes]

    return types.UniTuple(_INDEX, 3)(weights), codegen_of(emit)


@intrinsic
def fewest_tokens(typingctx, weights):
    """Fewer tokens than these are multiplied one after the other, not in tiles.

    A few tokens read rows of plain bytes and nibbles two at a time as fast as rows are unpacked,
    but short rows that end with a part of a chunk.
    """
    tiles, row_format = tiles_of(weights), format_of(weights.dtype)
    is_plain = UNPACKS and row_format is not None and row_format.is_plain

    def emit(given: Arguments) -> Vec:
        fewest = Vec.full(given.builder, tiles.fewest_tokens, I64)
        if not is_plain:
            return fewest
        plain = fewest.like(_FEWEST_PLAIN)
        if vnni_lanes():
            return plain
        groups = Weights(given.array(0)).groups
        is_short = (groups & CHUNK_GROUPS - 1).differs(0) & groups.below(_SHORT_GROUPS)
        return is_short.where(fewest, plain)

    return _INDEX(weights), codegen_of(emit)


@intrinsic
def fit_first_level(typingctx, weights, num_tokens):
    """Whether so many tokens' vectors of floats fit the first-level cache; never quantized ones."""

    def emit(given: Arguments) -> Vec:
        matrix, number = Weights(given.array(0)), given.number(1)
        fit = (matrix.width * number * 4).below(_MAX_TOKEN_BYTES + 1)
        return fit & Vec.full(given.builder, not matrix.format, _BIT)

    return types.boolean(weights, _INDEX), codegen_of(emit)


def _emit_tile(given: Arguments, num_tokens: int) -> None:
    """given: weights, row, x, token, out, column."""
    matrix, vectors, out = Weights(given.array(0)), Vectors(given.arrays(2)), given.array(4)
    first, token, column = given.numbers(1, 3, 5)
    num_rows = tiles_of(matrix).num_rows
    tokens = [token + t for t in range(num_tokens)]
    rows = [matrix.row(first + r) for r in range(num_rows)]
    results = matrix.products(rows, [vectors.vector(token) for token in tokens])
    for (r, token), result in zip(product(range(num_rows), tokens), results, strict=True):
        out.at(token, column + r).store(result)


@intrinsic
def tile_wide(typingctx, weights, row, x, token, out, column):
    """out[token + t, column + r] = weights[row + r] . x[token + t] for a tile of rows and tokens.

    A row is widened once for all tokens and a token's vector loaded once for all rows, so that
    vectors which do not fit the first-level cache do not hold up the multiplication.
    """
    num_tokens = tiles_of(weights).num_tokens
    signature = types.void(weights, _INDEX, x, _INDEX, out, _INDEX)
    return signature, codegen_of(lambda given: _emit_tile(given, num_tokens))


@intrinsic
def tile_narrow(typingctx, weights, row, x, token, out, column):
    """`tile_wide` for one token."""
    signature = types.void(weights, _INDEX, x, _INDEX, out, _INDEX)
    return signature, codegen_of(lambda given: _emit_tile(given, 1))


@intrinsic
def tile_tokens(typingctx, weights, row, x, token, out, column):
    """out[t, column + r] = weights[row + r] . x[t] for a block of quantized rows.

    t goes from `token` on: TOKENS of them, or as many as there are.
    """

    def emit(given: Arguments) -> None:
        matrix, vectors, out = Weights(given.array(0)), Vectors(given.arrays(2)), given.array(4)
        first, token, column = given.numbers(1, 3, 5)
        assert matrix.format
        tiles = tiles_of(matrix)
        rows = UnpackedRows(
            matrix.format,
            lambda r: matrix.row(first + r),
            tiles.num_rows * tiles.num_tiles,
            matrix.groups,
            (tiles.num_rows, tiles.num_tokens),
        )
        rows.emit(
            lambda t: vectors.vector(token + t),
            (out.shape[0] - token).minimum(TOKENS),
            lambda t, r, product: out.at(token + t, column + r).store(product),
        )

    return types.void(weights, _INDEX, x, _INDEX, out, _INDEX), codegen_of(emit)


def _emit_panel(
    given: Arguments, tiles: Tiles, kind: Callable[..., FloatPanel] = FloatPanel
) -> None:
    """given: weights, row, x, token, out, column."""
    matrix, vectors, out = Weights(given.array(0)), Vectors(given.arrays(2)), given.array(4)
    first, token, column = given.numbers(1, 3, 5)
    operands = [vectors.vector(token + t) for t in range(tiles.num_tokens)]

    def row(index: Vec) -> Ptr:
        return matrix.array.at(first + index)

    panel = kind(matrix.dtype, row, operands, tiles.num_rows, tiles.num_tiles)
    panel.emit(matrix.width, lambda r, t, result: out.at(token + t, column + r).store(result))


def _panel(tiles: Tiles) -> Callable[..., Any]:
    """`tile_wide` for all tiles of a block of float rows, by a `FloatPanel`.

    Without AVX-512 calls of `turns` turns, from 0 on, ask for the block behind this one meanwhile.
    The last one of NEVER turns asks for nothing.
    """

    def tile_panel(typingctx, weights, row, x, token, out, column, turn, turns):  # type: ignore[no-untyped-def]
        def emit(given: Arguments) -> None:
            shared = given.numbers(6, 7) if ASKS_AHEAD else ()
            _emit_panel(given, tiles, partial(FloatPanel, turns=shared))

        return types.void(weights, _INDEX, x, _INDEX, out, *(_INDEX,) * 3), codegen_of(emit)

    return tile_panel


tile_panel, tile_panel3 = (intrinsic(_panel(tiles)) for tiles in (FLOAT_TILES, FLOAT_THREES))


def _stream(num_tokens: int) -> Callable[..., Any]:
    """`tile_panel` of the first tokens, for a block that is read from memory meanwhile."""
    num_tiles = FLOAT_TILES.num_rows * FLOAT_TILES.num_tiles // _STREAM_ROWS
    tiles = Tiles(_STREAM_ROWS, num_tokens, num_tiles, 2)
    kind = partial(FloatStream, _STREAM_PAIRS[num_tokens])

    def tile_stream(typingctx, weights, row, x, token, out, column):  # type: ignore[no-untyped-def]
        signature = types.void(weights, _INDEX, x, _INDEX, out, _INDEX)
        return signature, codegen_of(lambda given: _emit_panel(given, tiles, kind))

    return tile_stream


tile_stream2, tile_stream3, tile_stream4 = (intrinsic(_stream(n)) for n in (2, 3, 4))
