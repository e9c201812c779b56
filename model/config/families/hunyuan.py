"""Hunyuan (A13B with experts): Llama with norms of q and k behind their rotation, longer rope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.families.experts import (
    COUNT_KEYS,
    layouts_of,
    named_experts,
    read_router,
    shared_in,
)
from hotcold.model.config.families.family import (
    MAX_WIDTH,
    Family,
    GgufArchitecture,
    max_positions,
    num_layers,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
from hotcold.model.config.gguf_metadata import Metadata, expert_length, gated_values
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ExpertsConfig, RopeConfig
from hotcold.model.config.rope import DEFAULT_THETA, read_rope
from hotcold.model.errors import shown

_ROPES = ("rope_scaling", "rope_parameters")


def _rope(reader: ConfigReader, head_dim: int) -> RopeConfig:
    """A dynamic rope with alpha has a fixed base period: theta * alpha ** (d / (d - 2)).

    Source:  compute_ntk_alpha_rope_parameters of transformers/models/hunyuan_v1_dense
    """
    found = next((reader.values.get(key) for key in _ROPES if reader.has(key)), None)
    if not isinstance(found, dict) or "dynamic" not in (found.get("rope_type"), found.get("type")):
        return read_rope(reader, max_positions(reader))
    inner = ConfigReader(found, f"{reader.source}: rope_scaling")
    alpha = inner.number("alpha", 0.0, low=0.0, high=1e9)
    if not alpha or head_dim <= 2:
        return read_rope(reader, max_positions(reader))
    outer = reader.number("rope_theta", DEFAULT_THETA, low=1e-6, high=1e12)
    theta = inner.number("rope_theta", outer, low=1e-6, high=1e12)
    return RopeConfig(theta=theta * alpha ** (head_dim / (head_dim - 2)))


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    plain = {key: value for key, value in reader.values.items() if key not in _ROPES}
    fields = llama_fields(ConfigReader(plain, reader.source), norm_eps=1e-5)
    rope = _rope(reader, fields["head_dim"])
    return {
        **fields,
        "ropes": (rope,),
        "qk_norm": "head" if reader.boolean("use_qk_norm", True) else "",
        "norms_rotated": True,
    }


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    """A file has the longer base period itself."""
    normed = metadata.has_tensor("blk.0.attn_q_norm.weight")
    return {**gated_values(metadata), "use_qk_norm": normed}


HUNYUAN_NAMES = LLAMA_NAMES.with_layer(
    q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"
)
HUNYUAN = Family(
    name="hunyuan_v1_dense",
    architectures=("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Model"),
    bos_id=1,
    eos_id=2,
    read_fields=_read_fields,
    tensor_names=HUNYUAN_NAMES,
    reads=("use_qk_norm",),
    gguf=GgufArchitecture(("hunyuan-dense",), _gguf_values),
)


# What A13B's config.json says of itself; false stands for none.
_USUAL = {
    "norm_topk_prob": (True,),
    "use_cla": (False,),
    "routed_scaling_factor": (False,),
    "n_group": (False,),
    "topk_group": (False,),
}


def _moe_fields(reader: ConfigReader) -> dict[str, Any]:
    """Its config.json has lists with a number for each layer, which are equal."""
    keys = ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")
    own = reader.renamed({}, **{key: _of_all_layers(reader, key) for key in keys})
    fields = _read_fields(own)
    router = read_router(own, "num_experts", "softmax", True, "moe_topk")
    size = own.integer("moe_intermediate_size", fields["ffn_size"], high=MAX_WIDTH)
    shared = own.integer("num_shared_expert", 1, high=1 << 10)
    skipped = own.integer("moe_layer_num_skipped", 0, low=0, high=1 << 20)
    layers = tuple(range(min(skipped, num_layers(own))))
    return {
        **fields,
        "experts": ExpertsConfig(
            router=router, size=size, shared_size=size * shared, dense_layers=layers
        ),
    }


def _of_all_layers(reader: ConfigReader, key: str) -> Any:
    found = reader.values.get(key)
    if not isinstance(found, list) or not found:
        return found
    if len(found) != num_layers(reader) or any(one != found[0] for one in found):
        raise reader.fail(key, f"is {shown(found, 60)}; give the same number for each layer")
    return found[0]


def _moe_gguf(metadata: Metadata) -> dict[str, Any]:
    return {
        **_gguf_values(metadata),
        "moe_topk": metadata.integer("expert_used_count"),
        "num_experts_per_tok": None,
        "moe_intermediate_size": expert_length(metadata),
        "num_shared_expert": metadata.integer("expert_shared_count", 1),
    }


_EXPERTS = layouts_of(
    named_experts("mlp", router="mlp.gate.wg.weight", **shared_in("mlp.shared_mlp"))
)
HUNYUAN_MOE = replace(
    HUNYUAN,
    name="hunyuan_v1_moe",
    architectures=("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Model"),
    read_fields=_moe_fields,
    tensor_names=HUNYUAN_NAMES.with_layer(experts=_EXPERTS),
    reads=("use_qk_norm", *COUNT_KEYS, "moe_intermediate_size", *_USUAL),
    fixed=_USUAL,
    gguf=GgufArchitecture(("hunyuan-moe",), _moe_gguf),
)
