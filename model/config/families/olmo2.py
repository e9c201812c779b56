"""OLMo 2: norms after attention and FFN, none before; q and k normed over all heads.

OLMo 3: windows in three of four layers; the rope of the others alone is scaled.
"""

from __future__ import annotations

from typing import Any

from hotcold.model.config.families.family import (
    Family,
    GgufArchitecture,
    max_positions,
    sliding_layers,
    windows,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
from hotcold.model.config.gguf_metadata import Metadata, gated_values, window, window_kinds
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.config.model_config import RopeConfig
from hotcold.model.config.rope import read_ropes_by_window


def _olmo2_fields(reader: ConfigReader, ropes: tuple[RopeConfig, ...] = ()) -> dict[str, Any]:
    return {
        **llama_fields(reader, norm_eps=1e-5, ropes=ropes),
        "has_norm": False,
        "has_ffn_norm": False,
        "has_output_norms": True,
        "qk_norm": "full",
    }


def _olmo3_fields(reader: ConfigReader) -> dict[str, Any]:
    sliding = sliding_layers(reader, lambda layer: (layer + 1) % 4 != 0)
    ropes = read_ropes_by_window(reader, max_positions(reader), theta=500_000.0)
    return {
        **_olmo2_fields(reader, ropes),
        "layer_ropes": tuple(int(is_windowed) for is_windowed in sliding),
        "windows": windows(reader, sliding, 4096),
    }


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    """A sliding window makes it an OLMo 3."""
    values, size = gated_values(metadata), window(metadata)
    if not size:
        return values
    kinds = window_kinds(metadata, 4)
    return {**values, "model_type": "olmo3", "sliding_window": size, "layer_types": kinds}


OUTPUT_NORM_NAMES = LLAMA_NAMES.with_layer(
    norm="",
    ffn_norm="",
    attention_norm="post_attention_layernorm",
    ffn_output_norm="post_feedforward_layernorm",
)
OLMO2 = Family(
    name="olmo2",
    architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    eos_id=50279,
    read_fields=_olmo2_fields,
    tensor_names=OUTPUT_NORM_NAMES,
    gguf=GgufArchitecture(("olmo2",), _gguf_values),
)
OLMO3 = Family(
    name="olmo3",
    architectures=("Olmo3ForCausalLM", "Olmo3Model"),
    eos_id=50279,
    read_fields=_olmo3_fields,
    tensor_names=OUTPUT_NORM_NAMES,
    reads=("sliding_window", "layer_types"),
)
