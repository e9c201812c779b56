"""Costs and budgets of devices, against figures worked out by hand and a search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hotcold.placement.profile import Rates
from hotcold.placement.solver.cost import (
    PlanDevice,
    RowBytes,
    neuron_seconds,
    part_costs,
    seen_share,
)
from hotcold.placement.solver.plan_devices import (
    GPU_RESERVE_BYTES,
    RESERVE_BYTES,
    make_plan_devices,
)
from tests.placement_cases import llama_config, make_machine


def rates(fired: float, chosen: float = 1.0) -> Rates:
    return Rates(np.array([[chosen]]), np.array([[fired]]))


@pytest.mark.parametrize(
    ("mode", "has_gate", "gpu", "cpu"),
    [
        ("dense", True, 1536 / 1000, 1536 / 50),
        ("exact", True, 768 / 1000, 512 / 50 + 256 / 40),
        ("sign", True, 512 / 1000, (256 + 256) / 40),
        ("lowrank", False, 384 / 1000, (256 + 128) / 40),
    ],
)
def test_seconds_of_a_neuron(mode: str, has_gate: bool, gpu: float, cpu: float) -> None:
    config = replace(llama_config(), has_gate=has_gate)
    columns = [
        PlanDevice("gpu0", True, 0, 0, 1000.0, 1000.0),
        PlanDevice("cpu0", False, 0, 0, 50.0, 40.0),
    ]
    factor = np.array([2.0]) if mode in ("sign", "lowrank") else None
    seconds = neuron_seconds(RowBytes.of(config), columns, rates(0.25), mode, factor)
    np.testing.assert_allclose(seconds, [[[gpu / 1e9, cpu / 1e9]]])


@pytest.mark.parametrize("window", [0, 17, 4096])
def test_a_window_is_read_and_no_more(window: int) -> None:
    """As the mean over the tokens of a context, each of which sees its window."""
    seen = [min(at + 1, window or 10**6) for at in range(100)]
    assert seen_share(window, 100) == pytest.approx(np.mean(seen) / 100, abs=0.006)
    config = replace(llama_config(), windows=(window,) * llama_config().num_layers)
    found = part_costs(config, 100, "float16", 0, None).read_bytes
    whole = part_costs(llama_config(), 100, "float16", 0, None).read_bytes
    assert (found[:-1] <= whole[:-1]).all() and found[-1] == whole[-1]
    assert (found[0] < whole[0]) == (0 < window < 100)


def test_devices_share_nodes_and_limits() -> None:
    machine = make_machine((8 << 30, 8 << 30), (4000, 8000))
    devices = make_plan_devices(
        machine, num_cpu_actors=3, cpu_memory_bytes=6000, host_reserve_bytes=60
    )
    assert [device.name for device in devices] == ["gpu0", "cpu0", "cpu1", "cpu2"]
    assert devices[0].budget_bytes == (8 << 30) - RESERVE_BYTES - GPU_RESERVE_BYTES
    # Node 0 has two actors of 2000 bytes, node 1 one of 8000: shares of 6000 and 60 as 1 : 4 : 1.
    assert [device.budget_bytes for device in devices[1:]] == [990, 3960, 990]
    assert [device.rows_gb_per_s for device in devices[1:]] == [25.0, 50.0, 25.0]
    assert sum(device.gather_gb_per_s for device in devices[1:]) == 80.0
    limited = make_plan_devices(machine, num_cpu_actors=1, gpu_memory_bytes=GPU_RESERVE_BYTES)
    assert [device.name for device in limited] == ["cpu0"]
    limited = make_plan_devices(machine, num_cpu_actors=1, gpu_memory_bytes=9 << 30)
    assert limited[0].budget_bytes == (8 << 30) - GPU_RESERVE_BYTES
    first_is_full = make_machine((1 << 20, 8 << 30), (4000,))
    names = [device.name for device in make_plan_devices(first_is_full, num_cpu_actors=1)]
    assert names == ["cpu0"]  # a system uses the first GPU alone
