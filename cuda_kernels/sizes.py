"""How kernels split their work: tiles of tokens, parts of neurons, splits of positions.

Parts and splits determine the order of additions, so they do not depend on the step's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotcold.cuda_kernels.matrix import (
    ALIGNED_WIDTH,
    FORMATS,
    ITEM_BYTES,
    PIECE_BYTES,
    DeviceMatrix,
)
from hotcold.numba_kernels.formats import ROW_FORMATS

THREADS = 128  # of a block
WARP = 32
SPLIT_POSITIONS = 128
RUN_PARTS = 4
_QUANTIZED_COLUMNS = 16  # of a down row, that a thread sums
_PRODUCT_ROWS = {1: 1, 2: 1, 4: 4, 8: 4}  # of a warp, by its tokens
_DOWN_TILES = {1: (1, 1), 2: (2, 1), 4: (4, 1), 8: (4, 2), 16: (4, 4), 32: (8, 4)}
_MIN_THREADS = 131072  # over parts, for one token: enough to keep a large GPU's memory busy
_MIN_PART, _MAX_PART = 16, 128
_SPREAD_TOKENS = 4  # up to this many tokens a block takes one part, beyond a whole run


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def has_whole_pieces(weights: DeviceMatrix, *addresses: np.uint64) -> bool:
    """Whether rows, and vectors of their width, can be read in aligned pieces of 16 bytes."""
    item_bytes = ITEM_BYTES.get(weights.format)
    whole_width = PIECE_BYTES // item_bytes if item_bytes else ALIGNED_WIDTH
    is_whole = weights.width % whole_width == 0 and weights.row_bytes % PIECE_BYTES == 0
    return is_whole and not any(address % PIECE_BYTES for address in addresses)


@dataclass(frozen=True)
class Tiles:
    """`num_tiles` tiles of `tokens` tokens each, computed side by side in one block."""

    tokens: int
    num_tiles: int


def product_tiles(num_tokens: int, is_vector: bool) -> Tiles:
    """How dot products of rows with vectors split a step's tokens."""
    bucket = _bucket(num_tokens)
    tokens = min(bucket, 8) if is_vector or bucket == 1 else 8
    return Tiles(tokens, max(1, bucket // tokens))


def product_rows_a_block(weight_format: str, tiles: Tiles) -> int:
    """Rows of weights of a block of `product_tiles`."""
    rows = _PRODUCT_ROWS[tiles.tokens] if weight_format in ITEM_BYTES else 2
    return rows * (THREADS // WARP // tiles.num_tiles)


def down_tiles(weight_format: str, num_tokens: int, is_vector: bool) -> Tiles:
    """How sums of down rows split a step's tokens."""
    bucket = _bucket(num_tokens)
    if bucket == 1:
        return Tiles(1, 1)
    if not is_vector:
        return Tiles(4, max(1, bucket // 4))
    if weight_format not in ITEM_BYTES:
        return Tiles(min(bucket, 4), max(1, bucket // 4))
    return Tiles(*_DOWN_TILES[bucket])


def down_columns_a_thread(weight_format: str, is_vector: bool) -> int:
    """Columns of a down row that a thread sums."""
    if weight_format in ITEM_BYTES:
        return PIECE_BYTES // ITEM_BYTES[weight_format]
    return _QUANTIZED_COLUMNS if is_vector else 32 // ROW_FORMATS[FORMATS[weight_format]].bits


@dataclass(frozen=True)
class FfnLayout:
    """Parts of neurons, and the layout of the hot FFN's scratch in items of 4 bytes.

    h (N, T), is_fired (N,) int32, fired_counts (parts,) int32, partials (num_partials, T, d)
    """

    num_tokens: int
    num_neurons: int
    width: int

    @property
    def part_size(self) -> int:
        """Neurons of a part, which are summed one after the other."""
        size = ceil_div(self.num_neurons, _min_parts(self.width))
        return min(max(ceil_div(size, _MIN_PART) * _MIN_PART, _MIN_PART), _MAX_PART)

    @property
    def num_parts(self) -> int:
        """Parts of all neurons."""
        return ceil_div(self.num_neurons, self.part_size)

    @property
    def parts_a_block(self) -> int:
        """One, or for many tokens a run: fewer partial sums, added in the same order."""
        return 1 if self.num_tokens <= _SPREAD_TOKENS else RUN_PARTS

    @property
    def num_partials(self) -> int:
        """Partial sums that are written for each token."""
        return ceil_div(self.num_parts, self.parts_a_block)

    @property
    def offsets(self) -> tuple[int, int, int, int, int]:
        """Offsets of h, is_fired, fired_counts and partials, and the end."""
        sizes = (
            self.num_neurons * self.num_tokens,
            self.num_neurons,
            self.num_parts,
            self.num_partials * self.num_tokens * self.width,
        )
        found = [0]
        for size in sizes:
            found.append(found[-1] + ceil_div(size, 4) * 4)
        return found[0], found[1], found[2], found[3], found[4]


def ffn_scratch_items(num_tokens: int, num_neurons: int, width: int) -> int:
    """Items that `FfnLayout` needs for up to so many tokens and neurons."""
    small = min(ceil_div(num_neurons, _MIN_PART), _min_parts(width))
    num_parts = max(small, ceil_div(num_neurons, _MAX_PART))
    cells = max(
        num_parts * min(num_tokens, _SPREAD_TOKENS), ceil_div(num_parts, RUN_PARTS) * num_tokens
    )
    alignment = 16  # at most four items for each of four parts
    return num_neurons * (num_tokens + 1) + num_parts + cells * width + alignment


def _min_parts(width: int) -> int:
    return ceil_div(_MIN_THREADS, max(1, width // 8))


def attention_lanes(head_dim: int) -> int:
    """Lanes that hold a head."""
    return 8 if head_dim <= 64 else 16 if head_dim <= 128 else 32


def attention_queries(heads_a_group: int) -> int:
    """Query heads of a block, of one key-value head."""
    return 1 if heads_a_group == 1 else 4 if heads_a_group <= 4 else 8


def _bucket(num_tokens: int) -> int:
    """`num_tokens` rounded up to a power of two."""
    return 1 << (num_tokens - 1).bit_length()
