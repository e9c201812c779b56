"""Mistral: Llama with sliding-window attention. Bamboo: Mistral with dReLU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.families.family import Family, num_layers, windows
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.json_reader import ConfigReader


def mistral_fields(reader: ConfigReader) -> dict[str, Any]:
    """Llama's fields, and a window: 4096 without the key, none for null."""
    has_window = reader.values.get("sliding_window", 0) is not None
    sliding = (has_window,) * num_layers(reader)
    return {**llama_fields(reader), "windows": windows(reader, sliding, 4096)}


MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM", "MistralModel"),
    bos_id=1,
    eos_id=2,
    read_fields=mistral_fields,
    reads=("sliding_window",),
    defaults={"num_key_value_heads": 8},
)


def _bamboo_fields(reader: ConfigReader) -> dict[str, Any]:
    """Mistral's fields; the gate's relu is applied to up, too."""
    fields = mistral_fields(reader)
    if fields["activation_fn"] != "relu":
        raise reader.fail("hidden_act", f"is {fields['activation_fn']}; Bamboo's is relu")
    return {**fields, "activation_fn": "drelu"}


# Bamboo and TurboSparse-Mistral, with predictors in the checkpoint for --mode lowrank.
BAMBOO = replace(
    MISTRAL,
    name="bamboo",
    architectures=("BambooForCausalLM", "BambooModel"),
    read_fields=_bamboo_fields,
    defaults={"num_key_value_heads": 8, "hidden_act": "relu"},
)
