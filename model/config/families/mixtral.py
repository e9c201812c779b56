"""Mixtral: Mistral with experts. TurboSparse-Mixtral: with dReLU and a predictor in each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.families.experts import (
    COUNT_KEYS,
    fused,
    named_experts,
    read_router,
)
from hotcold.model.config.families.family import Family, max_positions, num_layers, windows
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import GGUF_EXPERTS, LLAMA_NAMES
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ExpertsConfig
from hotcold.model.config.rope import read_rope

_NAMED = named_experts("block_sparse_moe", "w1", "w3", "w2")
_FUSED = fused(named_experts("mlp"))


def _mixtral_fields(reader: ConfigReader) -> dict[str, Any]:
    """Without sliding_window there are no windows, other than in Mistral."""
    rope = read_rope(reader, max_positions(reader), theta=1e6)
    fields = llama_fields(reader, norm_eps=1e-5, ropes=(rope,))
    sliding = (reader.has("sliding_window"),) * num_layers(reader)
    router = read_router(reader, "num_local_experts", "softmax", True)
    return {
        **fields,
        "windows": windows(reader, sliding),
        "experts": ExpertsConfig(router=router, size=fields["ffn_size"]),
    }


def _turbosparse_fields(reader: ConfigReader) -> dict[str, Any]:
    fields = _mixtral_fields(reader)
    experts = replace(fields["experts"], has_predictors=True)
    return {**fields, "activation_fn": "drelu", "experts": experts}


MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM", "MixtralModel"),
    bos_id=1,
    eos_id=2,
    read_fields=_mixtral_fields,
    tensor_names=LLAMA_NAMES.with_layer(experts=(_NAMED, _FUSED, *GGUF_EXPERTS)),
    reads=(*COUNT_KEYS, "num_experts_per_tok", "sliding_window"),
    defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2},
)
_PREDICTORS = tuple(f"block_sparse_moe.experts.{{}}.predictor.fc{i}.weight" for i in (1, 2))
TURBOSPARSE_MIXTRAL = replace(
    MIXTRAL,
    name="turbosparsemixtral",
    architectures=("TurboSparseMixtralForCausalLM", "TurboSparseMixtralModel"),
    read_fields=_turbosparse_fields,
    tensor_names=LLAMA_NAMES.with_layer(experts=(replace(_NAMED, predictor=_PREDICTORS),)),
    fixed={"hidden_act": ("relu",)},
    defaults={**MIXTRAL.defaults, "hidden_act": "relu"},
)
