"""GLM-4.5, 4.6, 4.7 and Air: dense layers first, a sigmoid router that a bias steers."""

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
)
from hotcold.model.config.families.family import Family, max_positions, num_layers
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ExpertsConfig, ModelConfig
from hotcold.model.config.rope import read_rope

_NAMED = replace(
    named_experts("mlp", selection_bias="mlp.gate.e_score_correction_bias"),
    shared_gate="mlp.shared_experts.gate_proj.weight",
    shared_up="mlp.shared_experts.up_proj.weight",
    shared_down="mlp.shared_experts.down_proj.weight",
)
_NAMES = LLAMA_NAMES.with_layer(
    experts=(
        _NAMED,
        fused(_NAMED, "mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        *GGUF_EXPERTS,
    )
)


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    layers = num_layers(reader)
    groups = reader.integer("n_group", 1, high=1 << 16)
    router = read_router(
        reader,
        "n_routed_experts",
        "sigmoid",
        reader.boolean("norm_topk_prob", True),
        has_selection_bias=True,
        scale=reader.number("routed_scaling_factor", 1.0, low=1e-6, high=1e6),
        num_groups=groups,
        num_chosen_groups=reader.integer("topk_group", 1, high=groups),
    )
    if router.num_experts % groups:
        raise reader.fail(
            "n_group", f"is {groups}, which does not divide n_routed_experts {router.num_experts}"
        )
    available = router.num_experts // groups * router.num_chosen_groups
    if router.num_chosen > available:
        raise reader.fail(
            "topk_group", f"leaves {available} experts, but {router.num_chosen} are chosen"
        )
    size = expert_size(reader, "moe_intermediate_size")
    shared = reader.integer("n_shared_experts", 1, low=0, high=1 << 10)
    dense = reader.integer("first_k_dense_replace", 1, low=0, high=1 << 20)
    rope = read_rope(reader, max_positions(reader), share=0.5)
    return {
        **llama_fields(reader, norm_eps=1e-5, ropes=(rope,)),
        "out_bias": False,
        "qk_norm": "head" if reader.boolean("use_qk_norm", False) else "",
        "num_extra_layers": reader.integer("num_nextn_predict_layers", 0, low=0, high=1 << 10),
        "experts": ExpertsConfig(
            router=router,
            size=size,
            shared_size=size * shared,
            dense_layers=tuple(range(min(dense, layers))),
        ),
    }


def _names(config: ModelConfig) -> Any:
    if not config.qk_norm:
        return _NAMES
    return _NAMES.with_layer(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")


GLM4_MOE = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM", "Glm4MoeModel"),
    read_fields=_read_fields,
    tensor_names=_names,
    reads=(
        *(*COUNT_KEYS, "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
        *("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "use_qk_norm"),
        *("first_k_dense_replace", "num_nextn_predict_layers", "partial_rotary_factor"),
    ),
    defaults={"num_key_value_heads": 8},
)
