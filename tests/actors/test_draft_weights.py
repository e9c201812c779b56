"""A draft's weights beside the model's own: the bits of both, with any services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.modes import StepMode, step_mode
from hotcold.actors.protocol import stripes
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup.choose import default_mode
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.setup.shards import service_specs
from hotcold.numba_kernels.loops.mailbox import BYTES_READ, DRAFT
from tests.actors.in_process import InProcessSystem
from tests.actors.test_stored_neurons import StoredSystem, packed
from tests.quantized_models import make_model
from tests.unit.test_down_outputs import MIXED
from tests.unit.test_gguf_model import file_of
from tests.unit.test_gguf_model import tiny as tiny_gguf

IDS = np.random.default_rng(4).integers(0, 101, 20)
MODELS = ["q-llama-tied", "q-opt-postnorm", "q-falcon-grouped"]


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
    first = 0
    parts: list[np.ndarray] = []
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
@pytest.mark.parametrize(
    ("name", "kind"), [("q-llama", StoredSystem), *((name, InProcessSystem) for name in MODELS)]
)
def test_a_draft_is_the_model_in_4_bits(
    name: str, kind: type[InProcessSystem], model: Callable[[str], Path]
) -> None:
    """In memory, also where the model's own neurons are on storage."""
    path = model(name)
    with InProcessSystem(path, 2, 2) as plain:
        own = target_logits(plain)
    with InProcessSystem(path, 2, 2, weight_dtype="q4") as quantized:
        wanted = target_logits(quantized)
    assert not np.array_equal(own, wanted)
    if kind is StoredSystem:
        packed(path)
    with kind(path, 2, 2, draft="q4") as system:
        for _ in range(2):
            np.testing.assert_array_equal(target_logits(system), own)
            read = bytes_read(system)
            np.testing.assert_array_equal(draft_logits(system), wanted)
            assert bytes_read(system) == read and (read > 0) == (kind is StoredSystem)
        service: Any = system.services[0]
        assert service.draft._scratch.part_sums is service._scratch.part_sums


def bytes_read(system: InProcessSystem) -> int:
    return system.counted(BYTES_READ) if isinstance(system, StoredSystem) else 0


@pytest.mark.parametrize("neurons_a_piece", [256, 2400])
def test_a_draft_of_rows_of_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, neurons_a_piece: int
) -> None:
    """Its down rows are a neuron each, its neurons those of the model's stripes: many, or one."""
    monkeypatch.setattr(stripes, "_NEURONS_A_PIECE", neurons_a_piece)
    path = tmp_path / "tiny.gguf"
    file_of(tiny_gguf(), path, MIXED)
    one, config = prepare_system(path, SystemOptions(context_length=128))
    assert one.down_transposed
    num_stripes = stripes.num_output_stripes(config)
    assert (num_stripes > 1) == (neurons_a_piece == 256)
    found = []
    for services, threads in ((1, 1), (1, 3), (2, 2)):
        system = replace(one, num_cpu_actors=services, num_threads=services * threads, draft="q4")
        specs = service_specs(system, config)
        with InProcessSystem(path, specs=specs, num_positions=128) as running:
            engine = running.engine("dense")
            found.append((logits(engine, [1, 3], [engine.mode]), draft_logits(running)))
    for target, draft in found:
        np.testing.assert_array_equal(target, found[0][0])
        # Of one stripe each thread adds up a part: what is drafted changes no bit of an answer.
        size = np.abs(draft).max()
        np.testing.assert_allclose(draft, found[0][1], 0, 0 if num_stripes > 1 else 0.01 * size)
    assert np.isfinite(draft).all() and not np.array_equal(target, draft)
