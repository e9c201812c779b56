"""The reference against transformers: this proves configs, tensor names and layouts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.reference import reference_logits
from tests.tiny_checkpoint import TinyCheckpoint
from tests.tiny_models import VARIANTS, VOCAB_SIZE, make_tiny


def relative_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference as a share of the largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    make_tiny(variant, tmp_path)
    ids = np.random.default_rng(1).integers(0, VOCAB_SIZE, 90)
    expected = TinyCheckpoint(tmp_path).logits_of(ids)
    assert relative_difference(reference_logits(tmp_path, ids), expected) < 2e-5


@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize("variant", ["llama-tied", "opt-postnorm", "falcon-grouped"])
def test_half_precision_and_shards(variant: str, dtype: str, tmp_path: Path) -> None:
    make_tiny(variant, tmp_path, dtype=dtype, shards=4)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = np.random.default_rng(2).integers(0, VOCAB_SIZE, 20)
    expected = TinyCheckpoint(tmp_path).logits_of(ids)
    assert relative_difference(reference_logits(tmp_path, ids), expected) < 2e-5
