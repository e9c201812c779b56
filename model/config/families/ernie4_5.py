"""ERNIE 4.5: Llama with rope in pairs of neighbours; the mixture's router is steered by a bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.families.experts import (
    COUNT_KEYS,
    expert_size,
    layouts_of,
    named_experts,
    read_router,
    shared_in,
)
from hotcold.model.config.families.family import Family, GgufArchitecture, max_positions, num_layers
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
from hotcold.model.config.gguf_metadata import Metadata, expert_length, gated_values
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ExpertsConfig
from hotcold.model.config.rope import read_rope

_MAX_LAYER = 1 << 20
_KEYS = (
    *("moe_num_experts", "moe_k", "moe_intermediate_size", "moe_num_shared_experts"),
    *("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
)
_NAMED = named_experts(
    "mlp",
    selection_bias="mlp.moe_statics.e_score_correction_bias",
    **shared_in("mlp.shared_experts"),
)


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    bias = reader.boolean("use_bias", False)
    ropes = (read_rope(reader, max_positions(reader), theta=500_000.0),)
    return {
        **llama_fields(reader, norm_eps=1e-5, ropes=ropes),
        **dict.fromkeys(("attention_bias", "out_bias", "ffn_bias"), bias),
        "interleaved_rope": True,
    }


def _moe_fields(reader: ConfigReader) -> dict[str, Any]:
    """Experts in each `moe_layer_interval`-th layer from the first to the last that may have."""
    layers = num_layers(reader)
    router = read_router(
        reader, "moe_num_experts", "softmax", True, "moe_k", has_selection_bias=True
    )
    size = expert_size(reader, "moe_intermediate_size")
    first = reader.integer("moe_layer_start_index", 1, low=0, high=_MAX_LAYER)
    last = reader.integer("moe_layer_end_index", -1, low=-1, high=_MAX_LAYER)
    step = reader.integer("moe_layer_interval", 1, high=_MAX_LAYER)
    routed = set(range(first, layers if last < 0 else last + 1))
    shared = reader.integer("moe_num_shared_experts", 2, low=0, high=1 << 10)
    return {
        **_read_fields(reader),
        "experts": ExpertsConfig(
            router=router,
            size=size,
            shared_size=size * shared,
            dense_layers=tuple(
                layer for layer in range(layers) if layer not in routed or (layer + 1) % step
            ),
        ),
    }


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    values = gated_values(metadata)
    return {**values, "use_bias": values["attention_bias"]}


def _moe_gguf(metadata: Metadata) -> dict[str, Any]:
    return {
        **_gguf_values(metadata),
        "num_experts_per_tok": None,
        "moe_k": metadata.integer("expert_used_count"),
        "moe_intermediate_size": expert_length(metadata),
        "moe_num_shared_experts": metadata.integer("expert_shared_count", 0),
        "moe_layer_start_index": metadata.integer("leading_dense_block_count", 0),
        "moe_layer_interval": metadata.integer("interleave_moe_layer_step", 0) or 1,
    }


ERNIE4_5 = Family(
    name="ernie4_5",
    architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM", "Ernie4_5Model"),
    bos_id=1,
    eos_id=2,
    tied_embeddings=True,
    read_fields=_read_fields,
    reads=("use_bias",),
    defaults={"head_dim": 128, "num_key_value_heads": 2},
    gguf=GgufArchitecture(("ernie4_5",), _gguf_values),
)
ERNIE4_5_MOE = replace(
    ERNIE4_5,
    name="ernie4_5_moe",
    architectures=("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeModel"),
    read_fields=_moe_fields,
    tensor_names=LLAMA_NAMES.with_layer(experts=layouts_of(_NAMED)),
    reads=("use_bias", *COUNT_KEYS, *_KEYS),
    defaults={"num_key_value_heads": 4},
    gguf=GgufArchitecture(("ernie4_5-moe",), _moe_gguf),
)
