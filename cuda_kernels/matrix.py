"""Weight matrices on a device, in the formats of `numba_kernels.formats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# In the order of `Format` in csrc/common.cuh.
FORMATS = ("f32", "f16", "bf16", "q8", "q4", "q4_1", "q6", "q4_k", "q5", "q5_k")
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
QUANT_GROUP = 32
# Weights and bytes of a block; a row has whole blocks.
QUANT_BLOCKS = {
    "q8": (32, 34),
    "q4": (32, 18),
    "q4_1": (32, 20),
    "q6": (256, 210),
    "q4_k": (256, 144),
    "q5": (32, 22),
    "q5_k": (256, 176),
}


@dataclass(frozen=True)
class DeviceMatrix:
    """Rows of weights, C-contiguous on a device, with the same bytes as on the host.

    data (N, items) is float32 for f32, uint16 (float16 bits) for f16, int16 (bfloat16 bits) for
    bf16, uint8 (bytes of rows) for quantized formats. width counts weights.
    """

    data: Any
    format: str
    width: int

    @property
    def num_rows(self) -> int:
        """N."""
        return int(self.data.shape[0])

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return row_bytes(self.format, self.width)


def row_bytes(weight_format: str, width: int) -> int:
    """Bytes of a row of `width` weights.

    Errors:  ValueError for an unknown format, and a quantized row without whole blocks
    """
    if weight_format in ITEM_BYTES:
        return ITEM_BYTES[weight_format] * width
    if weight_format not in QUANT_BLOCKS:
        raise ValueError(f"no weights have format {weight_format!r}; there are {FORMATS}")
    weights, num_bytes = QUANT_BLOCKS[weight_format]
    if width % weights:
        raise ValueError(f"rows of {width} weights have no whole groups of {weights}")
    return width // weights * num_bytes
