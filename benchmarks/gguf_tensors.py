"""GGUF files tensor by tensor, and hotcold's quantized rows as ggml's blocks."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType

from hotcold.model.errors import UsageError
from hotcold.numba_kernels.formats import CHUNK_GROUPS, Q4, Q8, QUANT_GROUP, SCALE_BYTES

# hotcold's names of formats, with ggml's types of a tensor and of a file.
DTYPES = {
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}
_ROW_DTYPES = {"q8": Q8, "q4": Q4}
_LANE_BYTES = 4  # of one group, at a step


@dataclass(frozen=True)
class GgufTensor:
    """One tensor to write: a matrix (rows, width) in float16, or a float32 vector."""

    name: str
    values: np.ndarray
    dtype: str  # of DTYPES, or f32

    @property
    def kind(self) -> GGMLQuantizationType:
        """ggml's type of it."""
        return GGMLQuantizationType.F32 if self.dtype == "f32" else DTYPES[self.dtype][0]

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        block_items, block_bytes = GGML_QUANT_SIZES[self.kind]
        return self.values.size // block_items * block_bytes

    def data(self) -> np.ndarray:
        """Its bytes in ggml's order."""
        if self.dtype in _ROW_DTYPES:
            return quantized_blocks(self.values, self.dtype)
        return np.ascontiguousarray(self.values)


def matrix(name: str, rows: np.ndarray, dtype: str) -> GgufTensor:
    """A matrix in a format of DTYPES. Errors: UsageError for rows of no whole groups of 32."""
    if dtype in _ROW_DTYPES and rows.shape[1] % QUANT_GROUP:
        raise UsageError(
            f"{name} has rows of {rows.shape[1]} weights, no multiple of {QUANT_GROUP}; compare "
            "this model in f16"
        )
    return GgufTensor(name, rows, dtype)


def vector(name: str, values: np.ndarray) -> GgufTensor:
    """A norm's weights or biases, which llama.cpp keeps in float32."""
    return GgufTensor(name, values.astype(np.float32), "f32")


def write_tensors(
    out: Path,
    arch: str,
    keys: Mapping[str, int | float],
    dtype: str,
    tensors: Callable[[], Iterator[GgufTensor]],
) -> None:
    """Write a GGUF file without a vocabulary, whole or not at all.

    `tensors` is asked twice, for the header and then for the weights, so that no more than one
    tensor is held at a time. `keys` stand under `arch`.
    """
    part = out.with_name(f"{out.name}.part")
    writer = GGUFWriter(str(part), arch)
    for key, value in keys.items():
        if isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        else:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_file_type(DTYPES[dtype][1])
    writer.add_tokenizer_model("no_vocab")
    for each in tensors():
        writer.add_tensor_info(
            each.name, each.values.shape, each.values.dtype, each.num_bytes, raw_dtype=each.kind
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for each in tensors():
            writer.write_tensor_data(each.data())
        writer.close()
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def quantized_blocks(weights: np.ndarray, dtype: str) -> np.ndarray:
    """Weights as ggml's blocks, holding what hotcold quantizes them to.

    Shapes:  weights (rows, width); the result (rows, width / 32 * bytes of a block)
    Dtypes:  weights float16; the result uint8
    """
    from hotcold.numba_kernels.load.quantize import quantize_rows

    bits = np.ascontiguousarray(weights).view(np.uint16)
    return ggml_blocks(quantize_rows(bits, _ROW_DTYPES[dtype]))


def ggml_blocks(rows: np.ndarray) -> np.ndarray:
    """hotcold's quantized rows as ggml's Q8_0 or Q4_0 blocks of the same values and scales.

    A block is its scale, then its values in order; of Q4_0, byte k has value k below and k + 16
    above.
    Shapes:  rows (N, bytes of a row); the result too
    Dtypes:  rows Q8 or Q4; the result uint8
    Source:  numba_kernels/formats.py; ggml-common.h, block_q8_0 and block_q4_0
    """
    dtype, items = rows.dtype, rows.view(np.uint8)
    value_bytes = QUANT_GROUP if dtype == Q8 else QUANT_GROUP // 2
    num_groups = items.shape[1] // (value_bytes + SCALE_BYTES)
    values, scales = np.split(items, [num_groups * value_bytes], axis=1)
    full = num_groups // CHUNK_GROUPS * CHUNK_GROUPS
    parts = np.split(values, [full * value_bytes], axis=1)
    groups = np.concatenate(
        [
            _groups(parts[0], CHUNK_GROUPS, value_bytes),
            _groups(parts[1], num_groups - full, value_bytes),
        ],
        axis=1,
    )
    if dtype == Q4:
        groups = _ggml_nibbles(groups)
    scales = scales.reshape(len(items), num_groups, SCALE_BYTES)
    return np.concatenate([scales, groups], axis=2).reshape(len(items), -1)


def _groups(chunks: np.ndarray, chunk_groups: int, value_bytes: int) -> np.ndarray:
    """Chunks of so many groups each, which go step by step, as (rows, groups, bytes of one)."""
    if chunks.shape[1] == 0:
        return np.empty((len(chunks), 0, value_bytes), np.uint8)
    steps = value_bytes // _LANE_BYTES
    by_step = chunks.reshape(len(chunks), -1, steps, chunk_groups, _LANE_BYTES)
    return by_step.swapaxes(2, 3).reshape(len(chunks), -1, value_bytes)


def _ggml_nibbles(groups: np.ndarray) -> np.ndarray:
    """Of each four bytes the low nibbles are four values, the high ones the next four."""
    fours = groups.reshape(*groups.shape[:2], -1, 1, _LANE_BYTES)
    values = np.concatenate([fours & 15, fours >> 4], axis=3).reshape(
        *groups.shape[:2], QUANT_GROUP
    )
    return values[..., : QUANT_GROUP // 2] | values[..., QUANT_GROUP // 2 :] << 4
