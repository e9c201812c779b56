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
    "q-llama-heads": Variant(
        tiny_models._llama, **_LLAMA, num_attention_heads=2, num_key_value_heads=1
    ),
    "q-llama-wide": Variant(tiny_models._llama, hidden_size=576, num_attention_heads=8),
    "q-granite4-h": Variant(
        tiny_models._relative,
        "GraniteMoeHybrid",
        **(tiny_models._GRANITE4_H | _LLAMA | {"shared_intermediate_size": 100}),
        num_local_experts=0,
    ),
    "q-gemma4-a4b": Variant(
        tiny_models.MIXTURES["gemma4-a4b"],
        hidden_size=64,
        global_head_dim=16,
        moe_intermediate_size=32,
    ),
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
    num_rows, num_groups = len(weights), weights.shape[1] // 32
    blocks = blocks.reshape(num_rows, num_groups, -1)
    factors, codes = np.split(blocks, [{"q4_1": 4, "mxfp4": 1}.get(name, 2)], axis=2)
    steps = codes.reshape(num_rows, num_groups, -1, 4)
    if name != "q8":  # ggml holds value k beside value k + 16
        values = np.concatenate([codes & 15, codes >> 4], axis=2)
        pairs = values.reshape(num_rows, num_groups, 4, 2, 4)
        steps = pairs[..., 0, :] | pairs[..., 1, :] << 4
    parts = [steps[:, first : first + 16].swapaxes(1, 2) for first in range(0, num_groups, 16)]
    parts += [factors[:, :, first : first + 2] for first in range(0, factors.shape[2], 2)]
    return np.concatenate([part.reshape(num_rows, -1) for part in parts], axis=1)


def dequantized(weights: np.ndarray, name: str) -> np.ndarray:
    """What gguf makes of float32 `weights` there and back."""
    return quants.dequantize(quants.quantize(weights, FORMATS[name]), FORMATS[name])
