"""Tiny models far beyond the context that they were first trained on, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.choose import choose_system
from hotcold.model.config.build import read_config
from tests.actors.in_process import InProcessSystem
from tests.conftest import TinyCheckpoint
from tests.reference import relative_difference
from tests.tiny_models import VARIANTS, VOCAB_SIZE, Variant, make_tiny

TRAINED, LONGEST = 64, 512
IDS = np.random.default_rng(17).integers(0, VOCAB_SIZE, LONGEST)
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [2.0, 2.5, 3.0, 4.0, 6.0, 9.0],
    "original_max_position_embeddings": TRAINED,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": TRAINED},
    "dynamic": {"rope_type": "dynamic", "factor": 8.0},
    "longrope": LONGROPE,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyCheckpoint]:
    """A model of each rope."""
    made = {}
    for kind, rope in ROPES.items():
        parent = VARIANTS["phi3" if kind == "longrope" else "llama-gqa"]
        positions = TRAINED if kind == "dynamic" else LONGEST
        changes = {
            "rope_parameters": rope | {"rope_theta": 100.0},
            "max_position_embeddings": positions,
            "original_max_position_embeddings": TRAINED,
        }
        if kind != "longrope":
            del changes["original_max_position_embeddings"]
        variant = Variant(parent.func, *parent.args, **(parent.keywords | changes))
        folder = tmp_path_factory.mktemp(kind) / "model"
        with mock.patch.dict(VARIANTS, {f"long-{kind}": variant}):
            made[kind] = TinyCheckpoint(make_tiny(f"long-{kind}", folder))
    return made


@pytest.mark.sweep
@pytest.mark.parametrize("length", [300, LONGEST])
@pytest.mark.parametrize("kind", ROPES)
def test_logits_beyond_the_trained_context(
    checkpoints: dict[str, TinyCheckpoint], kind: str, length: int
) -> None:
    """In systems whose context is as long as the text, which decides dynamic scaling."""
    checkpoint, ids = checkpoints[kind], IDS[:length]
    expected = checkpoint.logits_of(ids)
    ways = ([length], [200, 64, 36, 1, 7]) if length < LONGEST else ([length], [32])
    with InProcessSystem(checkpoint.path, 2, 2, num_positions=length, max_tokens=LONGEST) as system:
        for way in ways:
            found = system.logits("dense", ids, way)
            assert relative_difference(found, expected) < 1e-4, way


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_short_texts_in_a_short_context(checkpoints: dict[str, TinyCheckpoint], kind: str) -> None:
    """The context decides, not the text: in a longer one the same text has other logits."""
    checkpoint, ids = checkpoints[kind], IDS[:TRAINED]
    expected = checkpoint.logits_of(ids)
    for context, differs in ((TRAINED, False), (LONGEST, True)):
        with InProcessSystem(checkpoint.path, num_positions=context) as system:
            found = relative_difference(system.logits("dense", ids, [1]), expected)
        assert (found > 1e-3) == differs and (differs or found < 1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn"])
def test_the_context_without_an_option(checkpoints: dict[str, TinyCheckpoint], kind: str) -> None:
    """Frequencies are those of the first training, where the context decides them."""

    def context(path: Path, length: int | None) -> int:
        options = SystemOptions(context_length=length)
        return choose_system(path, read_config(path), options).context_length

    path = checkpoints[kind].path
    assert context(path, None) == (LONGEST if kind == "yarn" else TRAINED)
    assert context(path, LONGEST) == LONGEST
