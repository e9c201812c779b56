"""Mixtures of experts: what config.json and tensors say, by the reference beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.model.config import build, gguf_architectures
from hotcold.model.config.build import read_config
from hotcold.model.config.families import FAMILIES, WITHOUT_KERNELS
from hotcold.model.errors import ConfigError
from tests.reference import reference_logits
from tests.tiny_checkpoint import TinyCheckpoint
from tests.tiny_models import MIXTURES, VOCAB_SIZE, make_tiny
from tests.unit.test_reference import relative_difference

IDS = np.random.default_rng(1).integers(0, VOCAB_SIZE, 60)


@pytest.fixture
def mixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their families and architectures are known."""
    for name, family in WITHOUT_KERNELS.items():
        monkeypatch.setitem(FAMILIES, name, family)
    for name, architecture in gguf_architectures.WITHOUT_KERNELS.items():
        monkeypatch.setitem(gguf_architectures.ARCHITECTURES, name, architecture)


@pytest.mark.usefixtures("mixtures")
@pytest.mark.parametrize("variant", MIXTURES)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    make_tiny(variant, tmp_path)
    expected = TinyCheckpoint(tmp_path).logits_of(IDS)
    assert relative_difference(reference_logits(tmp_path, IDS), expected) < 2e-5


@pytest.mark.parametrize("variant", MIXTURES)
def test_they_are_refused_until_kernels_exist(variant: str, tmp_path: Path) -> None:
    make_tiny(variant, tmp_path)
    with pytest.raises(ConfigError, match="which is not supported; supported: Llama") as error:
        read_config(tmp_path)
    assert len(str(error.value).splitlines()) == 1
    assert build.FAMILIES is FAMILIES


# A tiny model; what llama.cpp calls it; whether rows of q and k are paired; keys of the file.
FILES: dict[str, tuple[str, str, bool, dict[str, Any]]] = {
    "mixtral": ("mixtral", "llama", True, {"expert_count": 5, "expert_used_count": 3}),
    "qwen2moe": (
        "qwen2-moe",
        "qwen2moe",
        False,
        {
            "expert_count": 7,
            "expert_used_count": 3,
            "expert_feed_forward_length": 24,
            "expert_shared_feed_forward_length": 36,
        },
    ),
    "qwen3moe": (
        "qwen3-moe",
        "qwen3moe",
        False,
        {"expert_count": 7, "expert_used_count": 3, "expert_feed_forward_length": 24},
    ),
    "olmoe": ("olmoe", "olmoe", False, {"expert_count": 7, "expert_used_count": 3}),
    "granitemoe": (
        "granite-moe",
        "granitemoe",
        True,
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "embedding_scale": 3.0,
            "residual_scale": 0.4,
            "attention.scale": 0.2,
            "logit_scale": 2.5,
        },
    ),
    "granitemoe-shared": (
        "granite-moe-shared",
        "granitemoe",
        True,
        {
            "expert_count": 6,
            "expert_used_count": 3,
            "attention.scale": 0.3,
            "logit_scale": 1.0,
            "expert_shared_feed_forward_length": 28,
        },
    ),
    "glm4moe": (
        "glm4-moe-groups",
        "glm4moe",
        False,
        {
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_feed_forward_length": 24,
            "expert_shared_count": 2,
            "leading_dense_block_count": 2,
            "expert_weights_scale": 1.7,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "rope.dimension_count": 10,
            "nextn_predict_layers": 1,
        },
    ),
    "gpt-oss": (
        "gpt-oss-plain",
        "gpt-oss",
        False,
        {
            "expert_count": 5,
            "expert_used_count": 3,
            "expert_feed_forward_length": 40,
            "attention.sliding_window": 9,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "smallthinker": (
        "smallthinker-windows",
        "smallthinker",
        False,
        {
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": 24,
            "attention.sliding_window": 9,
            "expert_gating_func": 1,
        },
    ),
}
