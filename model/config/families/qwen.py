"""Qwen2: Llama with biases of q, k and v. Qwen3: with norms of q and k instead."""

from __future__ import annotations

from typing import Any

from hotcold.model.config.families.family import (
    Family,
    GgufArchitecture,
    sliding_layers,
    windows,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.gguf_metadata import SECTIONS
from hotcold.model.config.json_reader import ConfigReader

_READS = ("sliding_window", "layer_types")


def _windows(reader: ConfigReader) -> tuple[int, ...]:
    """Read windows: with use_sliding_window, in the layers from max_window_layers on."""
    uses = reader.boolean("use_sliding_window", False)
    first = reader.integer("max_window_layers", 28, low=0, high=1 << 20)
    has_size = reader.values.get("sliding_window", 0) is not None
    sliding = sliding_layers(reader, lambda layer: uses and has_size and layer >= first)
    if any(sliding) and not uses:
        raise reader.fail("layer_types", "has windows, which use_sliding_window turns off")
    return windows(reader, sliding, 4096)


def _qwen2_fields(reader: ConfigReader) -> dict[str, Any]:
    biases = {"attention_bias": True, "out_bias": False}
    return {**llama_fields(reader), **biases, "windows": _windows(reader)}


def _qwen3_fields(reader: ConfigReader) -> dict[str, Any]:
    return {**llama_fields(reader), "qk_norm": "head", "windows": _windows(reader)}


QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    prefixes=("model.", "model.language_model."),
    read_fields=_qwen2_fields,
    reads=_READS,
    gguf=GgufArchitecture(("qwen2", "qwen2vl"), rope_keys=SECTIONS),
)
QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    read_fields=_qwen3_fields,
    reads=_READS,
    defaults={"head_dim": 128},
    gguf=GgufArchitecture(("qwen3", "qwen3vl"), rope_keys=SECTIONS),
)
