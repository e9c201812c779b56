"""DeepSeek-V2, V3 and R1, Kimi K2, GLM-4.7-Flash, Mistral Small 4: latent attention, experts.

Keys and values of all heads are made of one vector a position, with a rotated part beside it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hotcold.model.config.families.family import (
    MAX_WIDTH,
    Family,
    GgufArchitecture,
    max_positions,
)
from hotcold.model.config.families.glm4_moe import (
    EXPERTS,
    ROUTED_KEYS,
    routed_experts,
    routed_gguf,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.mistral import YARN_KEYS, gguf_grown_queries, grown_queries
from hotcold.model.config.families.tensor_names import LLAMA_NAMES, TensorNames
from hotcold.model.config.gguf_metadata import (
    LATENT_RANK,
    SIGMOID,
    SOFTMAX,
    Metadata,
    draft_layers,
    gating,
)
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.layer_spec import LatentSpec
from hotcold.model.config.model_config import ModelConfig, RopeConfig
from hotcold.model.config.rope import read_rope

_ROPES = ("rope_scaling", "rope_parameters")


def _latent(reader: ConfigReader) -> LatentSpec:
    query_rank = "q_lora_rank"
    return LatentSpec(
        rank=reader.integer("kv_lora_rank", high=MAX_WIDTH),
        query_rank=reader.integer(query_rank, high=MAX_WIDTH) if reader.has(query_rank) else 0,
        rope_size=reader.integer("qk_rope_head_dim", high=MAX_WIDTH),
        plain_size=reader.integer("qk_nope_head_dim", high=MAX_WIDTH),
        value_size=reader.integer("v_head_dim", high=MAX_WIDTH),
    )


def _score_scale(reader: ConfigReader, latent: LatentSpec, rope: RopeConfig) -> float:
    """1 / sqrt(size of a head), times the square of what yarn would scale cosines by.

    Source:  yarn_apply_mscale of transformers/models/deepseek_v2
    """
    scaling = reader.values.get("rope_parameters") or reader.values.get("rope_scaling") or {}
    inner = ConfigReader(scaling, f"{reader.source}: rope_scaling")
    scale = (latent.plain_size + latent.rope_size) ** -0.5
    if rope.kind != "yarn" or rope.factor <= 1:
        return scale
    all_dims = inner.number("mscale_all_dim", 0.0, low=0.0, high=1e6)
    return scale * (0.1 * all_dims * math.log(rope.factor) + 1) ** 2


def _rotated_alone(reader: ConfigReader) -> ConfigReader:
    """Without the share of a query head that is rotated: that part is a vector of its own."""
    key = "partial_rotary_factor"
    values = {
        name: {k: v for k, v in value.items() if k != key} if name in _ROPES else value
        for name, value in reader.values.items()
        if name != key and (name not in _ROPES or isinstance(value, dict))
    }
    return ConfigReader(values, reader.source)


def _latent_fields(reader: ConfigReader, norm_eps: float = 1e-6) -> dict[str, Any]:
    latent, rope = _latent(reader), read_rope(_rotated_alone(reader), max_positions(reader))
    # A row of the cache: all heads read the same one.
    sizes = {"num_key_value_heads": 1, "head_dim": latent.rank + latent.rope_size}
    own = ConfigReader({**reader.values, **sizes}, reader.source)
    return {
        **llama_fields(own, norm_eps=norm_eps, ropes=(rope,)),
        **grown_queries(reader, rope),
        "latent": latent,
        "attention_scale": _score_scale(reader, latent, rope),
        "interleaved_rope": reader.boolean("rope_interleave", True),
        "num_extra_layers": reader.integer("num_nextn_predict_layers", 0, low=0, high=1 << 10),
    }


def _v3_fields(reader: ConfigReader, norm_eps: float = 1e-6) -> dict[str, Any]:
    return {**_latent_fields(reader, norm_eps), "experts": routed_experts(reader)}


def _v2_fields(reader: ConfigReader) -> dict[str, Any]:
    """Softmax over all experts; of the 236B in groups, without a bias."""
    if reader.values.get("topk_method") == "greedy":
        reader = reader.renamed({}, n_group=1, topk_group=1)
    return {**_latent_fields(reader), "experts": routed_experts(reader, "softmax", False)}


def _mistral4_fields(reader: ConfigReader) -> dict[str, Any]:
    return {**_latent_fields(reader), "experts": routed_experts(reader, "softmax")}


def _names(config: ModelConfig) -> TensorNames:
    assert config.latent is not None
    has_rank = config.latent.query_rank > 0
    query = "self_attn.q_a_proj" if has_rank else "self_attn.q_proj"
    selection = config.experts is None or config.experts.router.has_selection_bias
    experts = EXPERTS if selection else tuple(replace(e, selection_bias="") for e in EXPERTS)
    return LLAMA_NAMES.with_layer(
        qkv=(query, "self_attn.kv_a_proj_with_mqa"),
        q_norm="self_attn.q_a_layernorm" if has_rank else "",
        k_norm="self_attn.kv_a_layernorm",
        q_b="self_attn.q_b_proj" if has_rank else "",
        kv_b="self_attn.kv_b_proj",
        k_b="self_attn.k_b_proj",
        v_b="self_attn.v_b_proj",
        experts=experts,
    )


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    """V3's experts are chosen by sigmoids, V2's by a softmax; early files do not say it.

    Files since 2025 have MLA's own sizes beside those of the cache's rows.
    """
    rope, rank = metadata.integer("rope.dimension_count"), metadata.integer(LATENT_RANK)
    sizes = {
        name: metadata.integer(f"attention.{name}_length_mla", 0)
        or metadata.integer(f"attention.{name}_length")
        for name in ("key", "value")
    }
    has_rank = metadata.has_tensor("blk.0.attn_q_a.weight")
    last = draft_layers(metadata)["num_hidden_layers"] - 1
    has_bias = metadata.has_tensor(f"blk.{last}.exp_probs_b.bias")
    scores = gating(metadata, SIGMOID if has_bias else SOFTMAX, SOFTMAX, SIGMOID)
    is_mistral = metadata.architecture == "mistral4"
    is_v2 = scores == SOFTMAX and not is_mistral
    return {
        **routed_gguf(metadata, norms_chosen=scores == SIGMOID or is_mistral),
        **({"model_type": "deepseek_v2"} if is_v2 else {}),
        **gguf_grown_queries(metadata, 0.1 if is_mistral else 0.0),
        "head_dim": None,
        "kv_lora_rank": rank,
        "q_lora_rank": metadata.integer("attention.q_lora_rank") if has_rank else None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": sizes["key"] - rope,
        "v_head_dim": sizes["value"],
    }


_GGUF_NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
}
_GGUF = GgufArchitecture(("deepseek2",), _gguf_values, _GGUF_NAMES, rope_keys=YARN_KEYS)


_READS = (
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *(*ROUTED_KEYS, "scoring_func", "topk_method", "rope_interleave", "partial_rotary_factor"),
)
DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM", "DeepseekV2Model"),
    read_fields=_v2_fields,
    tensor_names=_names,
    reads=_READS,
    fixed={
        "attention_bias": (False,),
        "norm_topk_prob": (False,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
    },
    defaults={"n_shared_experts": 2, "first_k_dense_replace": 0},
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM", "DeepseekV3Model"),
    bos_id=0,
    eos_id=1,
    read_fields=_v3_fields,
    tensor_names=_names,
    reads=_READS,
    fixed={
        "attention_bias": (False,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    defaults={"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
              "first_k_dense_replace": 3},
    gguf=_GGUF,
)  # fmt: skip
MISTRAL4 = Family(
    name="mistral4",
    architectures=("Mistral4ForCausalLM", "Mistral4Model"),
    bos_id=1,
    eos_id=2,
    read_fields=_mistral4_fields,
    tensor_names=_names,
    reads=_READS,
    fixed={
        "attention_bias": (False,),
        "scoring_func": ("softmax",),
        "n_group": (1,),
        "topk_group": (1,),
    },
    defaults={"n_shared_experts": 1, "first_k_dense_replace": 0},
    gguf=replace(_GGUF, kinds=("mistral4",)),
)
# Kimi K2 is DeepSeek-V3 by another name.
KIMI_K2 = replace(
    DEEPSEEK_V3, name="kimi_k2", architectures=("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    name="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"),
    read_fields=lambda reader: _v3_fields(reader, 1e-5),
    defaults={"routed_scaling_factor": 1.8, "first_k_dense_replace": 1},
)
