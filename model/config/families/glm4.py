"""GLM-4 and GLM-Z1 of 2025: four norms a layer, rope in pairs of neighbours on half of a head."""

from __future__ import annotations

from typing import Any

from hotcold.model.config.families.family import Family, GgufArchitecture, max_positions
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
from hotcold.model.config.gguf_metadata import SECTIONS, Metadata, gated_values, rotary_share
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.rope import read_rope


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    rope = read_rope(reader, max_positions(reader), share=0.5)
    return {
        **llama_fields(reader, norm_eps=1.5625e-7, ropes=(rope,)),
        "attention_bias": reader.boolean("attention_bias", True),
        "out_bias": False,
        "has_output_norms": True,
        "fused_gate_up": True,
        "interleaved_rope": reader.boolean("rope_interleave", True),
    }


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    """Files of models with pictures have rows of q and k in halves."""
    return {
        **gated_values(metadata),
        "partial_rotary_factor": rotary_share(metadata),
        "rope_interleave": not metadata.has(f"rope.{SECTIONS[0]}"),
    }


GLM4 = Family(
    name="glm4",
    architectures=("Glm4ForCausalLM", "Glm4Model"),
    read_fields=_read_fields,
    tensor_names=LLAMA_NAMES.with_layer(
        attention_norm="post_self_attn_layernorm",
        ffn_output_norm="post_mlp_layernorm",
        gate="mlp.gate_up_proj",
        up="mlp.gate_up_proj",
    ),
    reads=("partial_rotary_factor", "rope_interleave"),
    defaults={"num_key_value_heads": 2},
    gguf=GgufArchitecture(
        ("glm4",), _gguf_values, {"mlp.gate_up_proj": "ffn_up"}, rope_keys=SECTIONS
    ),
)
