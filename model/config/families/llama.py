"""Llama: RMSNorm, rotary positions, an FFN with a gate."""

from __future__ import annotations

from typing import Any

from model.config.families.family import (
    MAX_WIDTH,
    Family,
    activation_fn,
    grouped_kv_heads,
    head_sizes,
    max_positions,
)
from model.config.families.tensor_names import LayerNames, TensorNames
from model.config.json_reader import ConfigReader
from model.config.rope import read_rope


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    sizes = head_sizes(reader, free_head_dim=True)
    return {
        **sizes,
        "num_kv_heads": grouped_kv_heads(reader, "num_key_value_heads", sizes["num_heads"]),
        "ffn_size": reader.integer("intermediate_size", high=MAX_WIDTH),
        "has_gate": True,
        "activation_fn": activation_fn(reader, "hidden_act", "silu"),
        "norm_kind": "rmsnorm",
        "norm_eps": reader.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        "attention_bias": reader.boolean("attention_bias", False),
        "ffn_bias": reader.boolean("mlp_bias", False),
        "rope": read_rope(reader, max_positions(reader)),
    }


_NAMES = TensorNames(
    tokens="embed_tokens",
    layers="layers.{}.",
    layer=LayerNames(
        norm="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.o_proj",
        ffn_norm="post_attention_layernorm",
        gate="mlp.gate_proj",
        up="mlp.up_proj",
        down="mlp.down_proj",
    ),
    final_norm="norm",
)

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "LlamaModel"),
    prefixes=("model.",),
    bos_id=1,
    eos_id=2,
    tied_embeddings=False,
    read_fields=_read_fields,
    tensor_names=lambda config: _NAMES,
)
