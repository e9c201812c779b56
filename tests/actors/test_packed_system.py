"""Models of others' quantization methods beside transformers with the weights they stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.shards import service_specs
from tests.actors.in_process import InProcessSystem
from tests.packed_models import METHODS, make_packed
from tests.tiny_checkpoint import TinyCheckpoint

PROMPT, NUM_TOKENS = 12, 8


def logits_of(path: Path, ids: np.ndarray, dtype: str = "") -> np.ndarray:
    """All logits of `ids`, token by token, as a command would start the system."""
    options = SystemOptions(context_length=128, num_cpu_actors=1, weight_dtype=dtype)
    system, config = prepare_system(path, options)
    if not dtype:
        assert config.dtype_of("qkv") == METHODS[path.parent.name].held
    with InProcessSystem(path, num_threads=2, specs=service_specs(system, config)) as found:
        alone = found.logits("dense", ids, (1,))
        assert np.array_equal(alone, found.logits("dense", ids, (ids.size,)))
        return alone


@pytest.mark.sweep(name=["fp8", "gptq-zeros"])
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("fp8", "llama"),
        ("ct-int4", "llama"),
        ("awq", "llama"),
        ("nf4", "llama"),
        ("nvfp4", "llama"),
        ("gptq-zeros", "mixture"),
    ],
)
def test_tokens(name: str, variant: str, tmp_path: Path) -> None:
    path = make_packed(tmp_path / name, name, variant)
    known = TinyCheckpoint(path.parent / "floats")
    ids = known.ids[:PROMPT]
    ids = np.concatenate([ids, known.greedy_after(ids, NUM_TOKENS)])
    exact, found = known.logits_of(ids), logits_of(path, ids)
    # Vectors are rounded to 8 bits, which moves logits, and may choose another expert.
    differences = np.abs(found - exact).max(axis=1)
    assert np.median(differences) < 0.04 * np.abs(exact).max()
    assert np.mean(found.argmax(axis=1) == exact.argmax(axis=1)) >= 0.8


def test_dtype_of_packed_weights_is_that_of_floats(tmp_path: Path) -> None:
    """To the bit: what is not held as it is is rounded as the method's weights are."""
    path = make_packed(tmp_path / "fp8", "fp8")
    ids = TinyCheckpoint(path).ids[:PROMPT]
    for dtype in ("q4", "bf16"):
        found = logits_of(path, ids, dtype)
        assert np.array_equal(found, logits_of(path.parent / "floats", ids, dtype))
