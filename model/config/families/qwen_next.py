"""Qwen3-Next, Qwen3.5 and 3.6: gated delta nets, and attention with a gate in each fourth layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hotcold.model.config.families.experts import COUNT_KEYS
from hotcold.model.config.families.family import (
    MAX_WIDTH,
    Family,
    GgufArchitecture,
    max_positions,
    num_layers,
    of_layers,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.qwen_moe import GATED_EXPERTS, expert_sizes, qwen_experts
from hotcold.model.config.families.tensor_names import (
    LLAMA_NAMES,
    DraftNames,
    RecurrentNames,
    TensorNames,
)
from hotcold.model.config.gguf_metadata import (
    SECTIONS,
    Metadata,
    draft_layers,
    gated_values,
    rotary_share,
)
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.layer_spec import RecurrentSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.rope import read_rope

_KINDS = ("linear_attention", "full_attention")
_MAX_TAPS = 32
_LINEAR = RecurrentNames(
    inputs=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    gates=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    conv="linear_attn.conv1d",
    decay="linear_attn.A_log",
    step_bias="linear_attn.dt_bias",
    norm="linear_attn.norm",
    out="linear_attn.out_proj",
)
_NAMES = replace(
    LLAMA_NAMES,
    draft=DraftNames(
        layer="mtp.layers.0.",
        projection="mtp.fc",
        token_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        output_norm="mtp.norm",
        tokens="mtp.embed_tokens",
        head="mtp.shared_head.head",
    ),
).with_layer(
    recurrent=_LINEAR,
    experts=GATED_EXPERTS,
)


def _next_names(config: ModelConfig) -> TensorNames:
    inputs = ("linear_attn.in_proj_qkvz",) if config.fused_recurrent else _LINEAR.inputs
    fused_gates = replace(_LINEAR, inputs=inputs, gates=("linear_attn.in_proj_ba",))
    return _NAMES.with_layer(recurrent=fused_gates)


def _recurrent_layers(reader: ConfigReader) -> tuple[int, ...]:
    """Those that layer_types calls so; without it all but each full_attention_interval-th."""
    interval = reader.integer("full_attention_interval", 4, high=1 << 20)
    if not reader.has("layer_types"):
        return tuple(layer for layer in range(num_layers(reader)) if (layer + 1) % interval)
    kinds = of_layers(reader, "layer_types", *_KINDS)
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _KINDS[0])


def _recurrent(reader: ConfigReader) -> RecurrentSpec:
    keys = reader.integer("linear_num_key_heads", 16, high=MAX_WIDTH)
    values = reader.integer("linear_num_value_heads", 32, high=MAX_WIDTH)
    if values % keys:
        raise reader.fail(
            "linear_num_value_heads", f"is {values}, no multiple of linear_num_key_heads {keys}"
        )
    return RecurrentSpec(
        kind="delta",
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=reader.integer("linear_key_head_dim", 128, high=MAX_WIDTH),
        value_dim=reader.integer("linear_value_head_dim", 128, high=MAX_WIDTH),
        conv_size=reader.integer("linear_conv_kernel_dim", 4, high=_MAX_TAPS),
        has_tiled_heads=reader.boolean("linear_tiled_heads", False),
    )


def _fields(reader: ConfigReader) -> dict[str, Any]:
    """What all have in common."""
    rope = read_rope(reader, max_positions(reader), share=0.25)
    recurrent = _recurrent_layers(reader)
    return {
        **llama_fields(reader, ropes=(rope,)),
        "qk_norm": "head",
        "norm_offset": 1.0,
        "has_attention_gate": True,
        "num_extra_layers": reader.integer("num_nextn_predict_layers", 0, low=0, high=1 << 10),
        "recurrent": _recurrent(reader) if recurrent else None,
        "recurrent_layers": recurrent,
    }


def _next_fields(reader: ConfigReader) -> dict[str, Any]:
    norms = reader.boolean("norm_topk_prob", True)
    return {
        **_fields(reader),
        "fused_recurrent": not reader.boolean("linear_split_projections", False),
        "experts": qwen_experts(reader, norms, gates_shared=True),
    }


def _moe_fields(reader: ConfigReader) -> dict[str, Any]:
    return {**_fields(reader), "experts": qwen_experts(reader, True, gates_shared=True)}


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    """block_count includes layers of drafts, which have attention."""
    layers, value_heads = draft_layers(metadata), metadata.integer("ssm.time_step_rank")
    interval = metadata.integer("full_attention_interval", 4)
    recurrent = metadata.flags("attention.recurrent_layers", interval)
    return {
        **gated_values(metadata),
        **layers,
        "layer_types": [_KINDS[not own] for own in recurrent[: layers["num_hidden_layers"]]],
        "partial_rotary_factor": rotary_share(metadata),
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": metadata.integer("ssm.inner_size") // max(1, value_heads),
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_tiled_heads": True,
    }


def _moe_gguf(metadata: Metadata) -> dict[str, Any]:
    return {**_gguf_values(metadata), **expert_sizes(metadata)}


def _next_gguf(metadata: Metadata) -> dict[str, Any]:
    """Its value heads have the checkpoint's order."""
    own = {"linear_tiled_heads": False, "linear_split_projections": True}
    return {**_moe_gguf(metadata), **own}


_GGUF_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_ba": "ssm_ba",
}


_READS = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim", "layer_types"),
    *("full_attention_interval", "attn_output_gate", "partial_rotary_factor"),
    # Of GGUF files alone:
    *("linear_tiled_heads", "linear_split_projections", "num_nextn_predict_layers"),
)
_EXPERT_KEYS = (
    *(*COUNT_KEYS, "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
)
# The delta rule's silu is that of hidden_act.
_FIXED = {"attention_bias": (False,), "attn_output_gate": (True,), "hidden_act": ("silu",)}
_DEFAULTS = {"head_dim": 256, "num_attention_heads": 16, "max_position_embeddings": 32768}
_WITH_EXPERTS = {
    **_DEFAULTS,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "intermediate_size": 5632,
}


def _family(
    name: str,
    prefix: str,
    read_fields: Callable[[ConfigReader], dict[str, Any]],
    names: TensorNames | Callable[[ModelConfig], TensorNames] = _NAMES,
    **others: Any,
) -> Family:
    classes = ("ForCausalLM", "TextModel", "ForConditionalGeneration")
    return Family(
        name=name,
        architectures=tuple(prefix + kind for kind in classes),
        prefixes=("model.", "model.language_model."),
        read_fields=read_fields,
        tensor_names=names,
        fixed=_FIXED,
        **others,
    )


QWEN3_NEXT = _family(
    "qwen3_next",
    "Qwen3Next",
    _next_fields,
    _next_names,
    reads=(*_READS, *_EXPERT_KEYS),
    defaults={**_WITH_EXPERTS, "num_experts_per_tok": 10},
    gguf=GgufArchitecture(("qwen3next",), _next_gguf, _GGUF_NAMES),
)
QWEN3_5 = _family(
    "qwen3_5_text",
    "Qwen3_5",
    _fields,
    reads=_READS,
    defaults={**_DEFAULTS, "num_key_value_heads": 4},
    gguf=GgufArchitecture(("qwen35",), _gguf_values, _GGUF_NAMES, rope_keys=SECTIONS),
)
QWEN3_5_MOE = _family(
    "qwen3_5_moe_text",
    "Qwen3_5Moe",
    _moe_fields,
    reads=(*_READS, *_EXPERT_KEYS),
    defaults={**_WITH_EXPERTS, "num_experts_per_tok": 8},
    gguf=GgufArchitecture(("qwen35moe",), _moe_gguf, _GGUF_NAMES, rope_keys=SECTIONS),
)
