"""Arcee AFM and Nemotron: Llama's attention, and an FFN of two matrices with squared ReLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.families.family import Family, GgufArchitecture, max_positions
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
from hotcold.model.config.gguf_metadata import Metadata, gated_values
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.rope import read_rope


def _arcee_fields(reader: ConfigReader) -> dict[str, Any]:
    fields = llama_fields(reader, activation_default="relu2", norm_eps=1e-5)
    return {**fields, "has_gate": False}


def _nemotron_fields(reader: ConfigReader) -> dict[str, Any]:
    """LayerNorms with weights 1 + w; half of a head's dimensions are rotated."""
    rope = read_rope(reader, max_positions(reader), share=0.5)
    return {
        **llama_fields(reader, activation_default="relu2", ropes=(rope,)),
        "has_gate": False,
        "norm_kind": "layernorm",
        "norm_bias": True,
        "norm_eps": reader.number("norm_eps", 1e-5, low=0.0, high=1.0),
        "norm_offset": 1.0,
    }


def _arcee_gguf(metadata: Metadata) -> dict[str, Any]:
    return {**gated_values(metadata), "hidden_act": "relu2"}


def _nemotron_gguf(metadata: Metadata) -> dict[str, Any]:
    epsilon = metadata.number("attention.layer_norm_epsilon")
    return {**gated_values(metadata, epsilon), "hidden_act": "relu2", "norm_eps": epsilon}


_GGUF_NAMES = {"mlp.up_proj": "ffn_up"}


ARCEE = Family(
    name="arcee",
    architectures=("ArceeForCausalLM", "ArceeModel"),
    bos_id=128000,
    eos_id=128001,
    read_fields=_arcee_fields,
    tensor_names=LLAMA_NAMES.with_layer(gate="mlp.up_proj", up=""),
    gguf=GgufArchitecture(("arcee",), _arcee_gguf, _GGUF_NAMES, pairs_rows=True),
)
NEMOTRON = replace(
    ARCEE,
    name="nemotron",
    architectures=("NemotronForCausalLM", "NemotronModel"),
    bos_id=2,
    eos_id=3,
    read_fields=_nemotron_fields,
    reads=("partial_rotary_factor",),
    gguf=GgufArchitecture(("nemotron",), _nemotron_gguf, _GGUF_NAMES),
)
