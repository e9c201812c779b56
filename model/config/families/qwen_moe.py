"""Qwen2-MoE (a gated shared expert), Qwen3-MoE, and OLMoE, which is much like them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.families.experts import (
    COUNT_KEYS,
    GGUF_EXPERTS,
    expert_size,
    fused,
    named_experts,
    read_router,
    stepped_dense_layers,
)
from hotcold.model.config.families.family import Family, num_layers, sliding_layers, windows
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ExpertsConfig

_KEYS = (*COUNT_KEYS, "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size")
_STEPS = ("decoder_sparse_step", "mlp_only_layers")
_NAMED = named_experts("mlp")
_FUSED = fused(_NAMED, "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_SHARED: dict[str, Any] = {
    "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight",
    "shared_router": "mlp.shared_expert_gate.weight",
}
_QK_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}


def _experts(
    reader: ConfigReader, gates_shared: bool = False, size: str = "moe_intermediate_size"
) -> ExpertsConfig:
    norms = reader.boolean("norm_topk_prob", False)
    router = read_router(reader, "num_experts", "softmax", norms, gates_shared=gates_shared)
    key = "shared_expert_intermediate_size"
    return ExpertsConfig(
        router=router,
        size=expert_size(reader, size),
        shared_size=expert_size(reader, key) if gates_shared else 0,
        dense_layers=stepped_dense_layers(reader),
    )


def _qwen2_moe_fields(reader: ConfigReader) -> dict[str, Any]:
    """Windows: with use_sliding_window, in each second layer before max_window_layers."""
    uses = reader.boolean("use_sliding_window", False)
    last = reader.integer("max_window_layers", 28, low=0, high=1 << 20)
    sliding = sliding_layers(
        reader, lambda layer: uses and layer % 2 == 0 and layer < last, num_layers(reader)
    )
    return {
        **llama_fields(reader),
        "attention_bias": reader.boolean("qkv_bias", True),
        "out_bias": False,
        "windows": windows(reader, sliding, 4096),
        "experts": _experts(reader, gates_shared=True),
    }


def _qwen3_moe_fields(reader: ConfigReader) -> dict[str, Any]:
    uses = reader.boolean("use_sliding_window", False)
    return {
        **llama_fields(reader),
        "qk_norm": "head",
        "windows": windows(reader, (uses,) * num_layers(reader), 4096),
        "experts": _experts(reader),
    }


def _olmoe_fields(reader: ConfigReader) -> dict[str, Any]:
    return {
        **llama_fields(reader, norm_eps=1e-5),
        "qk_norm": "full",
        "experts": _experts(reader, size="intermediate_size"),
    }


QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
    read_fields=_qwen2_moe_fields,
    tensor_names=LLAMA_NAMES.with_layer(
        experts=(replace(_NAMED, **_SHARED), replace(_FUSED, **_SHARED), *GGUF_EXPERTS)
    ),
    reads=(*_KEYS, *_STEPS, "shared_expert_intermediate_size", "sliding_window", "layer_types"),
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    read_fields=_qwen3_moe_fields,
    tensor_names=LLAMA_NAMES.with_layer(experts=(_NAMED, _FUSED, *GGUF_EXPERTS), **_QK_NORMS),
    reads=(*_KEYS, *_STEPS, "sliding_window"),
)
OLMOE = Family(
    name="olmoe",
    architectures=("OlmoeForCausalLM", "OlmoeModel"),
    eos_id=50279,
    read_fields=_olmoe_fields,
    tensor_names=LLAMA_NAMES.with_layer(experts=(_NAMED, _FUSED, *GGUF_EXPERTS), **_QK_NORMS),
    reads=(*_KEYS[:-1],),
)
