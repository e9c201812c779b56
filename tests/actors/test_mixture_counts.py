"""What is counted of a mixture's experts and their neurons, beside the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotcold.actors.driver.profiling import ProfilingEngine, counts_by_neuron
from hotcold.actors.telemetry.experts import expert_counts
from hotcold.actors.telemetry.snapshot import NeuronWatch
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.embedding import load_embedding
from hotcold.numba_kernels.loops.layer_loop import CHOSEN, READ
from tests import reference, reference_experts
from tests.actors.in_process import InProcessSystem
from tests.tiny_models import VOCAB_SIZE, make_tiny

IDS = np.random.default_rng(4).integers(0, VOCAB_SIZE, 41)
# ReLU; a dense layer and a shared expert; a shared one that is weighed.
VARIANTS = ["smallthinker", "glm4-moe", "qwen2-moe"]


@dataclass
class Routes:
    """By layer: which blocks (T, B) each of IDS has, and which neurons (T, N) fire."""

    chosen: list[np.ndarray]
    fires: list[np.ndarray]

    def counts(self, steps: list[range]) -> np.ndarray:
        """`LayerFacts.block_counts` of these steps, of layers with a router: (L, B, 2)."""
        found = np.zeros((len(self.chosen), max(own.shape[1] for own in self.chosen), 2), int)
        for layer, own in enumerate(self.chosen):
            for step in steps:
                found[layer, : own.shape[1], CHOSEN] += own[list(step)].sum(axis=0)
                found[layer, : own.shape[1], READ] += own[list(step)].any(axis=0)
        return found


@pytest.fixture(scope="module", params=VARIANTS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant: str = request.param
    return make_tiny(variant, tmp_path_factory.mktemp(variant))


@pytest.fixture
def config(path: Path) -> ModelConfig:
    return read_config(path)


@pytest.fixture
def routes(path: Path, config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> Routes:
    """What the reference chooses, and what fires in it."""
    weights: list[np.ndarray] = []
    parts: list[np.ndarray] = []  # of every call of an expert, of its tokens
    weigh = reference_experts.expert_weights
    compute: Any = reference_experts._expert

    def weighing(*arguments: Any) -> torch.Tensor:
        found: torch.Tensor = weigh(*arguments)
        weights.append(found.numpy() != 0)
        return found

    def computing(spec: Any, x: Any, gate: Any, up: Any, down: Any, *rest: Any) -> torch.Tensor:
        eye = torch.eye(len(gate), dtype=x.dtype)
        fires = compute(spec, x, gate, up, eye, *rest[:2], None, *rest[3:]) != 0
        parts.append(fires.numpy())
        return compute(spec, x, gate, up, down, *rest)

    monkeypatch.setattr(reference_experts, "expert_weights", weighing)
    monkeypatch.setattr(reference_experts, "_expert", computing)
    reference.reference_logits(path, IDS)
    monkeypatch.undo()
    return gathered(config, iter(weights), iter(parts))


def gathered(
    config: ModelConfig, weights: Iterator[np.ndarray], parts: Iterator[np.ndarray]
) -> Routes:
    found = Routes([], [])
    for layer in config.layers:
        sizes, router = layer.ffn.block_sizes, layer.ffn.router
        chosen = np.ones((len(IDS), len(sizes)), bool)
        if router is not None:
            chosen[:, : router.num_experts] = next(weights)
        fires = []
        for block, size in enumerate(sizes):
            own = np.zeros((len(IDS), size), bool)
            if chosen[:, block].any():
                own[chosen[:, block]] = next(parts)
            fires.append(own)
        found.chosen.append(chosen)
        found.fires.append(np.concatenate(fires, axis=1))
    return found


def test_how_often_experts_are_chosen(path: Path, config: ModelConfig, routes: Routes) -> None:
    """In steps of a token, in one of several, in a prompt that goes through matrix products."""
    steps = [range(1), range(1, 2), range(2, 7), range(7, 41)]
    with InProcessSystem(path, num_services=2, num_threads=2) as system:
        engine = system.engine("dense")
        for step in steps:
            ids = IDS[step.start : step.stop].tolist()
            engine.step(ids, step, [0] * len(ids))
        found = expert_counts(config, engine.block_counts)
    expected = routes.counts(steps)
    assert found is not None
    for layer, spec in enumerate(config.layers):
        if spec.ffn.router is None:
            assert found.num_experts[layer] == 0 and not found.chosen[layer].any()
            continue
        np.testing.assert_array_equal(found.chosen[layer], expected[layer, :, CHOSEN])
        np.testing.assert_array_equal(found.read[layer], expected[layer, :, READ])
        num_experts = spec.ffn.router.num_experts
        assert found.num_experts[layer] == num_experts
        share = routes.chosen[layer][:, :num_experts].mean(axis=0)
        np.testing.assert_allclose(found.rates[layer, :num_experts], share)
        assert (found.rates[layer, num_experts:] == 1).all()
    later = found.since(found)
    assert not later.chosen.any() and not later.rates.any()


def test_the_map_shows_experts(path: Path, config: ModelConfig, routes: Routes) -> None:
    mode = "exact" if config.is_sparse else "dense"
    with InProcessSystem(path, num_services=2, num_threads=2) as system:
        engine = system.engine(mode)
        engine.step([int(IDS[0])], [0], [0])
        counts = lambda: expert_counts(config, engine.block_counts)  # noqa: E731
        watch = NeuronWatch(config, system.exchange.buffers, system.topology, counts)
        watch.watch(60)
        for at in range(1, 9):
            engine.step([int(IDS[at])], [at], [0])
        found = watch.read()
        watch.watch(0)
    assert found.num_steps == 8 and found.experts is not None
    for layer, spec in enumerate(config.layers):
        sizes = spec.ffn.block_sizes
        if len(sizes) == 1:
            assert found.last_gates[layer].sum() == found.num_neurons[layer].sum() == sizes[0]
            continue
        num_blocks, cuts = len(sizes), np.cumsum(sizes)[:-1]
        chosen = routes.chosen[layer][1:9]
        assert found.num_neurons[layer, :num_blocks].tolist() == list(sizes)
        gates = chosen * np.array(sizes)
        np.testing.assert_array_equal(found.last_gates[layer, :num_blocks], gates[-1])
        np.testing.assert_allclose(found.mean_gates[layer, :num_blocks], gates.mean(axis=0))
        fires = np.array(
            [[part.sum() for part in np.split(row, cuts)] for row in routes.fires[layer][1:9]]
        )
        np.testing.assert_array_equal(found.last_computed[layer, :num_blocks], fires[-1])
        np.testing.assert_allclose(found.mean_computed[layer, :num_blocks], fires.mean(axis=0))
        np.testing.assert_array_equal(found.experts.chosen[layer, :num_blocks], chosen.sum(axis=0))


def test_a_profile_counts_experts_and_neurons(
    path: Path, config: ModelConfig, routes: Routes
) -> None:
    with InProcessSystem(path, num_services=2, num_threads=2, max_tokens=16) as system:
        embedding = load_embedding(Checkpoint(path), config)
        engine = ProfilingEngine(config, embedding, system.exchange, system.topology, None)
        inputs = engine.profile_window(IDS.tolist(), [3])
        specs = system.cpu_specs()
        fired = [service.fired_counts for service in system.services[1:]]  # type: ignore[attr-defined]
        counts = counts_by_neuron(config, specs, fired)
    assert inputs.shape == (config.num_layers, 1, config.hidden_size)
    for layer, size in enumerate(config.ffn_sizes):
        np.testing.assert_array_equal(counts[layer, :size], routes.fires[layer].sum(axis=0))
        assert not counts[layer, size:].any()
        chosen = routes.chosen[layer]
        np.testing.assert_array_equal(
            engine.chosen_counts[layer, : chosen.shape[1]], chosen.sum(axis=0)
        )
        assert not engine.chosen_counts[layer, chosen.shape[1] :].any()
