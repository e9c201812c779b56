"""Seed-OSS: Llama with heads of 128 and biases of q, k and v."""

from __future__ import annotations

from typing import Any

from hotcold.model.config.families.family import Family, GgufArchitecture
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.gguf_metadata import Metadata, gated_values
from hotcold.model.config.json_reader import ConfigReader


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    return {
        **llama_fields(reader),
        "attention_bias": reader.boolean("attention_bias", True),
        "out_bias": reader.boolean("attention_out_bias", False),
    }


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    out_bias = metadata.has_tensor("blk.0.attn_output.bias")
    return {**gated_values(metadata), "attention_out_bias": out_bias}


SEED_OSS = Family(
    name="seed_oss",
    architectures=("SeedOssForCausalLM", "SeedOssModel"),
    bos_id=0,
    eos_id=2,
    read_fields=_read_fields,
    reads=("attention_out_bias",),
    defaults={"head_dim": 128, "num_key_value_heads": 8},
    gguf=GgufArchitecture(
        ("seed_oss",), _gguf_values, {"post_attention_layernorm": "post_attention_norm"}
    ),
)
