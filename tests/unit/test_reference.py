"""The reference against transformers: this proves configs, tensor names and layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.setup.gpu_share import only_on_cpu
from hotcold.model.config.build import read_config
from tests.reference import reference_logits, relative_difference
from tests.tiny_checkpoint import TinyCheckpoint
from tests.tiny_models import MIXTURES, ON_THE_CPU, VARIANTS, VOCAB_SIZE, _write, make_tiny


@pytest.mark.parametrize("variant", [*VARIANTS, *MIXTURES])
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    """And whether a GPU has kernels for the model."""
    config = read_config(make_tiny(variant, tmp_path))
    assert bool(only_on_cpu(config)) == (variant in ON_THE_CPU)
    ids = np.random.default_rng(1).integers(0, VOCAB_SIZE, 90)
    expected = TinyCheckpoint(tmp_path).logits_of(ids)
    assert relative_difference(reference_logits(tmp_path, ids), expected) < 2e-5


def test_half_precision_and_shards(tmp_path: Path) -> None:
    make_tiny("falcon-grouped", tmp_path, dtype="bfloat16", shards=4)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = np.random.default_rng(2).integers(0, VOCAB_SIZE, 20)
    expected = TinyCheckpoint(tmp_path).logits_of(ids)
    assert relative_difference(reference_logits(tmp_path, ids), expected) < 2e-5


def test_a_model_that_is_made_changes_no_variant(tmp_path: Path) -> None:
    """Mistral 4 and Ministral 3 share a rope, to which transformers adds what Mistral 4 rotates."""
    before = repr(VARIANTS["ministral3"])
    _write(MIXTURES["mistral4"], tmp_path, "float32", seed=0, shards=1)
    assert repr(VARIANTS["ministral3"]) == before
