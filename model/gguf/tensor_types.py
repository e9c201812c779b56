"""ggml's types of tensors: their size in a file, and their dtypes in memory.

Unsupported types have only a size, for a file's layout to be checked.
Source:  ggml.h, enum ggml_type; ggml-common.h, the blocks
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotcold.numba_kernels.formats import BLOCK_FORMATS, FLOAT_FORMATS, Q8, UNPACKED_FORMATS


@dataclass(frozen=True)
class TensorType:
    """One of ggml's types: rows are blocks of `weights`, each of `num_bytes`."""

    name: str
    weights: int
    num_bytes: int
    dtype: np.dtype | None = None  # of arrays with its bytes; None where unsupported
    loaded: np.dtype | None = None  # of a matrix in memory
    transposed: np.dtype | None = None  # of a transposed matrix in memory

    def items(self, width: int) -> int:
        """Return items of `dtype`, or bytes where unsupported, in a row of `width` weights."""
        num_bytes = width // self.weights * self.num_bytes
        return num_bytes if self.dtype is None else num_bytes // self.dtype.itemsize


TENSOR_TYPES: dict[int, TensorType] = {
    kind.ggml_type: TensorType(kind.short.upper(), 1, dtype.itemsize, dtype, dtype, dtype)
    for dtype, kind in FLOAT_FORMATS.items()
}
# Blocks lie along rows: transposed weights are quantized again, to 8 bits.
TENSOR_TYPES |= {
    block.ggml_type: TensorType(
        block.name, block.weights, block.num_bytes, dtype, block.loaded_as, Q8
    )
    for dtype, block in BLOCK_FORMATS.items()
    if dtype not in UNPACKED_FORMATS
}
# Unsupported.
TENSOR_TYPES |= {
    9: TensorType("Q8_1", 32, 36),
    15: TensorType("Q8_K", 256, 292),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
}
TYPE_OF_NAME = {kind.name: kind for kind in TENSOR_TYPES.values()}
READ_NAMES = tuple(kind.name for kind in TENSOR_TYPES.values() if kind.dtype is not None)
# Types that llama.cpp has removed.
_REPACKED = "which old builds for ARM read, and llama.cpp no longer does"
_REMOVED = {4: "Q4_2", 5: "Q4_3"}
_REMOVED |= {31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
_REMOVED |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}


def about_unknown(code: int) -> str:
    """What a type that is not in TENSOR_TYPES is, and which file to take instead."""
    name = _REMOVED.get(code)
    if name is None:
        return f"type {code}, of a newer llama.cpp; take a file in another format"
    if code < 31:
        return f"type {code} ({name}), which llama.cpp removed in 2023; take a newer file"
    other = "; or it is I2_S, which only BitNet's program reads" if code == 36 else ""
    return f"type {code} ({name}{other}), {_REPACKED}; take the model's Q4_0 file"


def is_read_of_name(quantization: str) -> bool:
    """Whether files of a quantization, as Q4_K_M, hold only types that are read, by its name."""
    is_removed = quantization.startswith(tuple(_REMOVED.values()))
    return quantization.startswith(READ_NAMES) and not is_removed
