"""Formats of weights, identified by the dtype of the arrays that hold them.

float32 is itself, uint16 holds float16 bits and int16 bfloat16 bits, one item a weight. `Q8`, `Q4`,
`Q4_1`, `Q4_K`, `Q5`, `Q5_K`, `Q6`, `Q3_K`, `MXFP4`, `NVFP4`, `IQ4_NL`, `IQ4_XS`, `IQ3_S`,
`IQ3_XXS`, `IQ2` and `NF4` hold bytes of quantized rows: groups of 32 weights share a scale, in Q6,
Q3_K, NVFP4 and IQ2 halves of such groups.

    Q8:   weight = scale * value           value int8
    Q4:   weight = scale * (nibble - 8)    nibble 0..15
    Q4_1: weight = scale * nibble + minimum
    Q4_K: weight = block's scale * group's scale * nibble + block's minimum * group's minimum
          group's scale and minimum 0..63
    Q5:   weight = scale * (value - 16)    value 0..31
    Q5_K: as Q4_K, of values 0..31
    Q6:   weight = block's scale * half's scale * (value - 32)    value 0..63, half's scale int8
    Q3_K: as Q6, of Q3_VALUES[nibble]
    MXFP4: weight = 2 ^ (exponent - 128) * E2M1_VALUES[nibble]    exponent 0..252
    NVFP4: weight = block's scale * half's scale * E2M1_VALUES[nibble] / 2    half's scale E4M3
    IQ4_NL: weight = scale * IQ4_VALUES[nibble]
    IQ4_XS: weight = block's scale * group's scale * IQ4_VALUES[nibble]    group's scale int8
    IQ3_S: as IQ4_XS, of IQ3_S_VALUES
    IQ3_XXS: as IQ4_XS, of IQ3_XXS_VALUES, all times 1/4
    IQ2:  weight = block's scale * half's scale * IQ2_VALUES[nibble] / 8    half's scale int8
    NF4:  weight = scale * NF4_VALUES[nibble]

These are the numbers that ggml's types of these names hold, and Q8_0, Q4_0, Q5_0 and Q6_K; Q4 holds
those of TQ1_0, TQ2_0, Q1_0 and Q2_0, too, and IQ2 those of all IQ2 and IQ1 types. A row is its
values, then its scales (float16, one a group, little-endian), then in Q4_1 its minima (the same);
in MXFP4 its exponents, a byte a group. Those above 252 stand for NaN or may be infinite.

In Q4_K, Q5_K, Q6 and what has int8 scales blocks of 8 groups share float16 numbers at the end of
the row: each block's scale, and in Q4_K and Q5_K its minimum. So a row is a multiple of 256
weights. In NVFP4 blocks are 2 groups and have a float32. Between the values and these, IQ4_XS,
IQ3_S and IQ3_XXS have an int8 scale for each group. Chunk by chunk, Q6, Q3_K and IQ2 have the int8
scales of first halves, then of second ones, NVFP4 those of E4M3, without a sign; Q4_K and
Q5_K have a byte for each of g groups with the low nibbles of its scale and, high, of its minimum,
then g / 2 bytes: the upper two bits of both for group i, and above them those of group i + g / 2.
Rows of blocks, of 5 bits or of IQ4_NL are not added up, so no down projection has them.

Values are in chunks of 16 groups (the last may have fewer, g), step by step: step j of a chunk
holds four bytes of group 0, four of group 1, and so on, so that a vector of 16 32-bit lanes has one
group in each lane.

    8 bits: 8 steps; byte b of step j is value 4 j + b of its group
    4 bits: 4 steps; byte b of step j holds value 8 j + b in its low and 8 j + 4 + b in its high
            nibble, where halves have scales 4 j + b and 16 + 4 j + b; of formats with values the
            number of one
    5 bits: 5 steps; four as of 4 bits, then a byte b of step 4 that holds in bit i the upper bit of
            value 4 i + b
    6 bits: 6 steps; byte b of step j < 4 holds the low nibbles of values 4 j + b and, high,
            16 + 4 j + b; step 4 + j % 2 holds their upper two bits in byte b: from bit
            4 (j // 2) on those of 4 j + b, then those of 16 + 4 j + b

So a chunk's integer products add up lane by lane, and its scales are one vector too.

Rows of GGUF files are blocks of ggml's formats, `BLOCK_FORMATS`. They are converted to one of the
formats above when they are loaded.

`FORMATS` is the one table of all that is known of them: kernels, CUDA's header, readers of files,
sizes and plans look there. What reads and writes the bytes is found by a row's `codes` and
`factors`: `numba_kernels.ir.codes`, `numba_kernels.ir.factors`, `cuda_kernels/csrc/formats.cuh`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

WeightDtype = Literal[
    "float32", "float16", "bfloat16", "q8", "q6", "q5", "q5_k", "q4_1", "q4_k", "q4", "q3_k",
    "mxfp4", "nvfp4", "iq4_nl", "iq4_xs", "iq3_s", "iq3_xxs", "iq2", "nf4",
]  # fmt: skip
QUANT_GROUP = 32  # weights that share a scale
CHUNK_GROUPS = 16
CHUNK = QUANT_GROUP * CHUNK_GROUPS
SCALE_BYTES = 2


class FloatFormat(NamedTuple):
    """A format of one item a weight, its bits."""

    name: WeightDtype
    short: str  # in --dtype, in CUDA's sources; in safetensors, in capitals
    bits: int
    exponent: int  # its bits, which infinity and NaN have all set
    ggml_type: int


class Codes(NamedTuple):
    """How whole numbers of `bits` bits lie in a chunk, and what each stands for if not itself.

    Values are int8 numbers but -128, 16 of them.
    """

    name: str
    bits: int
    values: tuple[int, ...] = ()


class Factors(NamedTuple):
    """What codes are multiplied with, and what is added.

    A group's scale and minimum are float16; or, in blocks of several groups, small integers that
    are multiplied with the block's float16; or a scale is a power of two, its exponent a byte; or
    small floats are multiplied with the block's float32, which counts as two float16.
    """

    name: str
    num_float16: int  # of a block, which end a row
    has_min: bool = False
    block_groups: int = 1  # a row has whole blocks
    group_bits: int = 0  # of a group's small integers
    has_halves: bool = False  # each half of a group has its own scale


BYTES, NIBBLES = Codes("bytes", 8), Codes("nibbles", 4)
FIFTHS, PAIRS = Codes("fifths", 5), Codes("pairs", 6)  # nibbles, and what stands above them
# Numbers of one sign, two exponent and one mantissa bit, twice as large, so that they are whole.
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
E2M1 = Codes("e2m1", 4, E2M1_VALUES)
# ggml-common.h, kvalues_iq4nl; magnitudes in iq3s_grid, in iq3xxs_grid, in iq2s_grid, and what
# iq1s_grid holds, eight times as large, plus one and minus one.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ3_S_VALUES = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
IQ3_XXS_VALUES = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
IQ2_VALUES = (8, 25, 43, -8, -25, -43, -7, 1, 9, -9, -1, 7, 0, 0, 0, 0)
# 127 times bitsandbytes' values, rounded.
NF4_VALUES = (-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127)
NF4_CODES = Codes("nf4", 4, NF4_VALUES)
Q3_VALUES = (*range(-4, 4), *[0] * 8)
Q3_CODES, IQ4, IQ3_S_CODES = (
    Codes("q3", 4, Q3_VALUES), Codes("iq4", 4, IQ4_VALUES), Codes("iq3_s", 4, IQ3_S_VALUES),
)  # fmt: skip
IQ3_XXS_CODES, IQ2_CODES = Codes("iq3_xxs", 4, IQ3_XXS_VALUES), Codes("iq2", 4, IQ2_VALUES)
SCALES, MINIMA = Factors("scales", 1), Factors("minima", 2, has_min=True)
SIX_BITS = Factors("six_bits", 2, has_min=True, block_groups=8, group_bits=2 * 6)
HALVES = Factors("halves", 1, block_groups=8, group_bits=2 * 8, has_halves=True)
EXPONENTS = Factors("exponents", 0, group_bits=8)
E4M3S = Factors("e4m3s", 2, block_groups=2, group_bits=2 * 8, has_halves=True)
INT8S = Factors("int8s", 1, block_groups=8, group_bits=8)
MAX_EXPONENT = 252  # with which every weight is a float32


class RowFormat(NamedTuple):
    """How a quantized row stores its weights: weight = scale * (code - offset), plus a minimum."""

    name: WeightDtype
    codes: Codes
    factors: Factors
    offset: int = 0
    summed_as: WeightDtype | None = None  # of down rows, where kernels cannot add rows up
    version: int = 0  # of what `hotcold quantize` writes; 0: only GGUF files have it
    unit: float = 1.0  # of small scales, a power of two

    @property
    def short(self) -> str:
        """Its name in --dtype, and in CUDA's sources."""
        return self.name

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.codes.bits

    @property
    def has_min(self) -> bool:
        """Whether a minimum is added, for which dot products need sums of activations."""
        return self.factors.has_min

    @property
    def has_halves(self) -> bool:
        """Whether each half of a group has its own scale."""
        return self.factors.has_halves

    @property
    def is_plain(self) -> bool:
        """Whether codes are bytes or nibbles, and factors float16: nothing takes long to unpack."""
        return self.codes in (BYTES, NIBBLES) and self.factors in (SCALES, MINIMA)

    @property
    def is_summed(self) -> bool:
        """Whether kernels can add up rows, as down projections do."""
        return self.summed_as is None

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a whole chunk's codes."""
        return CHUNK * self.bits // 8

    @property
    def block_groups(self) -> int:
        """Groups of a block."""
        return self.factors.block_groups

    @property
    def block_weights(self) -> int:
        """Weights of a block: a row has a multiple."""
        return QUANT_GROUP * self.block_groups

    @property
    def group_factor_bytes(self) -> int:
        """Bytes of a block's small integers."""
        return self.block_groups * self.factors.group_bits // 8

    @property
    def factor_bytes(self) -> int:
        """Bytes of the float16 numbers of a block, which end a row."""
        return SCALE_BYTES * self.factors.num_float16

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        codes = self.block_weights * self.bits // 8
        return codes + self.group_factor_bytes + self.factor_bytes


FLOAT_FORMATS: dict[np.dtype, FloatFormat] = {
    np.dtype(np.float32): FloatFormat("float32", "f32", 32, 0x7F800000, 0),
    np.dtype(np.uint16): FloatFormat("float16", "f16", 16, 0x7C00, 1),
    np.dtype(np.int16): FloatFormat("bfloat16", "bf16", 16, 0x7F80, 30),
}
ROW_FORMATS: dict[np.dtype, RowFormat] = {
    np.dtype([(row.name, np.uint8)]): row
    for row in (
        RowFormat("q8", BYTES, SCALES, version=1),
        RowFormat("q4", NIBBLES, SCALES, offset=8, version=1),
        RowFormat("q4_1", NIBBLES, MINIMA, version=2),
        RowFormat("q4_k", NIBBLES, SIX_BITS, summed_as="q4_1"),
        RowFormat("q5", FIFTHS, SCALES, offset=16, summed_as="q8"),
        RowFormat("q5_k", FIFTHS, SIX_BITS, summed_as="q8"),
        RowFormat("q6", PAIRS, HALVES, offset=32, summed_as="q8"),
        RowFormat("q3_k", Q3_CODES, HALVES, summed_as="q8"),
        RowFormat("mxfp4", E2M1, EXPONENTS, version=3),
        RowFormat("nvfp4", E2M1, E4M3S, summed_as="q8", unit=1 / 2),
        RowFormat("iq4_nl", IQ4, SCALES, summed_as="q8"),
        RowFormat("iq4_xs", IQ4, INT8S, summed_as="q8"),
        RowFormat("iq3_s", IQ3_S_CODES, INT8S, summed_as="q8"),
        RowFormat("iq3_xxs", IQ3_XXS_CODES, INT8S, summed_as="q8", unit=1 / 4),
        RowFormat("iq2", IQ2_CODES, HALVES, summed_as="q8", unit=1 / 8),
        RowFormat("nf4", NF4_CODES, SCALES, summed_as="q8"),
    )
}
QUANTIZED = tuple(ROW_FORMATS)
Q8, Q4, Q4_1, Q4_K, Q5, Q5_K, Q6, Q3_K, MXFP4, NVFP4, *_LAST = QUANTIZED
IQ4_NL, IQ4_XS, IQ3_S, IQ3_XXS, IQ2, NF4 = _LAST
FLOATS = tuple(FLOAT_FORMATS)
FORMATS: dict[np.dtype, FloatFormat | RowFormat] = {**FLOAT_FORMATS, **ROW_FORMATS}
DTYPES: dict[WeightDtype, np.dtype] = {kind.name: dtype for dtype, kind in FORMATS.items()}
# What weights are quantized to, the most precise first.
QUANTIZED_TO = sorted(
    (row for row in ROW_FORMATS.values() if row.version),
    key=lambda row: -row.block_bytes / row.block_weights,
)


class BlockFormat(NamedTuple):
    """A block of one of ggml's formats: its weights and bytes (ggml-common.h)."""

    name: str
    ggml_type: int  # and kernels' code
    weights: int
    num_bytes: int
    exact: tuple[np.dtype, ...] = ()  # formats of rows that hold its codes and factors to the bit
    rounded: tuple[np.dtype, ...] = ()  # those that hold its codes, and factors as float16

    @property
    def loaded_as(self) -> np.dtype:
        """What rows become in memory. Columns, and other rows, are quantized again, to 8 bits."""
        return self.exact[0] if self.exact else Q8

    def is_as_stored(self, dtype: np.dtype) -> bool:
        """Whether rows of `dtype` hold the block's codes, in no more bits."""
        is_held = dtype in (*self.exact, *self.rounded)
        return is_held and ROW_FORMATS[dtype].bits <= 8 * self.num_bytes // self.weights


BLOCK_FORMATS: dict[np.dtype, BlockFormat] = {
    np.dtype([(block.name, np.uint8)]): block
    for block in (
        BlockFormat("Q4_0", 2, 32, 18, (Q4, Q8)),
        BlockFormat("Q4_1", 3, 32, 20, (Q4_1,)),
        BlockFormat("Q5_0", 6, 32, 22, (Q5, Q8)),
        BlockFormat("Q5_1", 7, 32, 24),
        BlockFormat("Q8_0", 8, 32, 34, (Q8,)),
        BlockFormat("Q2_K", 10, 256, 84),
        BlockFormat("Q3_K", 11, 256, 110, (Q3_K,)),
        BlockFormat("Q4_K", 12, 256, 144, (Q4_K,), (Q4_1,)),
        BlockFormat("Q5_K", 13, 256, 176, (Q5_K,)),
        BlockFormat("Q6_K", 14, 256, 210, (Q6,)),
        BlockFormat("IQ2_XXS", 16, 256, 66, (IQ2,)),
        BlockFormat("IQ2_XS", 17, 256, 74, (IQ2,)),
        BlockFormat("IQ3_XXS", 18, 256, 98, (IQ3_XXS,)),
        BlockFormat("IQ1_S", 19, 256, 50, (IQ2,)),
        BlockFormat("IQ4_NL", 20, 32, 18, (IQ4_NL, Q8)),
        BlockFormat("IQ3_S", 21, 256, 110, (IQ3_S,)),
        BlockFormat("IQ2_S", 22, 256, 82, (IQ2,)),
        BlockFormat("IQ4_XS", 23, 256, 136, (IQ4_XS,)),
        BlockFormat("IQ1_M", 29, 256, 56, (IQ2,)),
        BlockFormat("TQ1_0", 34, 256, 54, (Q4,)),
        BlockFormat("TQ2_0", 35, 256, 66, (Q4,)),
        BlockFormat("MXFP4", 39, 32, 17, (MXFP4,)),
        BlockFormat("NVFP4", 40, 64, 36, (NVFP4,)),
        BlockFormat("Q1_0", 41, 128, 18, (Q4,)),
        BlockFormat("Q2_0", 42, 64, 18, (Q4,)),
    )
}
# What rows of other packings become on their way, no types of ggml's: a float16 scale and 32 int8
# numbers in -8..7, -16..15 or -128..127, or those of NF4's values, laid out as Q8_0; or 32 float32
# values; or a block of NVFP4 and its tensor's scale, float32.
UNPACKED_FORMATS: dict[np.dtype, BlockFormat] = {
    np.dtype([(block.name, np.uint8)]): block
    for block in (
        BlockFormat("INT4", 8, 32, 34, (Q4, Q8)),
        BlockFormat("INT5", 8, 32, 34, (Q5, Q8)),
        BlockFormat("INT8", 8, 32, 34, (Q8,)),
        BlockFormat("VALUES", 0, 32, 128),
        BlockFormat("NVFP4_SCALED", 40, 64, 40, (NVFP4,)),
        BlockFormat("NF4_NUMBERS", 24, 32, 34, (NF4,)),
    )
}
INT4, INT5, INT8, VALUES, NVFP4_SCALED, NF4_NUMBERS = UNPACKED_FORMATS
BLOCK_FORMATS |= UNPACKED_FORMATS


def summed_dtype(dtype: np.dtype) -> np.dtype:
    """The format of down rows whose matrix would be in `dtype`: itself where rows are added up."""
    row_format = ROW_FORMATS.get(dtype)
    if row_format is None or row_format.summed_as is None:
        return dtype
    return DTYPES[row_format.summed_as]


def block_dtype(name: str) -> np.dtype:
    """The dtype of arrays that hold bytes of ggml's blocks. Errors: KeyError for no such format."""
    return {block.name: dtype for dtype, block in BLOCK_FORMATS.items()}[name]


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
