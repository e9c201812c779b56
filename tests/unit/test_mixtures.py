"""Mixtures of experts: what config.json and tensors say, by the reference beside transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.model.config import build
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
    """Their families are known."""
    for name, family in WITHOUT_KERNELS.items():
        monkeypatch.setitem(FAMILIES, name, family)


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
