"""EXAONE 4: OLMo 2's order with q and k normed head by head; the 32B model has windows.

Where there are windows, only their layers have rope.
"""

from __future__ import annotations

from typing import Any

from hotcold.model.config.families.family import (
    Family,
    GgufArchitecture,
    sliding_layers,
    windows,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.olmo2 import OUTPUT_NORM_NAMES
from hotcold.model.config.gguf_metadata import Metadata, gated_values, window_kinds
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.errors import shown


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    fields = {
        **llama_fields(reader, norm_eps=1e-5),
        "has_norm": False,
        "has_ffn_norm": False,
        "has_output_norms": True,
        "qk_norm": "head",
    }
    return fields | exaone4_windows(reader)


def exaone4_windows(reader: ConfigReader) -> dict[str, Any]:
    """Read which layers have a window; the others then have no positions."""
    if reader.values.get("sliding_window", 0) is None:
        return {}
    sliding = sliding_layers(reader, _pattern(reader))
    return {
        "layer_ropes": tuple(0 if is_windowed else -1 for is_windowed in sliding),
        "windows": windows(reader, sliding, 4096),
    }


def _pattern(reader: ConfigReader) -> Any:
    """Which layers have a window: all but each n-th, or those with L of a word such as LLLG."""
    pattern = reader.values.get("sliding_window_pattern", 4)
    if not isinstance(pattern, str):
        period = reader.integer("sliding_window_pattern", 4, high=1 << 20)
        return lambda layer: (layer + 1) % period != 0
    if not pattern or set(pattern) - {"L", "G"}:
        raise reader.fail("sliding_window_pattern", f"is {shown(pattern)}; give L and G")
    return lambda layer: pattern[layer % len(pattern)] == "L"


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    """The model of 64 layers has windows, which early files do not say."""
    is_early = metadata.integer("block_count") == 64
    size = metadata.integer("attention.sliding_window", 4096 if is_early else 0) or None
    kinds = {"layer_types": window_kinds(metadata, 4)} if size else {}
    return {**gated_values(metadata), "sliding_window": size, **kinds}


EXAONE4 = Family(
    name="exaone4",
    architectures=("Exaone4ForCausalLM", "Exaone4Model"),
    bos_id=0,
    eos_id=2,
    read_fields=_read_fields,
    tensor_names=OUTPUT_NORM_NAMES,
    reads=("sliding_window", "sliding_window_pattern", "layer_types"),
    gguf=GgufArchitecture(("exaone4",), _gguf_values),
)
