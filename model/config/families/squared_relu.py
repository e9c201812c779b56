"""Arcee AFM and Nemotron: Llama's attention, and an FFN of two matrices with squared ReLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.families.family import Family, max_positions
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
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
        "norm_eps": reader.number("norm_eps", 1e-5, low=0.0, high=1.0),
        "norm_offset": 1.0,
    }


ARCEE = Family(
    name="arcee",
    architectures=("ArceeForCausalLM", "ArceeModel"),
    bos_id=128000,
    eos_id=128001,
    read_fields=_arcee_fields,
    tensor_names=LLAMA_NAMES.with_layer(gate="mlp.up_proj", up=""),
)
NEMOTRON = replace(
    ARCEE,
    name="nemotron",
    architectures=("NemotronForCausalLM", "NemotronModel"),
    bos_id=2,
    eos_id=3,
    read_fields=_nemotron_fields,
    reads=("partial_rotary_factor",),
)
