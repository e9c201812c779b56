"""MiniMax-M2: q and k normed over all heads, rope on half of a head; a bias steers the router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.families.experts import (
    COUNT_KEYS,
    fused,
    named_experts,
    read_router,
)
from hotcold.model.config.families.family import MAX_WIDTH, Family, GgufArchitecture, max_positions
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import GGUF_EXPERTS, LLAMA_NAMES
from hotcold.model.config.gguf_metadata import (
    SIGMOID,
    Metadata,
    expert_length,
    gated_values,
    gating,
    head_dim,
)
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ExpertsConfig
from hotcold.model.config.rope import read_rope

_BLOCK = "block_sparse_moe"
_NAMED = named_experts(_BLOCK, "w1", "w3", "w2", selection_bias=f"{_BLOCK}.e_score_correction_bias")
_FUSED = fused(
    replace(_NAMED, router="mlp.gate.weight", selection_bias="mlp.e_score_correction_bias")
)
# Of its own config.json: the values that its models have.
_FIXED = {
    "scoring_func": ("sigmoid",),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
}


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    head_dim = reader.integer("head_dim", high=MAX_WIDTH)
    rotated = reader.integer("rotary_dim", head_dim, high=head_dim)
    rope = read_rope(reader, max_positions(reader), theta=5e6, share=rotated / head_dim)
    fields = llama_fields(reader, ropes=(rope,))
    router = read_router(reader, "num_local_experts", "sigmoid", True, has_selection_bias=True)
    return {
        **fields,
        "qk_norm": "full",
        "experts": ExpertsConfig(router=router, size=fields["ffn_size"]),
    }


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    gating(metadata, SIGMOID)
    return {
        **gated_values(metadata),
        "intermediate_size": expert_length(metadata),
        "rotary_dim": metadata.integer("rope.dimension_count", head_dim(metadata)),
    }


MINIMAX_M2 = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM", "MiniMaxM2Model"),
    bos_id=200034,
    eos_id=200020,
    read_fields=_read_fields,
    tensor_names=LLAMA_NAMES.with_layer(experts=(_NAMED, _FUSED, *GGUF_EXPERTS)),
    reads=(
        *(*COUNT_KEYS, "num_experts_per_tok", "rotary_dim", "partial_rotary_factor"),
        *_FIXED,
    ),
    fixed=_FIXED,
    defaults={"head_dim": 128, "num_key_value_heads": 8, "num_experts_per_tok": 8},
    gguf=GgufArchitecture(("minimax-m2",), _gguf_values),
)
