"""SmolLM3: Llama without rope in every fourth layer."""

from __future__ import annotations

from typing import Any

from hotcold.model.config.families.family import (
    Family,
    GgufArchitecture,
    max_positions,
    num_layers,
    of_layers,
    sliding_layers,
    windows,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.rope import read_rope

_THETA = 2_000_000.0


def _rotates(reader: ConfigReader) -> tuple[bool, ...]:
    """Whether each layer has rope: where no_rope_layers is 1, or by an interval."""
    if not reader.has("no_rope_layers"):
        interval = reader.integer("no_rope_layer_interval", 4, high=1 << 20)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers(reader)))
    return tuple(value == 1 for value in of_layers(reader, "no_rope_layers", 1, 0))


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    rotates = _rotates(reader)
    uses = reader.boolean("use_sliding_window", False) and reader.has("sliding_window")
    sliding = sliding_layers(reader, lambda layer: uses and not rotates[layer])
    ropes = (read_rope(reader, max_positions(reader), theta=_THETA),)
    return {
        **llama_fields(reader, ropes=ropes),
        "layer_ropes": tuple(0 if rotated else -1 for rotated in rotates),
        "windows": windows(reader, sliding) if uses else (),
    }


SMOLLM3 = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM", "SmolLM3Model"),
    bos_id=128000,
    eos_id=128001,
    tied_embeddings=True,
    read_fields=_read_fields,
    reads=("sliding_window", "layer_types", "no_rope_layers"),
    defaults={"num_key_value_heads": 4},
    gguf=GgufArchitecture(("smollm3",), pairs_rows=True),
)
