"""Shares of neurons and activations, counted one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.topology import Topology
from hotcold.actors.setup.assignment import neuron_owners
from hotcold.actors.setup.shards import service_specs
from hotcold.model.config.build import read_config

tab = pytest.importorskip("hotcold.ui.page.placement_tab")  # which needs gradio
DEMO = Path(__file__).resolve().parents[2] / "demo"


def test_each_device_has_its_share() -> None:
    owner = np.array([[0, 0, 1, 1, 2], [0, 1, 1, 2, 2]], np.int16)
    counts = np.array([[30, 20, 5, 5, 0], [30, 5, 3, 1, 1]])
    gpu, first, second = tab.device_shares(["cuda:0", "cpu0", "cpu1"], owner, counts)
    assert [gpu.num_neurons, first.num_neurons, second.num_neurons] == [3, 4, 3]
    assert gpu.activations == pytest.approx(0.80)
    assert first.activations == pytest.approx(0.18)
    assert second.activations == pytest.approx(0.02)
    assert [gpu.neurons, first.neurons, second.neurons] == [0.3, 0.4, 0.3]


def test_a_device_may_hold_nothing() -> None:
    found = tab.device_shares(["cuda:0", "cpu0"], np.ones((2, 3), np.int16), None)
    assert [device.num_neurons for device in found] == [0, 6]
    assert (found[1].neurons, found[1].activations) == (1.0, None)


def test_the_demo_is_dealt_in_turn_without_a_plan() -> None:
    config = read_config(DEMO)
    system = SystemConfig(str(DEMO), num_cpu_actors=3, num_threads=3)
    owners = neuron_owners(config, Topology(tuple(service_specs(system, config))))
    found = tab.placement_of(system, config, owners)
    assert found.plan is None
    assert [device.name for device in found.devices] == ["cpu0", "cpu1", "cpu2"]
    assert sum(device.num_neurons for device in found.devices) == 4 * config.ffn_size
    assert sum(device.activations or 0 for device in found.devices) == pytest.approx(1)


def test_shares_of_layers_of_several_sizes() -> None:
    """What a smaller layer lacks is nobody's."""
    owner = np.array([[0, 1, -1, -1], [0, 0, 1, 1]], np.int16)
    counts = np.array([[6, 2, 0, 0], [1, 1, 0, 0]])
    first, second = tab.device_shares(["cpu0", "cpu1"], owner, counts)
    assert (first.num_neurons, first.neurons, first.activations) == (3, 0.5, 0.8)
    assert (second.num_neurons, second.neurons, second.activations) == (3, 0.5, 0.2)
