"""StarCoder 2: Llama's attention with LayerNorms, biases everywhere, and an FFN of two matrices."""

from __future__ import annotations

from typing import Any

from hotcold.model.config.families.family import (
    Family,
    GgufArchitecture,
    num_layers,
    windows,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
from hotcold.model.config.gguf_metadata import Metadata, gated_values, window
from hotcold.model.config.json_reader import ConfigReader


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    reader = reader.renamed({}, activation_function=None)  # GPT-2's, which is not read
    bias, has_window = reader.boolean("use_bias", True), reader.has("sliding_window")
    return {
        **llama_fields(reader, activation_default="gelu_pytorch_tanh"),
        **dict.fromkeys(("attention_bias", "out_bias", "ffn_bias"), bias),
        "has_gate": False,
        "norm_kind": "layernorm",
        "norm_bias": True,
        "norm_eps": reader.number("norm_epsilon", 1e-5, low=0.0, high=1.0),
        "windows": windows(reader, (has_window,) * num_layers(reader)),
    }


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    epsilon = metadata.number("attention.layer_norm_epsilon")
    return {
        **gated_values(metadata, epsilon),
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": epsilon,
        "use_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": window(metadata) or 4096,  # of all; llama.cpp leaves it out
    }


STARCODER2 = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM", "Starcoder2Model"),
    bos_id=50256,
    eos_id=50256,
    tied_embeddings=True,
    read_fields=_read_fields,
    tensor_names=LLAMA_NAMES.with_layer(gate="mlp.c_fc", up="", down="mlp.c_proj"),
    reads=("use_bias", "sliding_window"),
    defaults={"num_key_value_heads": 2},
    gguf=GgufArchitecture(("starcoder2",), _gguf_values, {"mlp.c_fc": "ffn_up"}),
)
