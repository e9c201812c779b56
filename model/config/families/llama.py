"""Llama: RMSNorm, rotary positions, a gated FFN. Many families are Llama with changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.activations import activation
from hotcold.model.config.families.family import (
    MAX_WIDTH,
    Family,
    GgufArchitecture,
    grouped_kv_heads,
    head_sizes,
    max_positions,
)
from hotcold.model.config.gguf_metadata import Metadata, gated_values, window
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import RopeConfig
from hotcold.model.config.rope import read_rope

POWERINFER_DOWN = "blk.0.ffn_down_t.weight"


def llama_fields(
    reader: ConfigReader,
    *,
    activation_key: str = "hidden_act",
    activation_default: str = "silu",
    norm_eps: float = 1e-6,
    ropes: tuple[RopeConfig, ...] = (),
) -> dict[str, Any]:
    """Read Llama's keys; other families pass their defaults and change some fields.

    Families with other ropes pass `ropes`.
    """
    sizes = head_sizes(reader, free_head_dim=True)
    bias = reader.boolean("attention_bias", False)
    return {
        **sizes,
        **activation(reader, activation_key, activation_default),
        "num_kv_heads": grouped_kv_heads(reader, "num_key_value_heads", sizes["num_heads"]),
        "ffn_size": reader.integer("intermediate_size", high=MAX_WIDTH),
        "has_gate": True,
        "norm_kind": "rmsnorm",
        "norm_eps": reader.number("rms_norm_eps", norm_eps, low=0.0, high=1.0),
        "attention_bias": bias,
        "out_bias": bias,
        "ffn_bias": reader.boolean("mlp_bias", False),
        "ropes": ropes or (read_rope(reader, max_positions(reader)),),
    }


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    """Mixtures are Mixtral's, models with windows Mistral's; llama.cpp ignores the windows.

    PowerInfer's files have down transposed, but no activation function: all are ReLU.
    """
    values = {**gated_values(metadata), "sliding_window": window(metadata)}
    if metadata.has_tensor("blk.0.ffn_gate_inp.weight"):
        return {**values, "model_type": "mixtral"}
    if metadata.has_tensor(POWERINFER_DOWN):
        values["hidden_act"] = "relu"
    return {**values, "model_type": "mistral"} if values["sliding_window"] else values


LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM", "LlamaModel"),
    bos_id=1,
    eos_id=2,
    read_fields=llama_fields,
    gguf=GgufArchitecture(("llama",), _gguf_values, pairs_rows=True),
)
# ProSparse-Llama-2: its activation is fatrelu.
SPARSE_LLAMA = replace(
    LLAMA, name="sparsellama", architectures=("SparseLlamaForCausalLM", "SparseLlamaModel")
)
