"""Command R, Command A, Aya: attention and FFN side by side behind one LayerNorm without bias.

Since Command R7B three of four layers have a window, and the others no positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hotcold.model.config.families.family import (
    Family,
    GgufArchitecture,
    sliding_layers,
    windows,
)
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.families.tensor_names import LLAMA_NAMES
from hotcold.model.config.gguf_metadata import Metadata, gated_values, window, window_kinds
from hotcold.model.config.json_reader import ConfigReader


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    return {
        **llama_fields(reader),
        "norm_kind": "layernorm",
        "norm_eps": reader.number("layer_norm_eps", 1e-5, low=0.0, high=1.0),
        "parallel_ffn": True,
        "has_ffn_norm": False,
        "interleaved_rope": True,
        "logit_scale": reader.number("logit_scale", 0.0625, low=1e-9, high=1e9),
    }


def _cohere2_fields(reader: ConfigReader) -> dict[str, Any]:
    period = reader.integer("sliding_window_pattern", 4, high=1 << 20)
    sliding = sliding_layers(reader, lambda layer: (layer + 1) % period != 0)
    return {
        **_read_fields(reader),
        "windows": windows(reader, sliding, 4096),
        "layer_ropes": tuple(0 if is_windowed else -1 for is_windowed in sliding),
    }


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    epsilon = metadata.number("attention.layer_norm_epsilon")
    return {
        **gated_values(metadata, epsilon),
        "layer_norm_eps": epsilon,
        "logit_scale": metadata.number("logit_scale"),
    }


def _cohere2_gguf(metadata: Metadata) -> dict[str, Any]:
    sizes = {"sliding_window": window(metadata), "layer_types": window_kinds(metadata, 4)}
    return {**_gguf_values(metadata), **sizes}


COHERE = Family(
    name="cohere",
    architectures=("CohereForCausalLM", "CohereModel"),
    prefixes=("model.", "language_model.model.", "model.language_model."),
    bos_id=5,
    eos_id=255001,
    tied_embeddings=True,
    read_fields=_read_fields,
    tensor_names=LLAMA_NAMES.with_layer(ffn_norm=""),
    reads=("logit_scale", "use_qk_norm", "position_embedding_type"),
    fixed={
        "use_qk_norm": (False,),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1.0,),
    },
    defaults={"max_position_embeddings": 8192},
    gguf=GgufArchitecture(("command-r",), _gguf_values),
)
COHERE2 = replace(
    COHERE,
    name="cohere2",
    architectures=("Cohere2ForCausalLM", "Cohere2Model"),
    read_fields=_cohere2_fields,
    reads=(*COHERE.reads, "sliding_window", "sliding_window_pattern", "layer_types"),
    gguf=GgufArchitecture(("cohere2",), _cohere2_gguf),
)
