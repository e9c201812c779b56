"""Granite MoE: Llama with experts in two tensors, and scales; one kind has a shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.families.experts import (
    COUNT_KEYS,
    GGUF_EXPERTS,
    expert_size,
    fused,
    read_router,
)
from hotcold.model.config.families.family import Family
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES, ExpertNames
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ExpertsConfig

_LOW, _HIGH = 1e-6, 1e6
_SHARED = "shared_mlp.input_linear.weight"  # rows of gate, then of up
_EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer.weight",
    gate="block_sparse_moe.input_linear.weight",
    up="block_sparse_moe.input_linear.weight",
    down="block_sparse_moe.output_linear.weight",
    shared_gate=_SHARED,
    shared_up=_SHARED,
    shared_down="shared_mlp.output_linear.weight",
)
_NEW = fused(
    replace(_EXPERTS, router="block_sparse_moe.router.weight"),
    "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.experts.down_proj",
)
_SCALES = (
    "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
)  # fmt: skip


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    """Missing scales are 1, that of attention's scores too."""
    fields = llama_fields(reader)
    scales = [reader.number(key, 1.0, low=_LOW, high=_HIGH) for key in _SCALES]
    embedding, residual, attention, logits = scales
    router = read_router(reader, "num_local_experts", "softmax_of_chosen", False)
    key = "shared_intermediate_size"
    has_shared = reader.has(key) and reader.values[key] != 0
    shared = expert_size(reader, key) if has_shared else 0
    return {
        **fields,
        "embedding_scale": embedding,
        "residual_scale": residual,
        "attention_scale": attention,
        "logit_scale": 1 / logits,
        "experts": ExpertsConfig(router=router, size=fields["ffn_size"], shared_size=shared),
    }


GRANITE_MOE = Family(
    name="granitemoe",
    architectures=("GraniteMoeForCausalLM", "GraniteMoeModel"),
    bos_id=1,
    eos_id=2,
    read_fields=_read_fields,
    tensor_names=LLAMA_NAMES.with_layer(experts=(_EXPERTS, _NEW, *GGUF_EXPERTS)),
    reads=(*COUNT_KEYS, "num_experts_per_tok", "shared_intermediate_size", *_SCALES),
    defaults={"num_experts_per_tok": 2},
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    name="granitemoeshared",
    architectures=("GraniteMoeSharedForCausalLM", "GraniteMoeSharedModel"),
)
