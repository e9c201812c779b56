"""Hot neurons in the GPU service: the same answers, wherever a plan puts neurons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.topology import Topology
from hotcold.actors.setup import placement_choice
from hotcold.actors.setup.assignment import hottest_neurons
from hotcold.actors.setup.placement_choice import plan_request
from hotcold.actors.setup.preflight import SystemOptions, prepare_system
from hotcold.actors.setup.shards import service_specs
from hotcold.model.files.artifact import ModelIdentity
from hotcold.placement.plan import plan_path, write_plan
from hotcold.placement.planner import make_plan
from tests.actors.in_process import InProcessSystem
from tests.actors.test_placement_choice import MACHINE, OPTIONS, WITH_GPU
from tests.conftest import TinyCheckpoint
from tests.placement_cases import layout_of
from tests.tiny_models import make_tiny
from tests.unit.test_reference import relative_difference

Tiny = Callable[..., TinyCheckpoint]
SIZES = ([1], [7, 3], [40])  # tokens of each step, in turn


def hot_ids(num_layers: int, ffn_size: int) -> list[np.ndarray]:
    """A third of layer 0, none of layer 1, some of the others."""
    rng = np.random.default_rng(5)
    shares = [ffn_size // 3, 0, *[11] * (num_layers - 2)][:num_layers]
    return [np.sort(rng.choice(ffn_size, k, replace=False)).astype(np.int32) for k in shares]


@pytest.mark.parametrize("variant", ["llama-mlp-bias", "opt-postnorm", "falcon-bias"])
def test_hot_and_cold_equal_all_cold(tiny: Tiny, variant: str) -> None:
    checkpoint = tiny(variant)
    with InProcessSystem(checkpoint.path, 2, 2, hot=hot_ids) as system:
        for mode in ("dense", "exact"):
            for sizes in SIZES:
                found = system.logits(mode, checkpoint.ids, sizes)
                assert relative_difference(found, checkpoint.logits) < 1e-4
        engine = system.engine("dense")
        engine.step(checkpoint.ids[:1].tolist(), [0], [0])
        config = system.config
        assert engine.times.num_neurons == config.num_neurons


def test_bad_numbers_of_hot_neurons_are_the_gpus(tiny: Tiny) -> None:
    checkpoint = tiny("llama-relu")
    with InProcessSystem(checkpoint.path, 1, 1, hot=hot_ids) as system:
        system.services[0]._hot.arrays.down[:] = np.nan  # type: ignore[attr-defined]
        with pytest.raises(Exception, match="not finite in layer 0") as caught:
            system.logits("dense", checkpoint.ids[:2], [1])
        assert caught.value.service == 0  # type: ignore[attr-defined]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemConfig:
    """A system of two CPU services with a plan that has a GPU."""
    monkeypatch.setattr(placement_choice, "read_layout", lambda: layout_of(MACHINE))
    path = make_tiny("llama-relu", tmp_path / "model")
    system, config = prepare_system(path, OPTIONS)
    request = plan_request(system, None, None, WITH_GPU.identity, None)
    plan = make_plan(config, WITH_GPU, None, request)
    places = np.random.default_rng(1).choice(3, plan.neuron_device.shape).astype(np.int16)
    file = plan_path(path, plan.request)
    write_plan(file, ModelIdentity.of(path), replace(plan, neuron_device=places))
    return replace(system, plan_path=str(file))


@pytest.mark.parametrize(("num_hot", "num_cpus"), [(-1, 2), (0, 2), (30, 1)])
def test_every_neuron_has_one_place(planned: SystemConfig, num_hot: int, num_cpus: int) -> None:
    system = replace(planned, num_hot_neurons=num_hot, num_cpu_actors=num_cpus)
    config = prepare_system(Path(system.model_path), SystemOptions())[1]
    specs = service_specs(system, config)
    for layer in range(config.num_layers):
        ids = [spec.neuron_ids[layer] for spec in specs if spec.neuron_ids is not None]
        assert sorted(np.concatenate(ids)) == list(range(config.ffn_size))
    hot = specs[0].neuron_ids
    planned_hot = service_specs(planned, config)[0].neuron_ids
    assert planned_hot is not None
    total = sum(ids.size for ids in planned_hot)
    assert sum(ids.size for ids in hot or []) == (total if num_hot < 0 else num_hot)
    for layer, own in enumerate(hot or []):
        assert np.isin(own, planned_hot[layer]).all()
    assert Topology(tuple(specs)).num_hot.tolist() == (
        [ids.size for ids in hot] if hot else [0] * config.num_layers
    )


def test_hottest_neurons() -> None:
    frequency = np.array([[0.1, 0.9, 0.5, 0.0], [0.8, 0.2, 0.3, 0.7]])
    found = hottest_neurons((2, 4), 3, frequency)
    assert [ids.tolist() for ids in found] == [[1], [0, 3]]
    allowed = np.array([[True, False, True, True], [False, True, False, False]])
    found = hottest_neurons((2, 4), 9, frequency, allowed)
    assert [ids.tolist() for ids in found] == [[0, 2, 3], [1]]
    even = hottest_neurons((3, 100), 30)
    assert [ids.size for ids in even] == [10] * 3
    assert all(np.diff(ids).max() < 30 for ids in even)
