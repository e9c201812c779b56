"""Gemma 2 and 3: four norms a layer of weights 1 + w, GeGLU, embeddings times sqrt(d), windows.

Gemma 2 caps scores and logits; Gemma 3 norms q and k, and its windowed layers have another rope.
"""

from __future__ import annotations

from typing import Any

from hotcold.model.config.families.family import (
    Family,
    GgufArchitecture,
    max_positions,
    sliding_layers,
    windows,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
from hotcold.model.config.gguf_metadata import Metadata, gated_values, head_dim
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import RopeConfig
from hotcold.model.config.rope import read_rope, read_ropes_by_window

_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0  # Gemma 3's
_READS = (
    "sliding_window",
    "sliding_window_pattern",
    "layer_types",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


def _fields(
    reader: ConfigReader,
    sliding: tuple[bool, ...],
    ropes: tuple[RopeConfig, ...],
    softcaps: tuple[float, float],
) -> dict[str, Any]:
    """Fields of both; `softcaps` are the defaults for scores and logits, 0 for none."""
    fields = llama_fields(
        reader,
        activation_key="hidden_activation",
        activation_default="gelu_pytorch_tanh",
        ropes=ropes,
    )
    scalar = reader.number("query_pre_attn_scalar", 256, low=1e-6, high=1e9)
    return {
        **fields,
        "norm_offset": 1.0,
        "has_output_norms": True,
        "attention_scale": scalar**-0.5,
        "attention_softcap": _softcap(reader, "attn_logit_softcapping", softcaps[0]),
        "logit_softcap": _softcap(reader, "final_logit_softcapping", softcaps[1]),
        "embedding_scale": fields["hidden_size"] ** 0.5,
        "windows": windows(reader, sliding, 4096),
    }


def _softcap(reader: ConfigReader, key: str, default: float) -> float:
    """Read a cap: 0 for null, `default` without the key."""
    if not reader.has(key):
        return 0.0 if key in reader.values else default
    return reader.number(key, low=1e-6, high=1e9)


def _gemma2_fields(reader: ConfigReader) -> dict[str, Any]:
    """Every other layer has a window, the first one too."""
    sliding = sliding_layers(reader, lambda layer: layer % 2 == 0)
    return _fields(reader, sliding, (read_rope(reader, max_positions(reader)),), (50.0, 30.0))


def _gemma3_fields(reader: ConfigReader) -> dict[str, Any]:
    """Five layers with a window to one without."""
    pattern = reader.integer("sliding_window_pattern", 6, high=1 << 20)
    sliding = sliding_layers(reader, lambda layer: (layer + 1) % pattern != 0)
    local = reader.number("rope_local_base_freq", _LOCAL_THETA, low=1e-6, high=1e12)
    ropes = read_ropes_by_window(reader, max_positions(reader), theta=_THETA, local_theta=local)
    return {
        **_fields(reader, sliding, ropes, (0.0, 0.0)),
        "qk_norm": "head",
        "layer_ropes": tuple(int(is_windowed) for is_windowed in sliding),
    }


def _gguf_values(metadata: Metadata, blocks_of_27b: int) -> dict[str, Any]:
    """Gemma 27B scales scores by hidden size / heads, smaller ones by the head's size."""
    scalar = head_dim(metadata)
    if metadata.integer("block_count") == blocks_of_27b:
        heads = metadata.integer("attention.head_count")
        scalar = metadata.integer("embedding_length") // heads
    return {
        **gated_values(metadata),
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": metadata.integer("attention.sliding_window", 4096),
    }


def _gemma2_gguf(metadata: Metadata) -> dict[str, Any]:
    return {
        **_gguf_values(metadata, 46),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def _gemma3_gguf(metadata: Metadata) -> dict[str, Any]:
    return {
        **_gguf_values(metadata, 62),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
    }


GEMMA_NAMES = LLAMA_NAMES.with_layer(
    attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    ffn_output_norm="post_feedforward_layernorm",
)
_FIXED = {"use_bidirectional_attention": (False,)}
_DEFAULTS = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
GEMMA2 = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM", "Gemma2Model"),
    bos_id=2,
    eos_id=1,
    tied_embeddings=True,
    read_fields=_gemma2_fields,
    tensor_names=GEMMA_NAMES,
    reads=_READS,
    fixed=_FIXED,
    defaults=_DEFAULTS,
    gguf=GgufArchitecture(("gemma2",), _gemma2_gguf),
)
GEMMA3 = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3ForConditionalGeneration"),
    prefixes=("model.", "language_model.model.", "model.language_model."),
    bos_id=2,
    eos_id=1,
    tied_embeddings=True,
    read_fields=_gemma3_fields,
    tensor_names=GEMMA_NAMES,
    reads=_READS,
    fixed=_FIXED,
    defaults={**_DEFAULTS, "max_position_embeddings": 131_072, "vocab_size": 262_208},
    gguf=GgufArchitecture(("gemma3",), _gemma3_gguf, rope_keys=("freq_base_swa",)),
)
