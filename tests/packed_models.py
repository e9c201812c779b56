"""Matrices as quantization methods publish them, beside what each method says they stand for.

Each of `METHODS` makes a matrix of random numbers, packed bit by bit, and its weights in float32.
`make_packed` writes a tiny model with all projections so, and one with these weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from hotcold.numba_kernels.formats import WeightDtype
from tests import tiny_models
from tests.tiny_models import Variant, make_tiny

Tensors = dict[str, torch.Tensor]
Random = np.random.Generator


# Tensors by how their names end, instead of .weight, and the weights (rows, width).
Make = Callable[[Random, int, int], tuple[Tensors, np.ndarray]]
Packing = tuple[dict[str, Any], Make]


class Method(NamedTuple):
    """config.json's quantization_config, and how matrices are packed, shown and held."""

    packing: Packing
    format_name: str
    held: WeightDtype


def pack(numbers: np.ndarray, bits: int, axis: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Numbers of so many bits in words along an axis: of a word's numbers order[i] is the i-th."""
    per_word = 32 // bits
    moved = np.moveaxis(numbers, axis, -1)
    moved = np.pad(moved, [(0, 0), (0, -moved.shape[-1] % per_word)])
    words = np.zeros((moved.shape[0], moved.shape[1] // per_word), np.uint64)
    for place, own in enumerate(order or range(per_word)):
        words |= moved[:, own::per_word].astype(np.uint64) << np.uint64(bits * place)
    words = words.astype(np.uint32).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)))


def pairs(numbers: np.ndarray, high_first: bool = False) -> np.ndarray:
    """Two numbers a byte."""
    low, high = (
        (numbers[:, 1::2], numbers[:, ::2]) if high_first else (numbers[:, ::2], numbers[:, 1::2])
    )
    return (low | high << 4).astype(np.uint8)


def spread(values: np.ndarray, group: int, axis: int = 1) -> np.ndarray:
    """A value for each weight of its group."""
    return np.repeat(values, group, axis)


def some_scales(
    rng: Random, shape: tuple[int, ...], dtype: torch.dtype, size: float
) -> torch.Tensor:
    """Positive ones."""
    return torch.from_numpy(rng.uniform(0.5, 1.0, shape) * size).to(dtype)


def gptq(
    bits: int, is_symmetric: bool, group: int = 32, less: int = 1, acts: bool = False
) -> Packing:
    """AutoGPTQ: qweight (C / 8, R), qzeros (G, R / 8), scales (G, R), g_idx (C,)."""

    def make(rng: Random, rows: int, width: int) -> tuple[Tensors, np.ndarray]:
        size = width if group < 0 else group
        groups, half = width // size, 1 << (bits - 1)
        numbers = rng.integers(0, 2 * half, (rows, width))
        zeros = np.full((rows, groups), half)
        if not is_symmetric:
            zeros = rng.integers(less, 2 * half + less, (rows, groups))
        scales = some_scales(rng, (rows, groups), torch.float16, 0.2 / half)
        index = np.arange(width) // size
        if acts:
            index = rng.permutation(index)
        tensors = {
            ".qweight": pack(numbers, bits, 1).T.contiguous(),
            ".qzeros": pack(zeros - less, bits, 0).T.contiguous(),
            ".scales": scales.T.contiguous(),
            ".g_idx": torch.from_numpy(index.astype(np.int32)),
        }
        weights = scales.float().numpy()[:, index] * (numbers - zeros[:, index]).astype(np.float32)
        return tensors, weights

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": is_symmetric}
    config |= {"desc_act": acts, "checkpoint_format": "gptq" if less else "gptq_v2"}
    return config, make


def awq(group: int) -> Packing:
    """AutoAWQ's gemm: qweight (C, R / 8), qzeros (G, R / 8), scales (G, R)."""

    def make(rng: Random, rows: int, width: int) -> tuple[Tensors, np.ndarray]:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        numbers = rng.integers(0, 16, (rows, width))
        zeros = rng.integers(0, 16, (rows, width // group))
        scales = some_scales(rng, zeros.shape, torch.float16, 0.02)
        tensors = {
            ".qweight": pack(numbers.T, 4, 1, order),
            ".qzeros": pack(zeros.T, 4, 1, order),
            ".scales": scales.T.contiguous(),
        }
        numbers = numbers - spread(zeros, group)
        return tensors, spread(scales.float().numpy(), group) * numbers.astype(np.float32)

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return config | {"version": "gemm"}, make


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' configuration."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
    }


def packed(
    bits: int, group: int, has_zeros: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Packing:
    """compressed-tensors' pack-quantized: signed numbers, 2 ^ (bits - 1) added."""

    def make(rng: Random, rows: int, width: int) -> tuple[Tensors, np.ndarray]:
        size, half = width if group < 0 else group, 1 << (bits - 1)
        numbers = rng.integers(-half, half, (rows, width))
        scales = some_scales(rng, (rows, width // size), dtype, 0.2 / half)
        tensors = {
            ".weight_packed": pack(numbers + half, bits, 1),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor([rows, width]),
        }
        if has_zeros:
            zeros = rng.integers(-half, half, scales.shape)
            tensors[".weight_zero_point"] = pack(zeros + half, bits, 0)
            numbers = numbers - spread(zeros, size)
        return tensors, spread(scales.float().numpy(), size) * numbers.astype(np.float32)

    return compressed("pack-quantized", num_bits=bits, type="int", group_size=group), make


def int8(has_zeros: bool = False) -> Packing:
    """compressed-tensors' int-quantized: a scale for each row."""

    def make(rng: Random, rows: int, width: int) -> tuple[Tensors, np.ndarray]:
        numbers = rng.integers(-128, 128, (rows, width)).astype(np.int8)
        scales = some_scales(rng, (rows, 1), torch.bfloat16, 0.002)
        tensors = {".weight": torch.from_numpy(numbers), ".weight_scale": scales}
        zeros = np.zeros((rows, 1), np.int8)
        if has_zeros:
            zeros = rng.integers(-100, 100, (rows, 1)).astype(np.int8)
            tensors[".weight_zero_point"] = torch.from_numpy(zeros)
        return tensors, scales.float().numpy() * (numbers.astype(np.float32) - zeros)

    return compressed("int-quantized", num_bits=8, type="int", strategy="channel"), make


def float8(
    config: dict[str, Any],
    block: tuple[int, int] | None,
    end: str = "_scale",
    dtype: torch.dtype = torch.float32,
    input_scale: float | None = None,
) -> Packing:
    """Numbers of E4M3 and a scale for each block of rows and columns, a row or all."""

    def make(rng: Random, rows: int, width: int) -> tuple[Tensors, np.ndarray]:
        weights = torch.from_numpy(rng.standard_normal((rows, width)) * 100).to(torch.float8_e4m3fn)
        of_rows, of_columns = block or (rows, width)
        of_columns = width if of_columns < 0 else of_columns
        shape = -(-rows // of_rows), -(-width // of_columns)
        scales = some_scales(rng, shape, torch.float32, 0.001).to(dtype)
        tensors = {".weight": weights, f".weight{end}": scales if block else scales.reshape(())}
        if input_scale is not None:
            tensors[".input_scale"] = torch.tensor(input_scale)
        wide = spread(spread(scales.float().numpy(), of_columns), of_rows, 0)[:rows, :width]
        return tensors, weights.float().numpy() * wide

    return config, make


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def nvfp4(config: dict[str, Any], names: tuple[str, str, str], divides: bool) -> Packing:
    """Pairs of E2M1, a scale of E4M3 for 16, and one for all, which multiplies or divides them."""

    def make(rng: Random, rows: int, width: int) -> tuple[Tensors, np.ndarray]:
        codes = rng.integers(0, 16, (rows, width))
        scales = some_scales(rng, (rows, width // 16), torch.float8_e4m3fn, 400.0)
        of_all = torch.tensor([0.7e4 if divides else 1 / 0.7e4])
        values, scale_name, name_of_all = names
        tensors = {values: torch.from_numpy(pairs(codes)), scale_name: scales, name_of_all: of_all}
        tensors[".input_scale"] = torch.tensor(0.5)
        factors = scales.float() / of_all if divides else scales.float() * of_all
        return tensors, E2M1[codes] * spread(factors.numpy(), 16)

    return config, make


def mxfp4(config: dict[str, Any], names: tuple[str, str]) -> Packing:
    """Pairs of E2M1 and powers of two for 32."""

    def make(rng: Random, rows: int, width: int) -> tuple[Tensors, np.ndarray]:
        codes = rng.integers(0, 16, (rows, width))
        exponents = rng.integers(120, 125, (rows, width // 32), dtype=np.uint8)
        tensors = dict(zip(names, map(torch.from_numpy, (pairs(codes), exponents)), strict=True))
        factors = np.exp2(exponents.astype(np.float32) - 127)
        return tensors, E2M1[codes] * spread(factors, 32)

    return config, make


NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [0.0, 0.0052083333, 0.6666666667, 1.0, 0.3333333333, 0.5, 0.1666666667, 0.25]
FP4 += [-value for value in FP4]


def bits_and_bytes(kind: str, is_nested: bool, size: int = 64) -> Packing:
    """bitsandbytes: blocks of the flat matrix, the first of two numbers in the high nibble."""

    def make(rng: Random, rows: int, width: int) -> tuple[Tensors, np.ndarray]:
        table = torch.tensor(NF4 if kind == "nf4" else FP4)
        codes = rng.integers(0, 16, (rows, width))
        count = -(-rows * width // size)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16"}
        state["shape"] = [rows, width]
        largest = some_scales(rng, (count,), torch.float32, 0.2)
        tensors = {
            ".weight": torch.from_numpy(pairs(codes.reshape(1, -1), True).reshape(-1, 1)),
            ".weight.quant_map": table,
            ".weight.absmax": largest,
        }
        if is_nested:
            numbers = torch.from_numpy(rng.integers(0, 256, count, dtype=np.uint8))
            values = torch.linspace(-1, 1, 256)
            factors = some_scales(rng, (-(-count // 256),), torch.float32, 0.05)
            state |= {"nested_blocksize": 256, "nested_offset": 0.2, "nested_dtype": "float32"}
            tensors |= {
                ".weight.absmax": numbers,
                ".weight.nested_absmax": factors,
                ".weight.nested_quant_map": values,
            }
            largest = values[numbers.long()] * factors.repeat_interleave(256)[:count]
            largest = largest + np.float32(0.2)
        content = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f".weight.quant_state.bitsandbytes__{kind}"] = content
        of_each = np.repeat(largest.numpy(), size)[: rows * width].reshape(rows, width)
        return tensors, table.numpy()[codes] * of_each

    return {"quant_method": "bitsandbytes", "load_in_4bit": True}, make


def llm_int8() -> Packing:
    """bitsandbytes' int8: SCB, the largest of each row, which 127 stands for."""

    def make(rng: Random, rows: int, width: int) -> tuple[Tensors, np.ndarray]:
        numbers = rng.integers(-127, 128, (rows, width)).astype(np.int8)
        # 127 times float16 numbers, which rows hold.
        largest = some_scales(rng, (rows,), torch.float16, 0.002).float() * 127
        tensors = {".weight": torch.from_numpy(numbers), ".SCB": largest}
        tensors[".weight_format"] = torch.tensor(0, dtype=torch.uint8)
        scales = (largest.numpy() * np.float32(1 / 127)).astype(np.float16).astype(np.float32)
        return tensors, scales[:, None] * numbers

    return {"quant_method": "bitsandbytes", "load_in_8bit": True}, make


_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_CT_FP8 = compressed("float-quantized", num_bits=8, type="float")
_CT_NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float")
_CT_MXFP4 = compressed("mxfp4-pack-quantized", num_bits=4, type="float")
_CT_PAIRS = (".weight_packed", ".weight_scale")
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
METHODS: dict[str, Method] = {
    "fp8": Method(float8(_FP8, (128, 128), "_scale_inv"), "FP8", "q8"),
    "fp8-bf16": Method(float8(_FP8, (128, 128), "_scale_inv", torch.bfloat16), "FP8", "q8"),
    "fp8-tensor": Method(float8({"quant_method": "fp8"}, None, "_scale_inv"), "FP8", "q8"),
    "fbgemm": Method(float8({"quant_method": "fbgemm_fp8"}, (1, -1)), "FP8", "q8"),
    "ct-fp8": Method(float8(_CT_FP8, (1, -1), dtype=torch.bfloat16), "FP8", "q8"),
    "ct-fp8-block": Method(float8(_CT_FP8, (128, 128)), "FP8", "q8"),
    "modelopt-fp8": Method(
        float8({"quant_method": "modelopt"}, None, input_scale=0.3), "FP8", "q8"
    ),
    "ct-int4": Method(packed(4, 32), "INT4", "q4"),
    "ct-int4-128": Method(packed(4, 128), "INT4", "q4"),
    "ct-int4-channel": Method(packed(4, -1, dtype=torch.float16), "INT4", "q4"),
    "ct-int4-zeros": Method(packed(4, 64, True), "INT4", "q5"),
    "ct-int4-16": Method(packed(4, 16), "INT4", "q8"),
    "ct-int8-packed": Method(packed(8, 128), "INT8", "q8"),
    "ct-int8-zeros": Method(packed(8, 32, True), "INT8", "q8"),
    "ct-int8": Method(int8(), "INT8", "q8"),
    "ct-int8-asymmetric": Method(int8(True), "INT8", "q8"),
    "ct-nvfp4": Method(
        nvfp4(_CT_NVFP4, (*_CT_PAIRS, ".weight_global_scale"), True), "NVFP4", "nvfp4"
    ),
    "ct-mxfp4": Method(mxfp4(_CT_MXFP4, _CT_PAIRS), "MXFP4", "mxfp4"),
    "nvfp4": Method(
        nvfp4(_MODELOPT, (".weight", ".weight_scale", ".weight_scale_2"), False), "NVFP4", "nvfp4"
    ),
    "quark": Method(
        mxfp4({"quant_method": "quark"}, (".weight", ".weight_scale")), "MXFP4", "mxfp4"
    ),
    "gptq": Method(gptq(4, True, 128), "GPTQ4", "q4"),
    "gptq-zeros": Method(gptq(4, False), "GPTQ4", "q5"),
    "gptq-v2": Method(gptq(4, False, -1, 0), "GPTQ4", "q5"),
    "gptq-order": Method(gptq(4, True, acts=True), "GPTQ4", "q8"),
    "gptq-8": Method(gptq(8, True), "GPTQ8", "q8"),
    "gptq-8-zeros": Method(gptq(8, False), "GPTQ8", "q8"),
    "gptq-2": Method(gptq(2, False), "GPTQ2", "q4"),
    "awq": Method(awq(128), "AWQ4", "q5"),
    "awq-32": Method(awq(32), "AWQ4", "q5"),
    "nf4": Method(bits_and_bytes("nf4", False), "NF4", "nf4"),
    "nf4-nested": Method(bits_and_bytes("nf4", True), "NF4", "nf4"),
    "fp4": Method(bits_and_bytes("fp4", True, 96), "FP4", "q8"),
    "llm-int8": Method(llm_int8(), "INT8", "q8"),
}
# Their rows hold a method's numbers and scales to the bit.
EXACT = [
    name
    for name, method in METHODS.items()
    if method.held in ("q4", "q5", "mxfp4")
    or name == "nvfp4"
    or name in ("ct-int8-packed", "ct-int8", "gptq-8", "llm-int8")
]
MODELS: dict[str, Variant] = {
    "llama": Variant(
        tiny_models._llama, hidden_size=256, intermediate_size=256, num_key_value_heads=2
    ),
    "wide": Variant(
        tiny_models._llama, hidden_size=256, intermediate_size=768, num_key_value_heads=2
    ),
    "latent": Variant(
        tiny_models._relative,
        "DeepseekV3",
        **tiny_models._DEEPSEEK
        | {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
        | {"kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
        q_lora_rank=128,
        first_k_dense_replace=3,
        n_group=1,
        topk_group=1,
    ),
    "mixture": Variant(
        tiny_models._relative,
        "Qwen3Moe",
        **tiny_models._QWEN_MOE
        | {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128},
        norm_topk_prob=True,
        head_dim=32,
    ),
}


def make_packed(path: Path, name: str, variant: str = "llama", seed: int = 3) -> Path:
    """Write a tiny model with projections quantized by a method to `path`/packed, and return it.

    The same with the weights that they stand for is `path`/floats.
    """
    (config, make), rng = METHODS[name].packing, np.random.default_rng(seed)
    floats, packed_path = path / "floats", path / "packed"
    with mock.patch.dict(tiny_models.VARIANTS, MODELS):
        make_tiny(variant, floats)
    tensors = load_file(floats / "model.safetensors")
    quantized: Tensors = {}
    for tensor_name, tensor in list(tensors.items()):
        base = tensor_name.removesuffix(".weight")
        if not base.endswith("_proj") or tensor.ndim != 2:
            quantized[tensor_name] = tensor
            continue
        parts, weights = make(rng, *tensor.shape)
        quantized |= {base + end: part for end, part in parts.items()}
        tensors[tensor_name] = torch.from_numpy(np.ascontiguousarray(weights))
    save_file(tensors, floats / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(floats, packed_path)
    save_file(quantized, packed_path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((floats / "config.json").read_text())
    values["quantization_config"] = config
    (packed_path / "config.json").write_text(json.dumps(values))
    return packed_path
