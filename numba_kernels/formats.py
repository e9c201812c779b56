"""Formats of weights, told apart by the dtype of the arrays that hold them.

float32 is itself, uint16 holds float16 bits and int16 bfloat16 bits, one item a weight. `Q8` and
`Q4` hold bytes of quantized rows: a row's weights stand in groups of 32 that share one scale.

    weight = scale * value     Q8: value int8 in -127..127, Q4: value = nibble - 8, nibble 0..15

A row is its values, then its scales (float16, one a group, little-endian). Values stand in chunks
of 16 groups (the last may have fewer, g), step by step: step j of a chunk holds four bytes of group
0, four of group 1, and so on, so that a vector of 16 32-bit lanes has one group in each lane.

    Q8: 8 steps; byte b of step j is value 4 j + b of its group
    Q4: 4 steps; byte b of step j holds value 8 j + b in its low and 8 j + 4 + b in its high nibble

So a chunk's integer products add up lane by lane, and its scales are one vector too.
"""

import numpy as np

QUANT_GROUP = 32  # weights that share a scale
CHUNK_GROUPS = 16
CHUNK = QUANT_GROUP * CHUNK_GROUPS
SCALE_BYTES = 2

Q8 = np.dtype([("q8", np.uint8)])
Q4 = np.dtype([("q4", np.uint8)])
QUANTIZED = (Q8, Q4)
FLOATS = (np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.int16))


def is_quantized(dtype: np.dtype) -> bool:
    """Whether arrays of this dtype hold bytes of quantized rows."""
    return dtype in QUANTIZED


def row_items(dtype: np.dtype, width: int) -> int:
    """Items of an array of this dtype that a row of `width` weights takes: its second dimension.

    Errors:  ValueError for a quantized row whose width is no multiple of 32, and for another dtype
    """
    if dtype in FLOATS:
        return width
    if dtype not in QUANTIZED:
        raise ValueError(f"no weights have dtype {dtype}")
    if width % QUANT_GROUP:
        raise ValueError(f"rows of {width} weights have no whole groups of {QUANT_GROUP}")
    value_bytes = width if dtype == Q8 else width // 2
    return value_bytes + width // QUANT_GROUP * SCALE_BYTES


def row_width(dtype: np.dtype, num_items: int) -> int:
    """Weights of a row of so many items; the inverse of `row_items`.

    Errors:  ValueError for a number of bytes that no row has
    """
    if dtype in FLOATS:
        return num_items
    bytes_a_group = row_items(dtype, QUANT_GROUP)
    if num_items % bytes_a_group:
        raise ValueError(f"{num_items} bytes are no row of groups of {bytes_a_group}")
    return num_items // bytes_a_group * QUANT_GROUP
