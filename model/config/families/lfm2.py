"""LFM2: short convolutions, and attention in some layers; also a mixture of experts."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

from hotcold.model.config.families.experts import (
    COUNT_KEYS,
    expert_size,
    layouts_of,
    named_experts,
    read_router,
)
from hotcold.model.config.families.family import (
    MAX_WIDTH,
    Family,
    GgufArchitecture,
    max_positions,
    num_layers,
    of_layers,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES, RecurrentNames
from hotcold.model.config.gguf_metadata import (
    SIGMOID,
    Metadata,
    expert_length,
    gated_values,
    gating,
    recurrent_kinds,
)
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.layer_spec import RecurrentSpec
from hotcold.model.config.model_config import ExpertsConfig
from hotcold.model.config.rope import read_rope

_KINDS = ("conv", "full_attention")
_THETA = 1e6
_NAMED = named_experts("feed_forward", "w1", "w3", "w2", selection_bias="feed_forward.expert_bias")
_NAMES = replace(LLAMA_NAMES, final_norm="embedding_norm").with_layer(
    norm="operator_norm",
    out="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    ffn_norm="ffn_norm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    recurrent=RecurrentNames(("conv.in_proj",), "conv.conv", "conv.out_proj"),
)


def _kinds(reader: ConfigReader) -> list[str]:
    """What each layer is; without layer_types those of full_attn_idxs have attention."""
    attends = reader.values.get("full_attn_idxs")
    if not reader.has("layer_types") and isinstance(attends, list):
        return [_KINDS[layer in attends] for layer in range(num_layers(reader))]
    return of_layers(reader, "layer_types", *_KINDS)


def _ffn_size(reader: ConfigReader) -> int:
    """Neurons: two thirds of what config.json says, rounded up, unless it says otherwise."""
    key = "block_ff_dim" if reader.has("block_ff_dim") else "intermediate_size"
    size = reader.integer(key, high=MAX_WIDTH)
    if not reader.boolean("block_auto_adjust_ff_dim", True):
        return size
    multiplier = reader.number("block_ffn_dim_multiplier", 1.0, low=1e-6, high=1e6)
    multiple = reader.integer("block_multiple_of", 256, high=MAX_WIDTH)
    return -(-int(multiplier * int(2 * size / 3)) // multiple) * multiple


def _fields(reader: ConfigReader, ffn_size: int) -> dict[str, Any]:
    epsilon = reader.number("norm_eps", 1e-5, low=0.0, high=1.0)
    own = {"intermediate_size": ffn_size, "rms_norm_eps": epsilon, "hidden_act": "silu"}
    rope = read_rope(reader, max_positions(reader), theta=_THETA)
    fields = llama_fields(ConfigReader({**reader.values, **own}, reader.source), ropes=(rope,))
    size = gcd(fields["hidden_size"], 64)
    spec = RecurrentSpec(
        kind="conv",
        num_key_heads=0,
        num_value_heads=fields["hidden_size"] // size,
        key_dim=0,
        value_dim=size,
        conv_size=reader.integer("conv_L_cache", 3, high=32),
    )
    tied = reader.boolean("tie_word_embeddings", True)
    convs = tuple(layer for layer, kind in enumerate(_kinds(reader)) if kind == "conv")
    return {
        **fields,
        "qk_norm": "head",
        "tied_embeddings": reader.boolean("tie_embedding", tied),
        "recurrent": spec if convs else None,
        "recurrent_layers": convs,
    }


def _dense_fields(reader: ConfigReader) -> dict[str, Any]:
    return _fields(reader, _ffn_size(reader))


def _moe_fields(reader: ConfigReader) -> dict[str, Any]:
    router = read_router(
        reader,
        "num_experts",
        "sigmoid",
        reader.boolean("norm_topk_prob", True),
        has_selection_bias=reader.boolean("use_expert_bias", True),
        scale=reader.number("routed_scaling_factor", 1.0, low=1e-6, high=1e6),
    )
    size = reader.integer("intermediate_size", 7168, high=MAX_WIDTH)
    dense = reader.integer("num_dense_layers", 2, low=0, high=1 << 20)
    return {
        **_fields(reader, size),
        "experts": ExpertsConfig(
            router=router,
            size=expert_size(reader, "moe_intermediate_size"),
            dense_layers=tuple(range(min(dense, num_layers(reader)))),
        ),
    }


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    """Layers without KV heads have a convolution."""
    values = gated_values(metadata)
    return {
        **values,
        "norm_eps": values["rms_norm_eps"],
        "layer_types": recurrent_kinds(metadata, "conv"),
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _moe_gguf(metadata: Metadata) -> dict[str, Any]:
    gating(metadata, SIGMOID)
    return {
        **_gguf_values(metadata),
        "moe_intermediate_size": expert_length(metadata),
        "num_dense_layers": metadata.integer("leading_dense_block_count", 0),
    }


_GGUF_NAMES = {
    "embedding_norm": "token_embd_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
}


_READS = ("layer_types", "full_attn_idxs", "conv_L_cache", "block_ff_dim")
LFM2 = Family(
    name="lfm2",
    architectures=("Lfm2ForCausalLM", "Lfm2Model", "Lfm2VlForConditionalGeneration"),
    prefixes=("model.", "model.language_model."),
    bos_id=1,
    eos_id=2,
    tied_embeddings=True,
    read_fields=_dense_fields,
    tensor_names=_NAMES,
    reads=_READS,
    fixed={"conv_bias": (False,)},
    gguf=GgufArchitecture(("lfm2",), _gguf_values, _GGUF_NAMES),
)
LFM2_MOE = replace(
    LFM2,
    name="lfm2_moe",
    architectures=("Lfm2MoeForCausalLM", "Lfm2MoeModel"),
    read_fields=_moe_fields,
    tensor_names=_NAMES.with_layer(experts=layouts_of(_NAMED, "feed_forward")),
    reads=(
        *(*_READS, *COUNT_KEYS, "num_experts_per_tok", "norm_topk_prob", "use_expert_bias"),
        *("routed_scaling_factor", "num_dense_layers", "moe_intermediate_size"),
    ),
    gguf=GgufArchitecture(("lfm2moe",), _moe_gguf, _GGUF_NAMES),
)
