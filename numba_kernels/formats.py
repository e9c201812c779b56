"""Formats of weights, identified by the dtype of the arrays that hold them.

float32 is itself, uint16 holds float16 bits and int16 bfloat16 bits, one item a weight. `Q8`, `Q4`,
`Q4_1`, `Q4_K`, `Q5`, `Q5_K` and `Q6` hold bytes of quantized rows: groups of 32 weights share a
scale, in Q6 halves of such groups.

    Q8:   weight = scale * value           value int8 in -127..127
    Q4:   weight = scale * (nibble - 8)    nibble 0..15
    Q4_1: weight = scale * nibble + minimum
    Q4_K: weight = block's scale * group's scale * nibble + block's minimum * group's minimum
          group's scale and minimum 0..63
    Q5:   weight = scale * (value - 16)    value 0..31
    Q5_K: as Q4_K, of values 0..31
    Q6:   weight = block's scale * half's scale * (value - 32)    value 0..63, half's scale int8

These are the numbers that ggml's Q8_0, Q4_0, Q4_1, Q4_K, Q5_0, Q5_K and Q6_K hold. A row is its
values, then its scales (float16, one a group, little-endian), then in Q4_1 its minima (the same).

In Q4_K, Q5_K and Q6 blocks of 8 groups share float16 numbers at the end of the row: each block's
scale, and in Q4_K and Q5_K its minimum. So a row is a multiple of 256 weights. Between the values
and these, chunk by chunk, Q6 has the int8 scales of first halves, then of second ones; Q4_K and
Q5_K have a byte for each of g groups with the low nibbles of its scale and, high, of its minimum,
then g / 2 bytes: the upper two bits of both for group i, and above them those of group i + g / 2.
Rows of blocks or of 5 bits cannot be added up, so no down projection has them.

Values are in chunks of 16 groups (the last may have fewer, g), step by step: step j of a chunk
holds four bytes of group 0, four of group 1, and so on, so that a vector of 16 32-bit lanes has one
group in each lane.

    8 bits: 8 steps; byte b of step j is value 4 j + b of its group
    4 bits: 4 steps; byte b of step j holds value 8 j + b in its low and 8 j + 4 + b in its high
            nibble
    5 bits: 5 steps; four as of 4 bits, then a byte b of step 4 that holds in bit i the upper bit of
            value 4 i + b
    6 bits: 6 steps; byte b of step j < 4 holds the low nibbles of values 4 j + b and, high,
            16 + 4 j + b; step 4 + j % 2 holds their upper two bits in byte b: from bit
            4 (j // 2) on those of 4 j + b, then those of 16 + 4 j + b

So a chunk's integer products add up lane by lane, and its scales are one vector too.

Rows of GGUF files are blocks of ggml's formats, `BLOCK_FORMATS`. They are converted to one of the
formats above when they are loaded.
"""

from typing import NamedTuple

import numpy as np

QUANT_GROUP = 32  # weights that share a scale
CHUNK_GROUPS = 16
CHUNK = QUANT_GROUP * CHUNK_GROUPS
SCALE_BYTES = 2

Q8 = np.dtype([("q8", np.uint8)])
Q4 = np.dtype([("q4", np.uint8)])
Q4_1 = np.dtype([("q4_1", np.uint8)])
Q4_K = np.dtype([("q4_k", np.uint8)])
Q5 = np.dtype([("q5", np.uint8)])
Q5_K = np.dtype([("q5_k", np.uint8)])
Q6 = np.dtype([("q6", np.uint8)])
FLOATS = (np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.int16))


class RowFormat(NamedTuple):
    """How a quantized row stores its weights: values of `bits` bits, scales, maybe minima.

    A group's scale and minimum are float16; or, in blocks of several groups, small integers that
    are multiplied with the block's float16.
    """

    bits: int
    has_min: bool = False
    block_groups: int = 1  # a row has whole blocks
    group_bits: int = 0  # of a group's small integers
    has_halves: bool = False  # each half of a group has its own scale

    @property
    def in_blocks(self) -> bool:
        """Whether several groups share float16 numbers."""
        return self.block_groups > 1

    @property
    def is_summed(self) -> bool:
        """Whether kernels can add up rows, as down projections do."""
        return self.bits in (4, 8) and not self.in_blocks

    @property
    def block_weights(self) -> int:
        """Weights of a block: a row has a multiple."""
        return QUANT_GROUP * self.block_groups

    @property
    def factor_bytes(self) -> int:
        """Bytes of the float16 numbers of a block, which end a row."""
        return SCALE_BYTES * (1 + self.has_min)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        bits = self.block_groups * (QUANT_GROUP * self.bits + self.group_bits)
        return bits // 8 + self.factor_bytes


ROW_FORMATS: dict[np.dtype, RowFormat] = {
    Q8: RowFormat(8),
    Q4: RowFormat(4),
    Q4_1: RowFormat(4, has_min=True),
    Q4_K: RowFormat(4, has_min=True, block_groups=8, group_bits=2 * 6),
    Q5: RowFormat(5),
    Q5_K: RowFormat(5, has_min=True, block_groups=8, group_bits=2 * 6),
    Q6: RowFormat(6, block_groups=8, group_bits=2 * 8, has_halves=True),
}
QUANTIZED = tuple(ROW_FORMATS)


class BlockFormat(NamedTuple):
    """A block of one of ggml's formats: its weights and bytes (ggml-common.h)."""

    code: int  # for kernels
    weights: int
    num_bytes: int


def _blocks(name: str) -> np.dtype:
    return np.dtype([(name, np.uint8)])


BLOCK_FORMATS: dict[np.dtype, BlockFormat] = {
    _blocks("Q4_0"): BlockFormat(0, 32, 18),
    _blocks("Q4_1"): BlockFormat(1, 32, 20),
    _blocks("Q5_0"): BlockFormat(2, 32, 22),
    _blocks("Q5_1"): BlockFormat(3, 32, 24),
    _blocks("Q8_0"): BlockFormat(4, 32, 34),
    _blocks("Q2_K"): BlockFormat(5, 256, 84),
    _blocks("Q3_K"): BlockFormat(6, 256, 110),
    _blocks("Q4_K"): BlockFormat(7, 256, 144),
    _blocks("Q5_K"): BlockFormat(8, 256, 176),
    _blocks("Q6_K"): BlockFormat(9, 256, 210),
    _blocks("IQ4_NL"): BlockFormat(10, 32, 18),
}


def block_dtype(name: str) -> np.dtype:
    """The dtype of arrays that hold bytes of ggml's blocks. Errors: KeyError for no such format."""
    return {dtype.names[0]: dtype for dtype in BLOCK_FORMATS if dtype.names}[name]


def is_blocks(dtype: np.dtype) -> bool:
    """Whether arrays of this dtype hold rows of ggml's blocks."""
    return dtype in BLOCK_FORMATS


def is_quantized(dtype: np.dtype) -> bool:
    """Whether arrays of this dtype hold bytes of quantized rows."""
    return dtype in QUANTIZED


def row_items(dtype: np.dtype, width: int) -> int:
    """Items of a row of `width` weights in an array of this dtype: its second dimension.

    Errors:  ValueError for a quantized row whose width is no multiple of 32, for a row of no whole
             blocks, and for another dtype
    """
    if dtype in FLOATS:
        return width
    if dtype in BLOCK_FORMATS:
        block = BLOCK_FORMATS[dtype]
        if width % block.weights:
            raise ValueError(f"rows of {width} weights have no whole blocks of {block.weights}")
        return width // block.weights * block.num_bytes
    if dtype not in ROW_FORMATS:
        raise ValueError(f"no weights have dtype {dtype}")
    row_format = ROW_FORMATS[dtype]
    if width % row_format.block_weights:
        raise ValueError(
            f"rows of {width} weights have no whole groups of {row_format.block_weights}"
        )
    return width // row_format.block_weights * row_format.block_bytes


def steps_side_by_side(groups: int, steps: int) -> int:
    """How many steps of a last chunk share a vector of 16 lanes: a power of two.

    The chunk has `groups` groups and `steps` steps, as many as bits. Step i of a vector is in lanes
    i * groups to (i + 1) * groups - 1.
    """
    side = 1
    while 2 * side * groups <= CHUNK_GROUPS and 2 * side <= steps:
        side *= 2
    return side


def whole_chunks(width: int) -> int:
    """`width` rounded up to whole chunks: the length of sums in lane order."""
    return -(-width // CHUNK) * CHUNK


def row_width(dtype: np.dtype, num_items: int) -> int:
    """Weights of a row of `num_items`; the inverse of `row_items`.

    Errors:  ValueError for a number of bytes that no row has
    """
    if dtype in FLOATS:
        return num_items
    if dtype in BLOCK_FORMATS:
        group = BLOCK_FORMATS[dtype].weights
    elif dtype in ROW_FORMATS:
        group = ROW_FORMATS[dtype].block_weights
    else:
        group = QUANT_GROUP
    bytes_a_group = row_items(dtype, group)
    if num_items % bytes_a_group:
        raise ValueError(f"{num_items} bytes are no row of groups of {bytes_a_group}")
    return num_items // bytes_a_group * group
