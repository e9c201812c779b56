"""Layers of Llama, Qwen 3 or EXAONE 4 with DeepSeek-V3's experts: dots.llm1, Ling 2, Solar Open, …

Experts are chosen by sigmoids that a bias steers; a shared one, and dense layers before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hotcold.model.config.families.exaone4 import exaone4_windows
from hotcold.model.config.families.experts import expert_size, shared_in
from hotcold.model.config.families.family import (
    Family,
    GgufArchitecture,
    max_positions,
    num_layers,
    windows,
)
from hotcold.model.config.families.glm4_moe import (
    EXPERTS,
    ROUTED_KEYS,
    routed_experts,
    routed_gguf,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import GGUF_EXPERTS, LLAMA_NAMES
from hotcold.model.config.gguf_metadata import (
    SIGMOID,
    Metadata,
    draft_layers,
    expert_length,
    gating,
    rotary_share,
    window,
    window_kinds,
)
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.rope import DEFAULT_THETA, read_rope

# Keys of DeepSeek-V3, by these families' own.
_KEYS = {
    "num_shared_experts": "n_shared_experts",
    "router_scaling_factor": "routed_scaling_factor",
}
# How experts are chosen; dots.llm1 has one name for both.
_CHOICES = {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)}


def _fields(
    reader: ConfigReader,
    norm_eps: float = 1e-6,
    share: float | None = None,
    theta: float = DEFAULT_THETA,
    **others: Any,
) -> dict[str, Any]:
    own = reader.renamed(_KEYS)
    rope = read_rope(own, max_positions(own), share=share, theta=theta)
    return {
        **llama_fields(own, norm_eps=norm_eps, ropes=(rope,)),
        "num_extra_layers": own.integer("num_nextn_predict_layers", 0, low=0, high=1 << 10),
        "experts": routed_experts(own),
        **others,
    }


def _dots1_fields(reader: ConfigReader) -> dict[str, Any]:
    """Layers from max_window_layers on have a window, where there is one."""
    layers = num_layers(reader)
    last = reader.integer("max_window_layers", 62, low=0, high=1 << 20)
    sliding = tuple(reader.has("sliding_window") and layer >= last for layer in range(layers))
    return _fields(reader, qk_norm="head", windows=windows(reader, sliding))


def _bailing_fields(reader: ConfigReader) -> dict[str, Any]:
    bias = reader.boolean("use_qkv_bias", False)
    fields = _fields(reader, share=1.0, qk_norm="head", fused_qkv="stacked", attention_bias=bias)
    key, experts = "moe_shared_expert_intermediate_size", fields["experts"]
    size = expert_size(reader, key) if reader.has(key) else experts.shared_size
    return {**fields, "experts": replace(experts, shared_size=size)}


def _routed(name: str, class_name: str, **others: Any) -> Family:
    reads = (*ROUTED_KEYS, "router_scaling_factor", *_CHOICES, *others.pop("reads", ()))
    experts = (*others.pop("experts", ()), *EXPERTS)
    read: Callable[[ConfigReader], dict[str, Any]] = others.pop("read_fields", _fields)
    return Family(
        name=name,
        architectures=(*others.pop("also", ()), f"{class_name}ForCausalLM", f"{class_name}Model"),
        read_fields=read,
        tensor_names=LLAMA_NAMES.with_layer(experts=experts),
        reads=reads,
        fixed=_CHOICES | others.pop("fixed", {}),
        **others,
    )


# Of Ling 2 and Ring 2: what all published ones have.
_BAILING = {
    "score_function": ("sigmoid",),
    "moe_router_enable_expert_bias": (True,),
    "use_qk_norm": (True,),
    "use_bias": (False,),
    "norm_head": (False,),
}
_NAMED, _FUSED = EXPERTS[:2]
_BESIDE = "mlp.e_score_correction_bias"  # the router, which has it within in other files
_OF_HY3 = replace(
    _NAMED,
    router="mlp.router.gate.weight",
    selection_bias="mlp.expert_bias",
    **shared_in("mlp.shared_mlp"),
)


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    gating(metadata, SIGMOID)
    return routed_gguf(metadata, norms_chosen=True)


def _windowed_gguf(metadata: Metadata) -> dict[str, Any]:
    sizes = {"sliding_window": window(metadata), "layer_types": window_kinds(metadata, 4)}
    return {**_gguf_values(metadata), **sizes}


def _bailing_gguf(metadata: Metadata) -> dict[str, Any]:
    """Sizes that all shared experts have together."""
    shared = metadata.integer("expert_shared_feed_forward_length", 0) or None
    return {
        **_gguf_values(metadata),
        "attention_bias": False,
        "moe_shared_expert_intermediate_size": shared,
        "partial_rotary_factor": rotary_share(metadata),
    }


def _hy3_gguf(metadata: Metadata) -> dict[str, Any]:
    """Layers with a router have experts."""
    routers = (
        metadata.has_tensor(f"blk.{layer}.ffn_gate_inp.weight")
        for layer in range(draft_layers(metadata)["num_hidden_layers"])
    )
    size = expert_length(metadata)
    return {
        **_gguf_values(metadata),
        "mlp_layer_types": [("dense", "sparse")[has_router] for has_router in routers],
        "n_shared_experts": metadata.integer("expert_shared_feed_forward_length", size) // size,
    }


DOTS1 = _routed(
    "dots1",
    "Dots1",
    read_fields=_dots1_fields,
    reads=("sliding_window", "layer_types"),
    defaults={"norm_topk_prob": False, "first_k_dense_replace": 0},
    gguf=GgufArchitecture(("dots1",), _gguf_values),
)
SOLAR_OPEN = _routed(
    "solar_open",
    "SolarOpen",
    read_fields=lambda reader: _fields(reader, norm_eps=1e-5, share=1.0, theta=1e6),
    reads=("partial_rotary_factor",),
    defaults={"head_dim": 128, "num_key_value_heads": 8, "first_k_dense_replace": 0},
)
HY3 = _routed(
    "hy_v3",
    "HYV3",
    read_fields=lambda reader: _fields(reader, norm_eps=1e-5, theta=11_158_840.0, qk_norm="head"),
    experts=(_OF_HY3, replace(_FUSED, selection_bias=_BESIDE)),
    defaults={"head_dim": 128, "num_key_value_heads": 8, "routed_scaling_factor": 2.826},
    gguf=GgufArchitecture(("hy_v3",), _hy3_gguf, {"exp_probs_b.bias": "exp_probs_b"}),
)
EXAONE_MOE = _routed(
    "exaone_moe",
    "ExaoneMoe",
    also=("ExaoneMoEForCausalLM",),
    read_fields=lambda reader: _fields(
        reader, norm_eps=1e-5, qk_norm="head", **exaone4_windows(reader)
    ),
    bos_id=1,
    eos_id=53,
    experts=(replace(_NAMED, selection_bias=_BESIDE), _FUSED),
    reads=("sliding_window", "sliding_window_pattern", "layer_types"),
    defaults={"num_key_value_heads": 32, "routed_scaling_factor": 2.5},
    gguf=GgufArchitecture(("exaone-moe",), _windowed_gguf),
)
BAILING2 = replace(
    _routed(
        "bailing_moe",
        "BailingMoeV2",
        read_fields=_bailing_fields,
        reads=("partial_rotary_factor", "moe_shared_expert_intermediate_size", *_BAILING),
        fixed=_BAILING,
        defaults={"routed_scaling_factor": 2.5},
        gguf=GgufArchitecture(
            ("bailingmoe2",), _bailing_gguf, {"attention.query_key_value": "attn_qkv"}
        ),
    ),
    tensor_names=replace(LLAMA_NAMES, tokens="word_embeddings").with_layer(
        qkv=("attention.query_key_value",),
        out="attention.dense",
        q_norm="attention.query_layernorm",
        k_norm="attention.key_layernorm",
        experts=(replace(_NAMED, selection_bias="mlp.gate.expert_bias"), *GGUF_EXPERTS),
    ),
)
