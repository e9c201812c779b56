"""Phi-3: Llama with q, k and v in one tensor, gate and up in another; longrope, windows."""

from __future__ import annotations

from typing import Any

from hotcold.model.config.families.family import (
    Family,
    GgufArchitecture,
    max_positions,
    num_layers,
    windows,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
from hotcold.model.config.gguf_metadata import Metadata, gated_values, window
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.rope import read_rope


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    has_window = reader.has("sliding_window")
    kinds = ("default", "longrope")
    rope = read_rope(reader, max_positions(reader), share=1.0, kinds=kinds)
    return {
        **llama_fields(reader, norm_eps=1e-5, ropes=(rope,)),
        "fused_qkv": "stacked",
        "fused_gate_up": True,
        "windows": windows(reader, (has_window,) * num_layers(reader)),
    }


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    return {**gated_values(metadata), "sliding_window": window(metadata)}


_GGUF_NAMES = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}


_NAMES = LLAMA_NAMES.with_layer(
    qkv=("self_attn.qkv_proj",), gate="mlp.gate_up_proj", up="mlp.gate_up_proj"
)
PHI3 = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM", "Phi3Model"),
    bos_id=1,
    eos_id=32000,
    read_fields=_read_fields,
    tensor_names=_NAMES,
    reads=("sliding_window", "partial_rotary_factor"),
    gguf=GgufArchitecture(("phi3",), _gguf_values, _GGUF_NAMES),
)
