"""Nemotron-H, Nano 2 and 3: blocks of Mamba-2, attention, FFN or experts, each with one norm.

A mixer and the FFN behind it are a layer here; where another mixer follows, its FFN has no neurons.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.families.experts import expert_size, named_experts
from hotcold.model.config.families.family import (
    MAX_LAYERS,
    MAX_WIDTH,
    Family,
    GgufArchitecture,
)
from hotcold.model.config.families.glm4_moe import routed_experts, routed_gguf
from hotcold.model.config.families.granite import MAMBA_FIXED, MAMBA_NAMES, mamba_fields
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import GGUF_EXPERTS, LLAMA_NAMES, TensorNames
from hotcold.model.config.gguf_metadata import SIGMOID, Metadata, gated_values, gating
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import shown

_MAMBA, _ATTENTION, _DENSE, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": _DENSE, "E": _EXPERTS}  # hybrid_override_pattern
_OLD_NAMES = {"mamba": _MAMBA, "attention": _ATTENTION}
# Granite's keys, by this family's.
_KEYS = {
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "attention_head_dim": "head_dim",
}


def _kinds(reader: ConfigReader) -> list[str]:
    """The kind of each block."""
    key = "hybrid_override_pattern"
    if not reader.has(key):
        key = "layers_block_type" if reader.has("layers_block_type") else "layer_types"
    found = reader.values.get(key)
    if isinstance(found, str | list) and 0 < len(found) <= MAX_LAYERS:
        kinds = [_LETTERS.get(kind) if isinstance(found, str) else _OLD_NAMES.get(kind, kind)
                 for kind in found if isinstance(kind, str)]  # fmt: skip
        if len(kinds) == len(found) and set(kinds) <= set(_LETTERS.values()):
            return [kind for kind in kinds if kind]
    what = f"{', '.join(_LETTERS)} for each block"
    raise reader.fail(key, f"is {shown(found, 60)}; give {what}")


def _layers(reader: ConfigReader) -> list[tuple[str, str]]:
    """Each layer's kinds of mixer and FFN; "" for none."""
    layers: list[tuple[str, str]] = []
    for kind in _kinds(reader):
        if kind in (_MAMBA, _ATTENTION):
            layers.append((kind, ""))
        elif layers and not layers[-1][1]:
            layers[-1] = (layers[-1][0], kind)
        else:
            raise reader.fail("hybrid_override_pattern", "has an FFN that follows no mixer: "
                              "not supported")  # fmt: skip
    if not layers[0][1]:
        raise reader.fail("hybrid_override_pattern", "has no FFN behind its first mixer: "
                          "not supported")  # fmt: skip
    return layers


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    layers = _layers(reader)
    own = reader.renamed(_KEYS, num_hidden_layers=len(layers), first_k_dense_replace=0)
    fields = llama_fields(own, activation_key="mlp_hidden_act", activation_default="relu2")
    fields |= {
        "num_layers": len(layers),
        "norm_eps": reader.number("layer_norm_epsilon", 1e-5, low=0.0, high=1.0),
        "has_gate": False,
        "layer_ropes": (-1,) * len(layers),
        "layer_ffn_sizes": tuple(fields["ffn_size"] * (ffn == _DENSE) for _, ffn in layers),
    }
    heads, size = (("mamba_n_heads", 128), ("mamba_d_head", 64))
    inner = own.integer(*heads, high=MAX_WIDTH) * own.integer(*size, high=MAX_WIDTH)
    fields |= mamba_fields(own, [mixer == _MAMBA for mixer, _ in layers], inner)
    if all(ffn != _EXPERTS for _, ffn in layers):
        return fields
    experts = replace(
        routed_experts(own),
        shared_size=expert_size(own, "moe_shared_expert_intermediate_size"),
        dense_layers=tuple(at for at, (_, ffn) in enumerate(layers) if ffn != _EXPERTS),
    )
    return {**fields, "experts": experts}


_NAMED = named_experts(
    "mixer", "up_proj", "", selection_bias="mixer.gate.e_score_correction_bias",
    shared_gate="mixer.shared_experts.up_proj.weight",
    shared_down="mixer.shared_experts.down_proj.weight",
)  # fmt: skip
_TWO: dict[str, Any] = {"up": "", "shared_up": ""}
_NAMES = replace(
    LLAMA_NAMES,
    tokens="embeddings",
    final_norm="norm_f",
).with_layer(
    norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out="mixer.o_proj",
    recurrent=MAMBA_NAMES.below("mixer."),
    ffn_norm="norm",
    gate="mixer.up_proj",
    up="",
    down="mixer.down_proj",
    experts=(
        replace(_NAMED, **_TWO),
        replace(_NAMED, **_TWO, gate="mixer.experts.up_proj", down="mixer.experts.down_proj"),
        *(
            replace(one, **_TWO, gate=one.up, shared_gate=one.shared_up)
            for one in GGUF_EXPERTS[::2]
        ),
    ),
)


def _names(config: ModelConfig) -> TensorNames:
    """Where there is no FFN, its norm is the mixer's, and is not used."""
    blocks, first = list[tuple[int, int]](), 0
    for layer in config.layers:
        blocks.append((first, first + (layer.ffn.num_neurons > 0)))
        first = blocks[-1][1] + 1
    return replace(_NAMES, blocks=(*blocks, (first, first)))  # and what there must not be


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    """Blocks with KV heads have attention, those with neurons an FFN or experts."""
    blocks = metadata.integer("block_count") - metadata.integer("nextn_predict_layers", 0)
    kv_heads, sizes = (
        metadata.integers(key, metadata.integer("block_count"))[:blocks]
        for key in ("attention.head_count_kv", "feed_forward_length")
    )
    ffn = _EXPERTS if metadata.integer("expert_count", 0) else _DENSE
    kinds = [
        _ATTENTION if heads else ffn if size else _MAMBA
        for heads, size in zip(kv_heads, sizes, strict=True)
    ]
    first = kinds.index(_MAMBA) if _MAMBA in kinds else 0
    epsilon = metadata.number("attention.layer_norm_epsilon")
    values = gated_values(metadata, epsilon)
    if ffn == _EXPERTS:
        gating(metadata, SIGMOID)
        values = routed_gguf(metadata, norms_chosen=True, epsilon=epsilon)
    heads, inner = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    return {
        **values,
        "hidden_act": None,
        "num_hidden_layers": blocks,
        "first_k_dense_replace": None,
        "partial_rotary_factor": None,  # nothing is rotated
        "layer_norm_epsilon": values["rms_norm_eps"],
        "layers_block_type": kinds,
        "moe_shared_expert_intermediate_size": metadata.integer(
            "expert_shared_feed_forward_length", values["intermediate_size"]
        ),
        "moe_latent_size": metadata.integer("moe_latent_size", 0) or None,
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // max(1, heads),
        "n_groups": metadata.integer("ssm.group_count"),
        "ssm_state_size": metadata.integer("ssm.state_size"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_conv_bias": metadata.has_tensor(f"blk.{first}.ssm_conv1d.bias"),
    }


NEMOTRON_H = Family(
    name="nemotron_h",
    architectures=("NemotronHForCausalLM", "NemotronHModel"),
    prefixes=("backbone.", "model."),
    bos_id=1,
    eos_id=2,
    read_fields=_read_fields,
    tensor_names=_names,
    reads=(
        *("hybrid_override_pattern", "layers_block_type", "layer_types", "moe_latent_size"),
        *("n_routed_experts", "num_local_experts", "num_experts_per_tok", "n_shared_experts"),
        *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "norm_topk_prob"),
        *("routed_scaling_factor", "n_group", "topk_group", "num_nextn_predict_layers"),
        *("sliding_window", "use_bias"),
    ),
    fixed={
        **MAMBA_FIXED,
        "mamba_hidden_act": ("silu",),
        "use_bias": (False,),
        "moe_latent_size": (),
        "sliding_window": (),
    },
    defaults={"num_key_value_heads": 8, "head_dim": 128},
    gguf=GgufArchitecture(
        ("nemotron_h", "nemotron_h_moe"),
        _gguf_values,
        {"norm": "attn_norm", "mixer.in_proj": "ssm_in", "mixer.up_proj": "ffn_up"},
    ),
)  # fmt: skip
