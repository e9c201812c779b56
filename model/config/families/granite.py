"""Granite: Llama with scales of embeddings, residual updates, scores and logits.

Granite MoE has experts in two tensors, and some kinds a shared expert. Granite 4 has one file for
all: dense models call their FFN `shared_mlp`, and some have no positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hotcold.model.config.families.experts import (
    COUNT_KEYS,
    expert_size,
    fused,
    read_router,
)
from hotcold.model.config.families.family import (
    MAX_WIDTH,
    Family,
    GgufArchitecture,
    num_layers,
    of_layers,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import (
    GGUF_EXPERTS,
    LLAMA_NAMES,
    ExpertNames,
    RecurrentNames,
    TensorNames,
)
from hotcold.model.config.gguf_metadata import Metadata, gated_values, head_dim, recurrent_kinds
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.layer_spec import RecurrentSpec
from hotcold.model.config.model_config import ExpertsConfig, ModelConfig
from hotcold.model.errors import shown

_LOW, _HIGH = 1e-6, 1e6
_SHARED = "shared_mlp.input_linear"  # rows of gate, then of up
_SHARED_DOWN = "shared_mlp.output_linear"
_EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer.weight",
    gate="block_sparse_moe.input_linear.weight",
    up="block_sparse_moe.input_linear.weight",
    down="block_sparse_moe.output_linear.weight",
    shared_gate=f"{_SHARED}.weight",
    shared_up=f"{_SHARED}.weight",
    shared_down=f"{_SHARED_DOWN}.weight",
)
_NEW = fused(replace(_EXPERTS, router="block_sparse_moe.router.weight"), block="block_sparse_moe")
_NAMES = LLAMA_NAMES.with_layer(experts=(_EXPERTS, _NEW, *GGUF_EXPERTS))
_SCALES = (
    "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
)  # fmt: skip
_ATTENTION = ("attention", "full_attention")  # in layer_types
_MAMBA = ("mamba", "linear_attention")
MAMBA_FIXED: dict[str, tuple[Any, ...]] = {
    "mamba_proj_bias": (False,),
    # Infinity as JSON has it, and as transformers writes it.
    "time_step_limit": ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}]),
}
MAMBA_NAMES = RecurrentNames(
    inputs=("in_proj",),
    conv="conv1d",
    decay="A_log",
    step_bias="dt_bias",
    norm="norm",
    skip="D",
    out="out_proj",
)
_ROTATES = {"rope": True, "nope": False}  # position_embedding_type


def _granite_fields(reader: ConfigReader, positions: str = "rope") -> dict[str, Any]:
    """Missing scales are 1, that of attention's scores too; `positions` is their default kind."""
    scales = [reader.number(key, 1.0, low=_LOW, high=_HIGH) for key in _SCALES]
    embedding, residual, attention, logits = scales
    kind = reader.text("position_embedding_type", positions)
    if kind not in _ROTATES:
        what = f"is {shown(kind)}; supported: {', '.join(_ROTATES)}"
        raise reader.fail("position_embedding_type", what)
    return {
        **llama_fields(reader),
        "layer_ropes": () if _ROTATES[kind] else (-1,) * num_layers(reader),
        "embedding_scale": embedding,
        "residual_scale": residual,
        "attention_scale": attention,
        "logit_scale": 1 / logits,
    }


def _shared_size(reader: ConfigReader) -> int:
    key = "shared_intermediate_size"
    has_shared = reader.has(key) and reader.values[key] != 0
    return expert_size(reader, key) if has_shared else 0


def _moe_fields(reader: ConfigReader, positions: str = "rope") -> dict[str, Any]:
    fields = _granite_fields(reader, positions)
    router = read_router(reader, "num_local_experts", "softmax_of_chosen", False)
    size, shared = fields["ffn_size"], _shared_size(reader)
    experts = ExpertsConfig(router=router, size=size, shared_size=shared)
    return {**fields, "experts": experts}


def _hybrid_fields(reader: ConfigReader) -> dict[str, Any]:
    """Granite 4: with experts as Granite MoE, else with the shared FFN alone; also Mamba-2."""
    if any(reader.has(key) and reader.values[key] != 0 for key in COUNT_KEYS):
        fields = _moe_fields(reader, "nope")
    else:
        size = expert_size(reader, "shared_intermediate_size")
        dense = ConfigReader({**reader.values, "intermediate_size": size}, reader.source)
        splits = reader.boolean("splits_shared_mlp", False)  # of GGUF files alone
        fields = {**_granite_fields(dense, "nope"), "fused_gate_up": not splits}
    return {**fields, **_mamba_fields(reader, fields["hidden_size"])}


def _mamba_fields(reader: ConfigReader, hidden: int) -> dict[str, Any]:
    """Fields of layers of Mamba-2: {} where there are none."""
    kinds = of_layers(reader, "layer_types", *_ATTENTION, *_MAMBA)
    inner = reader.integer("mamba_expand", 2, high=1 << 10) * hidden
    return mamba_fields(reader, [kind in _MAMBA for kind in kinds], inner)


def mamba_fields(reader: ConfigReader, is_mamba: Sequence[bool], inner: int) -> dict[str, Any]:
    """Return fields of layers of Mamba-2 with so many values; {} where there are none.

    Errors:  ConfigError for sizes that do not divide, and what is not supported
    """
    recurrent = tuple(layer for layer, own in enumerate(is_mamba) if own)
    if not recurrent:
        return {}
    heads = reader.integer("mamba_n_heads", 128, high=MAX_WIDTH)
    groups = reader.integer("mamba_n_groups", 1, high=heads)
    if heads % groups or inner % heads:
        raise reader.fail(
            "mamba_n_heads", f"is {heads}, no multiple of {groups} groups that divides {inner}"
        )
    if reader.values.get("mamba_d_head", "auto") not in ("auto", inner // heads):
        raise reader.fail("mamba_d_head", f"is not {inner // heads}, which is not supported")
    return {
        "recurrent": RecurrentSpec(
            kind="mamba",
            num_key_heads=groups,
            num_value_heads=heads,
            key_dim=reader.integer("mamba_d_state", 256, high=MAX_WIDTH),
            value_dim=inner // heads,
            conv_size=reader.integer("mamba_d_conv", 4, high=32),
            has_conv_bias=reader.boolean("mamba_conv_bias", True),
        ),
        "recurrent_layers": recurrent,
    }


def _hybrid_names(config: ModelConfig) -> TensorNames:
    up = _SHARED if config.fused_gate_up else "shared_mlp.up"
    return _NAMES.with_layer(
        gate=_SHARED, up=up, down=_SHARED_DOWN, recurrent=MAMBA_NAMES.below("mamba.")
    )


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    """Without attention.scale llama.cpp takes the usual one, 1 / sqrt(head_dim)."""
    usual = max(1, head_dim(metadata)) ** -0.5
    rotates = metadata.boolean("rope.scaling.finetuned", True)
    return {
        **gated_values(metadata),
        "position_embedding_type": "rope" if rotates else "nope",
        "embedding_multiplier": metadata.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": metadata.number("residual_scale", 0.0) or 1.0,
        "attention_multiplier": metadata.number("attention.scale", 0.0) or usual,
        "logits_scaling": metadata.number("logit_scale", 1.0) or 1.0,
    }


def _moe_gguf(metadata: Metadata) -> dict[str, Any]:
    shared = metadata.integer("expert_shared_feed_forward_length", 0)
    return {**_gguf_values(metadata), "shared_intermediate_size": shared}


def _hybrid_gguf(metadata: Metadata) -> dict[str, Any]:
    """Granite 4 H: Mamba-2 in layers without KV heads; dense models have gate and up apart."""
    kinds = recurrent_kinds(metadata, "mamba")
    first = kinds.index("mamba") if "mamba" in kinds else 0
    hidden, inner = metadata.integer("embedding_length"), metadata.integer("ssm.inner_size")
    if inner % max(1, hidden):
        raise metadata.fail("ssm.inner_size", f"is {inner}, no multiple of {hidden}")
    return {
        **_moe_gguf(metadata),
        "layer_types": kinds,
        "splits_shared_mlp": True,
        "mamba_expand": inner // max(1, hidden),
        "mamba_n_heads": metadata.integer("ssm.time_step_rank"),
        "mamba_n_groups": metadata.integer("ssm.group_count"),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": metadata.has_tensor(f"blk.{first}.ssm_conv1d.bias"),
    }


_TOKENS: dict[str, Any] = {"bos_id": 1, "eos_id": 2}
GRANITE = Family(
    name="granite",
    architectures=("GraniteForCausalLM", "GraniteModel"),
    **_TOKENS,
    read_fields=_granite_fields,
    reads=("position_embedding_type", *_SCALES),
    gguf=GgufArchitecture(("granite",), _gguf_values, pairs_rows=True),
)
GRANITE_MOE = Family(
    name="granitemoe",
    architectures=("GraniteMoeForCausalLM", "GraniteMoeModel"),
    **_TOKENS,
    read_fields=_moe_fields,
    tensor_names=_NAMES,
    reads=(*COUNT_KEYS, "num_experts_per_tok", "shared_intermediate_size", *GRANITE.reads),
    defaults={"num_experts_per_tok": 2},
    gguf=GgufArchitecture(("granitemoe",), _moe_gguf, pairs_rows=True),
)
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    name="granitemoeshared",
    architectures=("GraniteMoeSharedForCausalLM", "GraniteMoeSharedModel"),
)
GRANITE_MOE_HYBRID = replace(
    GRANITE_MOE,
    name="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM", "GraniteMoeHybridModel"),
    read_fields=_hybrid_fields,
    tensor_names=_hybrid_names,
    reads=(*GRANITE_MOE.reads, "layer_types", "mamba_n_heads", "splits_shared_mlp"),
    fixed=MAMBA_FIXED,
    gguf=GgufArchitecture(
        ("granitehybrid",), _hybrid_gguf, {"mamba.in_proj": "ssm_in"}, pairs_rows=True
    ),
)
