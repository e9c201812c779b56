"""ggml's types of tensors: their size in a file, and their dtypes in memory.

Unsupported types have only a size, for a file's layout to be checked.
Source:  ggml.h, enum ggml_type; ggml-common.h, the blocks
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotcold.numba_kernels.formats import (
    BLOCK_FORMATS,
    Q4,
    Q4_1,
    Q4_K,
    Q5,
    Q5_K,
    Q6,
    Q8,
    block_dtype,
)

_F32, _F16, _BF16 = (np.dtype(kind) for kind in (np.float32, np.uint16, np.int16))


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


def _floats(name: str, dtype: np.dtype) -> TensorType:
    return TensorType(name, 1, dtype.itemsize, dtype, dtype, dtype)


def _blocks(name: str, loaded: np.dtype) -> TensorType:
    """Blocks lie along rows: transposed weights are quantized again, to 8 bits."""
    dtype = block_dtype(name)
    block = BLOCK_FORMATS[dtype]
    return TensorType(name, block.weights, block.num_bytes, dtype, loaded, Q8)


TENSOR_TYPES: dict[int, TensorType] = {
    0: _floats("F32", _F32),
    1: _floats("F16", _F16),
    30: _floats("BF16", _BF16),
    2: _blocks("Q4_0", Q4),
    3: _blocks("Q4_1", Q4_1),
    6: _blocks("Q5_0", Q5),
    7: _blocks("Q5_1", Q8),
    8: _blocks("Q8_0", Q8),
    10: _blocks("Q2_K", Q8),
    11: _blocks("Q3_K", Q8),
    12: _blocks("Q4_K", Q4_K),
    13: _blocks("Q5_K", Q5_K),
    14: _blocks("Q6_K", Q6),
    20: _blocks("IQ4_NL", Q8),
    # Unsupported.
    9: TensorType("Q8_1", 32, 36),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}
TYPE_OF_NAME = {kind.name: kind for kind in TENSOR_TYPES.values()}
READ_NAMES = tuple(kind.name for kind in TENSOR_TYPES.values() if kind.dtype is not None)
