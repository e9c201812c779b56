"""Mistral: Llama with sliding-window attention. Ministral 3: yarn. Bamboo: dReLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.families.family import (
    Family,
    GgufArchitecture,
    max_positions,
    num_layers,
    windows,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.gguf_metadata import Metadata, gated_values, window
from hotcold.model.config.gguf_rope import rope_values
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import RopeConfig
from hotcold.model.config.rope import read_rope


def mistral_fields(reader: ConfigReader) -> dict[str, Any]:
    """Llama's fields, and a window: 4096 without the key, none for null."""
    has_window = reader.values.get("sliding_window", 0) is not None
    sliding = (has_window,) * num_layers(reader)
    return {**llama_fields(reader), "windows": windows(reader, sliding, 4096)}


MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    prefixes=("model.", "language_model.model.", "model.language_model.", "language_model."),
    bos_id=1,
    eos_id=2,
    read_fields=mistral_fields,
    reads=("sliding_window",),
    defaults={"num_key_value_heads": 8},
)


def _ministral3_fields(reader: ConfigReader) -> dict[str, Any]:
    """Llama's fields; queries grow with the position by llama_4_scaling_beta."""
    rope = read_rope(reader, max_positions(reader), theta=1e6)
    has_window = reader.has("sliding_window")
    return {
        **llama_fields(reader, norm_eps=1e-5, ropes=(rope,)),
        **grown_queries(reader, rope),
        "windows": windows(reader, (has_window,) * num_layers(reader)),
    }


def grown_queries(reader: ConfigReader, rope: RopeConfig) -> dict[str, Any]:
    """Return fields of queries that grow with the position by llama_4_scaling_beta; {} of others.

    rope: of keys
    """
    found = reader.values.get("rope_parameters") or reader.values.get("rope_scaling") or {}
    growth = ConfigReader(found, f"{reader.source}: rope_parameters").number(
        "llama_4_scaling_beta", 0.0, low=0.0, high=1e6
    )
    if not growth:
        return {}
    return {"ropes": (rope, replace(rope, query_growth=growth)), "query_rope": 1}


def _ministral3_gguf(metadata: Metadata) -> dict[str, Any]:
    """Without yarn it is a Mistral, as Mistral Small 3 is; queries grow in yarn's own units."""
    values = {**gated_values(metadata), "sliding_window": window(metadata)}
    grown = gguf_grown_queries(metadata, 0.0)
    return {**values, **grown} if grown else {**values, "model_type": "mistral"}


def gguf_grown_queries(metadata: Metadata, default: float) -> dict[str, Any]:
    """config.json's rope of queries that grow with the position; {} of others.

    default: of a model whose converter left it out
    """
    growth = metadata.number("attention.temperature_scale", default)
    if not growth:
        return {}
    scaling = rope_values(metadata).get("rope_scaling", {})
    original = scaling.get("original_max_position_embeddings", 0)
    if metadata.integer("attention.temperature_length", original) != original:
        raise metadata.fail("attention.temperature_length", f"is not {original}: not supported")
    return {"rope_scaling": {**scaling, "llama_4_scaling_beta": growth}}


# Of yarn's factor of cosines and sines.
YARN_KEYS = ("scaling.yarn_log_multiplier",)


MINISTRAL3 = replace(
    MISTRAL,
    name="ministral3",
    architectures=("Ministral3ForCausalLM", "Ministral3Model"),
    read_fields=_ministral3_fields,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144},
    gguf=GgufArchitecture(("mistral3",), _ministral3_gguf, pairs_rows=True, rope_keys=YARN_KEYS),
)


def _bamboo_fields(reader: ConfigReader) -> dict[str, Any]:
    """Mistral's fields; the gate's relu is applied to up, too."""
    return {**mistral_fields(reader), "activation_fn": "drelu"}


def _bamboo_gguf(metadata: Metadata) -> dict[str, Any]:
    return {**gated_values(metadata), "hidden_act": "relu", "sliding_window": window(metadata)}


# Bamboo and TurboSparse-Mistral, with predictors in the checkpoint for --mode lowrank.
BAMBOO = replace(
    MISTRAL,
    name="bamboo",
    architectures=("BambooForCausalLM", "BambooModel"),
    read_fields=_bamboo_fields,
    fixed={"hidden_act": ("relu",)},
    defaults={"num_key_value_heads": 8, "hidden_act": "relu"},
    gguf=GgufArchitecture(("bamboo",), _bamboo_gguf, pairs_rows=True),
)
