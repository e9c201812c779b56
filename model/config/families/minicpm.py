"""MiniCPM-S: Llama with fatrelu, and scales of embeddings, residual updates and logits."""

from __future__ import annotations

from typing import Any

from hotcold.model.config.families.family import MAX_WIDTH, Family, GgufArchitecture, num_layers
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.gguf_metadata import Metadata, gated_values
from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.errors import ConfigError

_LOW, _HIGH = 1e-6, 1e6


def _read_fields(reader: ConfigReader) -> dict[str, Any]:
    """Missing scales are 1, as in its own code."""
    fields = llama_fields(reader)
    depth = reader.number("scale_depth", 1.0, low=_LOW, high=_HIGH)
    base = reader.integer("dim_model_base", 1, high=MAX_WIDTH)
    return {
        **fields,
        "embedding_scale": reader.number("scale_emb", 1.0, low=_LOW, high=_HIGH),
        "residual_scale": depth / num_layers(reader) ** 0.5,
        "logit_scale": base / fields["hidden_size"],
    }


def _gguf_values(metadata: Metadata) -> dict[str, Any]:
    """Older files lack the scales, which are the same for all its models.

    MiniCPM-S computes fatrelu, whose threshold a file lacks: llama.cpp's result is wrong, too.
    """
    name = metadata.model.metadata.get("general.name")
    if isinstance(name, str) and "minicpm-s" in name.lower().replace("_", "-"):
        raise ConfigError(
            f"{metadata.model.path}: is MiniCPM-S, whose function of neurons a GGUF file does not "
            "hold; use its safetensors files"
        )
    hidden, layers = metadata.integer("embedding_length"), metadata.integer("block_count")
    depth = metadata.number("residual_scale", 1.4 / max(1, layers) ** 0.5)
    return {
        **gated_values(metadata),
        "scale_emb": metadata.number("embedding_scale", 12.0),
        "scale_depth": depth * layers**0.5,
        "dim_model_base": round(hidden / (metadata.number("logit_scale", hidden / 256) or 1.0)),
    }


MINICPM = Family(
    name="minicpm",
    architectures=("MiniCPMForCausalLM", "MiniCPMModel"),
    bos_id=1,
    eos_id=2,
    tied_embeddings=True,
    read_fields=_read_fields,
    reads=("scale_emb", "scale_depth", "dim_model_base"),
    gguf=GgufArchitecture(("minicpm",), _gguf_values, pairs_rows=True),
)
