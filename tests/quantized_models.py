"""Tiny models whose rows are whole groups, and quantization written down from its definition."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import gguf
import numpy as np
from gguf import quants

from tests import tiny_models
from tests.tiny_models import Variant

_LLAMA = {"hidden_size": 64, "intermediate_size": 100}
_OPT = {"hidden_size": 64, "ffn_dim": 92, "word_embed_proj_dim": 64}
_FALCON = {"hidden_size": 96, "ffn_hidden_size": 104}

MODELS: dict[str, Variant] = {
    "q-llama": Variant(tiny_models._llama, **_LLAMA, num_key_value_heads=2),
    "q-llama-tied": Variant(tiny_models._llama, **_LLAMA, tie_word_embeddings=True, mlp_bias=True),
    "q-llama-wide": Variant(tiny_models._llama, hidden_size=576, num_attention_heads=8),
    "q-opt": Variant(tiny_models._opt, **_OPT),
    "q-opt-postnorm": Variant(
        tiny_models._opt, **(_OPT | {"word_embed_proj_dim": 32}), do_layer_norm_before=False
    ),
    "q-falcon": Variant(tiny_models._falcon, **_FALCON, activation="relu"),
    "q-falcon-grouped": Variant(
        tiny_models._falcon, **_FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True
    ),
}
FORMATS = {
    "q8": gguf.GGMLQuantizationType.Q8_0,
    "q4": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "mxfp4": gguf.GGMLQuantizationType.MXFP4,
}
GROUP_BYTES = {"q8": 34, "q4": 18, "q4_1": 20, "mxfp4": 17}


def make_model(name: str, path: Path, dtype: str = "float16", shards: int = 1) -> Path:
    """Write the tiny model to `path`, which is returned."""
    with mock.patch.dict(tiny_models.VARIANTS, MODELS):
        return tiny_models.make_tiny(name, path, dtype=dtype, shards=shards)


def laid_out(weights: np.ndarray, name: str) -> np.ndarray:
    """Rows of bytes: gguf's values and scales of float32 `weights`, put where formats.py says."""
    blocks = quants.quantize(weights, FORMATS[name])
    num_groups = weights.shape[1] // 32
    blocks = blocks.reshape(weights.shape[0], num_groups, -1)
    return np.stack([_row(row, name) for row in blocks])


def _row(blocks: np.ndarray, name: str) -> np.ndarray:
    """One row (groups, bytes); ggml's Q4_0 and Q4_1 hold value k beside value k + 16."""
    out: list[int] = []
    for first in range(0, len(blocks), 16):
        chunk = [_codes(block, name) for block in blocks[first : first + 16]]
        steps = range(8) if name == "q8" else range(4)
        for j in steps:
            for codes in chunk:
                for b in range(4):
                    if name == "q8":
                        out.append(codes[4 * j + b])
                    else:
                        out.append(codes[8 * j + b] | codes[8 * j + 4 + b] << 4)
    for first in range(0, _factor_bytes(name), 2):
        for block in blocks:
            out.extend(int(byte) for byte in block[first : min(first + 2, _factor_bytes(name))])
    return np.array(out, np.uint8)


def _factor_bytes(name: str) -> int:
    return {"q4_1": 4, "mxfp4": 1}.get(name, 2)


def _codes(block: np.ndarray, name: str) -> list[int]:
    values = [int(byte) for byte in block[_factor_bytes(name) :]]
    if name == "q8":
        return values
    return [byte & 15 for byte in values] + [byte >> 4 for byte in values]


def dequantized(weights: np.ndarray, name: str) -> np.ndarray:
    """What gguf makes of float32 `weights` there and back."""
    return quants.dequantize(quants.quantize(weights, FORMATS[name]), FORMATS[name])
