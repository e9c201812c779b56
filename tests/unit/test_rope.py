"""Cosines and sines of ropes, up to long positions, against transformers' own classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hotcold.actors.attention.arrays import rope_tables
from hotcold.actors.protocol.messages import CacheSpec
from hotcold.model.config.build import build_config
from hotcold.model.config.model_config import ModelConfig
from tests.unit.family_configs import LLAMA, PHI3

LONG, TRAINED = 131_072, 4096
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.1],
    "long_factor": [1.1, 1.3, 2.0, 4.0, 9.0, 21.0, 40.0, 60.0],
    "original_max_position_embeddings": TRAINED,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": TRAINED}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"type": "linear", "factor": 8.0},  # as it was spelled before
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "yarn": YARN,
    "yarn-not-truncated": YARN | {"truncate": False, "beta_fast": 3.0},
    "yarn-mscales": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    "yarn-attention-factor": YARN | {"attention_factor": 1.3},
    "dynamic": {"rope_type": "dynamic", "factor": LONG / TRAINED},
    "longrope": LONGROPE,
}


def config_json(kind: str) -> dict[str, Any]:
    """config.json of a tiny model whose context was extended to LONG by that rope."""
    trained = TRAINED if kind == "dynamic" else LONG
    family = PHI3 if kind == "longrope" else LLAMA
    config = family | {"max_position_embeddings": trained}
    if "type" in ROPES[kind]:
        return config | {"rope_theta": 10_000.0, "rope_scaling": ROPES[kind]}
    return config | {"rope_parameters": ROPES[kind] | {"rope_theta": 10_000.0}}


def table_of(config: ModelConfig, length: int) -> np.ndarray:
    """(P, 2, half) of a system with such a context."""
    (table,) = rope_tables(config, CacheSpec(1, length, "float32"))
    return table


def expected_table(kind: str, length: int) -> np.ndarray:
    """What transformers gives a sequence of so many positions."""
    from transformers import LlamaConfig, Phi3Config
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    values = {k: v for k, v in config_json(kind).items() if k != "architectures"}
    if kind == "longrope":
        rotary = Phi3RotaryEmbedding(Phi3Config(**(values | {"pad_token_id": None})))
    else:
        rotary = LlamaRotaryEmbedding(LlamaConfig(**values))
    parts = rotary(torch.empty(1), torch.arange(length)[None])
    return np.stack([part[0, :, : part.shape[2] // 2].numpy() for part in parts], axis=1)


@pytest.mark.parametrize(
    ("kind", "length"),
    [*((kind, LONG) for kind in ROPES), ("dynamic", TRAINED + 1), ("longrope", TRAINED + 1)],
)
def test_tables_equal_transformers(kind: str, length: int) -> None:
    """To the rounding of a cosine in float32: the angles are equal to the bit."""
    config = build_config(config_json(kind))
    assert config.max_positions == LONG
    found, expected = table_of(config, length), expected_table(kind, length)
    assert found.dtype == np.float32 and found.shape == expected.shape == (length, 2, 8)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-22 * expected.max())
