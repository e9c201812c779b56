"""Weight matrices on a device, in the formats of `numba_kernels.formats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hotcold.numba_kernels import formats

FORMATS = {kind.short: dtype for dtype, kind in formats.FORMATS.items()}
ITEM_BYTES = {kind.short: dtype.itemsize for dtype, kind in formats.FLOAT_FORMATS.items()}


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
    if weight_format not in FORMATS:
        raise ValueError(f"no weights have format {weight_format!r}; there are {tuple(FORMATS)}")
    dtype = FORMATS[weight_format]
    return formats.row_items(dtype, width) * dtype.itemsize
