"""MiniCPM-S: Llama with fatrelu, and scales of embeddings, residual updates and logits."""

from __future__ import annotations

from typing import Any

from hotcold.model.config.families.family import MAX_WIDTH, Family, num_layers
from hotcold.model.config.families.llama import llama_fields
from hotcold.model.config.json_reader import ConfigReader

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


MINICPM = Family(
    name="minicpm",
    architectures=("MiniCPMForCausalLM", "MiniCPMModel"),
    bos_id=1,
    eos_id=2,
    tied_embeddings=True,
    read_fields=_read_fields,
    reads=("scale_emb", "scale_depth", "dim_model_base"),
)
