"""Weight matrices on a device, in the formats of `numba_kernels.formats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hotcold.numba_kernels import formats

FORMATS = {kind.short: dtype for dtype, kind in formats.FORMATS.items()}
ITEM_BYTES = {kind.short: dtype.itemsize for dtype, kind in formats.FLOAT_FORMATS.items()}
PIECE_BYTES = 16  # that a lane reads at once
# Of so many weights the parts of a quantized row are aligned to pieces within it.
ALIGNED_WIDTH = 8 * formats.QUANT_GROUP


@dataclass(frozen=True)
class DeviceMatrix:
    """Rows of weights, C-contiguous on a device, with the same bytes as on the host.

    data (N, items) is float32 for f32, uint16 (float16 bits) for f16, int16 (bfloat16 bits) for
    bf16, uint8 (bytes of rows) for quantized formats, where unused bytes may follow a row's own
    (`padded_items`). width counts weights.
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
        return int(self.data.shape[1]) * int(self.data.itemsize)

    @property
    def content(self) -> Any:
        """`data` without what is unused."""
        return self.data[:, : formats.row_items(FORMATS[self.format], self.width)]


def padded_items(dtype: np.dtype, items: int) -> int:
    """Items from one row to the next on a device, of rows of `items`.

    Quantized rows that could be read in whole pieces are padded to a multiple of them: of Q6 and
    MXFP4 those of 256 weights have 210 and 136 bytes. Others stay as they are.
    """
    if not formats.is_quantized(dtype) or formats.row_width(dtype, items) % ALIGNED_WIDTH:
        return items
    return -(-items // PIECE_BYTES) * PIECE_BYTES


def row_bytes(weight_format: str, width: int) -> int:
    """Bytes of a row of `width` weights.

    Errors:  ValueError for an unknown format, and a quantized row without whole blocks
    """
    if weight_format not in FORMATS:
        raise ValueError(f"no weights have format {weight_format!r}; there are {tuple(FORMATS)}")
    dtype = FORMATS[weight_format]
    return formats.row_items(dtype, width) * dtype.itemsize
