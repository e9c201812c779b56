"""Qwen2-MoE (a gated shared expert), Qwen3-MoE, and OLMoE, which is much like them.

The text model of Qwen3-VL-MoE is Qwen3-MoE with experts in two tensors, mostly transposed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.families.experts import (
    COUNT_KEYS,
    expert_size,
    fused,
    layouts_of,
    named_experts,
    read_router,
    shared_in,
    stepped_dense_layers,
)
from hotcold.model.config.families.family import (
    Family,
    GgufArchitecture,
    num_layers,
    sliding_layers,
    windows,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
from hotcold.model.config.gguf_metadata import SECTIONS, Metadata, expert_length, gated_values
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ExpertsConfig

_KEYS = (*COUNT_KEYS, "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size")
_STEPS = ("decoder_sparse_step", "mlp_only_layers")
_NAMED = named_experts("mlp")
_FUSED = fused(_NAMED)
GATED_EXPERTS = layouts_of(
    named_experts(
        "mlp", **shared_in("mlp.shared_expert"), shared_router="mlp.shared_expert_gate.weight"
    )
)


def qwen_experts(
    reader: ConfigReader,
    norms_chosen: bool,
    gates_shared: bool = False,
    size: str = "moe_intermediate_size",
) -> ExpertsConfig:
    """Read the experts of Qwen's mixtures; `size`: the key of an expert's neurons."""
    router = read_router(reader, "num_experts", "softmax", norms_chosen, gates_shared=gates_shared)
    key = "shared_expert_intermediate_size"
    return ExpertsConfig(
        router=router,
        size=expert_size(reader, size),
        shared_size=expert_size(reader, key) if gates_shared else 0,
        dense_layers=stepped_dense_layers(reader),
    )


def _norms_chosen(reader: ConfigReader) -> bool:
    return reader.boolean("norm_topk_prob", False)


def _qwen2_moe_fields(reader: ConfigReader) -> dict[str, Any]:
    """Windows: with use_sliding_window, in each second layer before max_window_layers."""
    uses = reader.boolean("use_sliding_window", False)
    last = reader.integer("max_window_layers", 28, low=0, high=1 << 20)
    sliding = sliding_layers(reader, lambda layer: uses and layer % 2 == 0 and layer < last)
    return {
        **llama_fields(reader),
        "attention_bias": reader.boolean("qkv_bias", True),
        "out_bias": False,
        "windows": windows(reader, sliding, 4096),
        "experts": qwen_experts(reader, _norms_chosen(reader), gates_shared=True),
    }


def _qwen3_moe_fields(reader: ConfigReader) -> dict[str, Any]:
    uses = reader.boolean("use_sliding_window", False)
    return {
        **llama_fields(reader),
        "qk_norm": "head",
        "windows": windows(reader, (uses,) * num_layers(reader), 4096),
        "experts": qwen_experts(reader, _norms_chosen(reader)),
    }


def _olmoe_fields(reader: ConfigReader) -> dict[str, Any]:
    return {
        **llama_fields(reader, norm_eps=1e-5),
        "qk_norm": "full",
        "experts": qwen_experts(reader, _norms_chosen(reader), size="intermediate_size"),
    }


def expert_sizes(metadata: Metadata) -> dict[str, int]:
    """config.json's keys of the neurons of an expert, and of the shared one."""
    shared = metadata.integer("expert_shared_feed_forward_length", 0)
    return {
        "moe_intermediate_size": expert_length(metadata),
        "shared_expert_intermediate_size": shared or metadata.integer("feed_forward_length"),
    }


def _qwen2_gguf(metadata: Metadata) -> dict[str, Any]:
    has_bias = metadata.has_tensor("blk.0.attn_q.bias")
    return {**gated_values(metadata), **expert_sizes(metadata), "qkv_bias": has_bias}


def _qwen3_gguf(metadata: Metadata) -> dict[str, Any]:
    """A file does not say whether weights are normed; llama.cpp always does it."""
    return {
        **gated_values(metadata),
        "moe_intermediate_size": expert_length(metadata),
        "norm_topk_prob": metadata.boolean("expert_weights_norm", True),
    }


def _olmoe_gguf(metadata: Metadata) -> dict[str, Any]:
    return {
        **gated_values(metadata),
        "clip_qkv": metadata.number("attention.clamp_kqv", 0.0) or None,
        "norm_topk_prob": metadata.boolean("expert_weights_norm", False),
    }


QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    read_fields=_qwen2_moe_fields,
    tensor_names=LLAMA_NAMES.with_layer(experts=GATED_EXPERTS),
    reads=(*_KEYS, *_STEPS, "shared_expert_intermediate_size", "sliding_window", "layer_types"),
    gguf=GgufArchitecture(("qwen2moe",), _qwen2_gguf),
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    read_fields=_qwen3_moe_fields,
    tensor_names=LLAMA_NAMES.with_layer(experts=layouts_of(_NAMED)),
    reads=(*_KEYS, *_STEPS, "sliding_window"),
    gguf=GgufArchitecture(("qwen3moe", "qwen3vlmoe"), _qwen3_gguf, rope_keys=SECTIONS),
)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    name="qwen3_vl_moe_text",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    tensor_names=LLAMA_NAMES.with_layer(
        experts=(replace(_FUSED, is_transposed=True), _FUSED, _NAMED)
    ),
)
OLMOE = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM", "OlmoeModel"),
    eos_id=50279,
    read_fields=_olmoe_fields,
    tensor_names=LLAMA_NAMES.with_layer(experts=layouts_of(_NAMED)),
    reads=(*_KEYS[:-1],),
    gguf=GgufArchitecture(("olmoe",), _olmoe_gguf),
)
