"""GLM-4.5, 4.6, 4.7 and Air: dense layers first, a sigmoid router that a bias steers."""

from __future__ import annotations

from typing import Any, Literal

from hotcold.model.config.families.experts import (
    COUNT_KEYS,
    expert_size,
    layouts_of,
    named_experts,
    read_router,
    shared_in,
)
from hotcold.model.config.families.family import (
    Family,
    GgufArchitecture,
    max_positions,
    num_layers,
    of_layers,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
from hotcold.model.config.gguf_metadata import (
    SECTIONS,
    SIGMOID,
    Metadata,
    draft_layers,
    expert_length,
    gated_values,
    gating,
    rotary_share,
)
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ExpertsConfig
from hotcold.model.config.rope import read_rope

EXPERTS = layouts_of(
    named_experts(
        "mlp",
        selection_bias="mlp.gate.e_score_correction_bias",
        **shared_in("mlp.shared_experts"),
    )
)
# Of `routed_experts`, and of layers that draft.
ROUTED_KEYS = (
    *(*COUNT_KEYS, "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
    *("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group", "mlp_layer_types"),
    *("first_k_dense_replace", "num_nextn_predict_layers"),
)


def routed_experts(
    reader: ConfigReader,
    score: Literal["softmax", "sigmoid"] = "sigmoid",
    norms_chosen: bool = True,
) -> ExpertsConfig:
    """Read experts in groups, and the dense layers before them; sigmoids are steered by a bias.

    norms_chosen: where config.json does not say it
    """
    groups = reader.integer("n_group", 1, high=1 << 16)
    router = read_router(
        reader,
        "n_routed_experts",
        score,
        reader.boolean("norm_topk_prob", norms_chosen),
        has_selection_bias=score == "sigmoid",
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
    return ExpertsConfig(
        router=router, size=size, shared_size=size * shared, dense_layers=_dense_layers(reader)
    )


def _dense_layers(reader: ConfigReader) -> tuple[int, ...]:
    """The layers without experts: by mlp_layer_types, or the first ones."""
    if not reader.has("mlp_layer_types"):
        dense = reader.integer("first_k_dense_replace", 1, low=0, high=1 << 20)
        return tuple(range(min(dense, num_layers(reader))))
    kinds = of_layers(reader, "mlp_layer_types", "dense", "sparse")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    rope = read_rope(reader, max_positions(reader), share=0.5)
    return {
        **llama_fields(reader, norm_eps=1e-5, ropes=(rope,)),
        "out_bias": False,
        "qk_norm": "head" if reader.boolean("use_qk_norm", False) else "",
        "num_extra_layers": reader.integer("num_nextn_predict_layers", 0, low=0, high=1 << 10),
        "experts": routed_experts(reader),
    }


def routed_gguf(
    metadata: Metadata, norms_chosen: bool, epsilon: float | None = None
) -> dict[str, Any]:
    """config.json's keys of experts and drafts; `norms_chosen`: where a file does not say it."""
    return {
        **gated_values(metadata, epsilon),
        **draft_layers(metadata),
        "moe_intermediate_size": expert_length(metadata),
        "n_shared_experts": metadata.integer("expert_shared_count", 0),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "norm_topk_prob": metadata.boolean("expert_weights_norm", norms_chosen),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 0.0) or 1.0,
        "n_group": metadata.integer("expert_group_count", 0) or 1,
        "topk_group": metadata.integer("expert_group_used_count", 0) or 1,
    }


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    gating(metadata, SIGMOID)
    return {
        **routed_gguf(metadata, norms_chosen=True),
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
        "partial_rotary_factor": rotary_share(metadata),
    }


_GGUF_NAMES = {"post_attention_layernorm": "post_attention_norm"}


GLM4_MOE = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM", "Glm4MoeModel"),
    read_fields=_read_fields,
    tensor_names=LLAMA_NAMES.with_layer(experts=EXPERTS),
    reads=(*ROUTED_KEYS, "use_qk_norm", "partial_rotary_factor"),
    defaults={"num_key_value_heads": 8},
    gguf=GgufArchitecture(("glm4moe",), _gguf_values, _GGUF_NAMES, rope_keys=SECTIONS),
)
