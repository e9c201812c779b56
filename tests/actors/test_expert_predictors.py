"""Mixtures whose experts have predictors: steps and prompts against the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.actors.in_process import InProcessSystem
from tests.reference import reference_logits
from tests.tiny_models import VOCAB_SIZE, make_tiny
from tests.unit.test_reference import relative_difference

IDS = np.random.default_rng(7).integers(0, VOCAB_SIZE, 40)


@pytest.mark.parametrize("mode", ["dense", "exact"])
@pytest.mark.parametrize("num_services", [1, 2])
def test_logits_are_the_references(tmp_path: Path, mode: str, num_services: int) -> None:
    path = make_tiny("turbosparse-mixtral", tmp_path)
    expected = reference_logits(path, IDS)
    with InProcessSystem(path, num_services, 2) as system:
        alone = system.logits(mode, IDS, [1])
        assert relative_difference(alone, expected) < 1e-4
        assert np.array_equal(system.logits(mode, IDS[:24], [2, 8, 3, 7, 4]), alone[:24])
        for way in ([40], [34, 6]):
            assert relative_difference(system.logits(mode, IDS, way), expected) < 1e-4
