"""A draft's weights beside the model's own: the bits of both, with any services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.step_mode import StepMode, step_mode
from hotcold.actors.setup.choose import default_mode
from hotcold.numba_kernels.serve.mailbox import DRAFT
from tests.actors.in_process import InProcessSystem
from tests.actors.test_stored_neurons import StoredSystem, packed
from tests.quantized_models import make_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
IDS = np.random.default_rng(4).integers(0, 101, 20)
MODELS = ["q-llama", "q-llama-tied", "q-opt", "q-opt-postnorm", "q-falcon-grouped"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """model(name): that checkpoint in float16."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = make_model(name, tmp_path_factory.mktemp(name) / "m")
        return made[name]

    return make


def draft_mode(engine: Engine) -> StepMode:
    """That of steps which draft, as the driver has it."""
    mode = step_mode(engine.config, default_mode(engine.config))
    return replace(mode, weights=DRAFT)


def logits(engine: Engine, sizes: Sequence[int], modes: Sequence[StepMode]) -> np.ndarray:
    """Logits of IDS in steps of `sizes` tokens with `modes`, in turn."""
    first, parts = 0, []
    while first < len(IDS):
        last = min(first + sizes[len(parts) % len(sizes)], len(IDS))
        step, mode = range(first, last), modes[len(parts) % len(modes)]
        found = engine.step(IDS[first:last].tolist(), step, [0] * len(step), len(step), mode)
        parts.append(found.copy())
        first = last
    return np.concatenate(parts)


def target_logits(system: InProcessSystem) -> np.ndarray:
    """Of the model's own weights."""
    engine = system.engine("exact")
    return logits(engine, [1, 3], [engine.mode])


def draft_logits(system: InProcessSystem) -> np.ndarray:
    """Of the draft's, over a KV cache that it has filled itself."""
    engine = system.engine("exact")
    return logits(engine, [1, 3], [draft_mode(engine)])


@pytest.mark.sweep(keep=2)
@pytest.mark.parametrize("name", MODELS)
def test_a_draft_is_the_model_in_4_bits(name: str, model: Callable[[str], Path]) -> None:
    path, shape = model(name), {"num_services": 2, "num_threads": 2}
    with InProcessSystem(path, **shape) as plain:
        own = target_logits(plain)
    with InProcessSystem(path, **shape, weight_dtype="q4") as quantized:
        wanted = target_logits(quantized)
    assert not np.array_equal(own, wanted)
    with InProcessSystem(path, **shape, draft="q4") as system:
        for _ in range(2):
            np.testing.assert_array_equal(target_logits(system), own)
            np.testing.assert_array_equal(draft_logits(system), wanted)
