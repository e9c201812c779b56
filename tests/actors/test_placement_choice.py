"""Systems load by the plan that was made for them alone; hot neurons change no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotcold.actors.driver.driver import Driver
from hotcold.actors.protocol.stripes import num_shares
from hotcold.actors.setup import placement_choice
from hotcold.actors.setup.placement_choice import plan_note, plan_request
from hotcold.actors.setup.preflight import SystemOptions, prepare_system, read_model
from hotcold.actors.setup.shards import service_specs
from hotcold.model.errors import ArtifactError, UsageError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.placement.machine.description import CpuNode, GpuDevice, Machine
from hotcold.placement.plan import PlacementPlan, plan_path, write_plan
from tests.actors.batching import complete, greedy
from tests.actors.in_process import InProcessSystem
from tests.placement_cases import layout_of, make_plan
from tests.tiny_models import make_tiny

NODES = tuple(CpuNode(f"node{i}", 1, 16 << 30, 8 << 30, 40.0 + i, 38.0, 30.0) for i in range(2))
MACHINE = Machine("a machine", NODES, (), 20.0, "")
WITH_GPU = replace(MACHINE, gpus=(GpuDevice("gpu0", "a GPU", 8 << 30, 8 << 30, 500.0, 25.0, True),))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(placement_choice, "read_layout", lambda: layout_of(MACHINE))
    monkeypatch.setattr(placement_choice, "read_cached", lambda layout: None)
    return make_tiny("llama-relu", tmp_path / "model")


def planned(model: Path, options: SystemOptions, machine: Machine = MACHINE) -> PlacementPlan:
    """The plan that `hotcold plan` would make with these options."""
    system, config = prepare_system(model, options)
    request = plan_request(system, options, machine.identity, None)
    return make_plan(config, machine, None, request)


def saved(model: Path, plan: PlacementPlan) -> Path:
    path = plan_path(model, plan.request)
    write_plan(path, ModelIdentity.of(model), plan)
    return path


OPTIONS = SystemOptions(num_threads=2, num_cpu_actors=2)


def test_the_plan_for_these_options_is_used_and_no_other(model: Path) -> None:
    assert prepare_system(model, OPTIONS)[0].plan_path == ""
    path = saved(model, planned(model, OPTIONS))
    assert prepare_system(model, OPTIONS)[0].plan_path == str(path)
    for other in (
        replace(OPTIONS, context_length=64),
        replace(OPTIONS, mode="dense"),
        replace(OPTIONS, num_cpu_actors=1),
        replace(OPTIONS, cpu_memory_bytes=8 << 30),
        replace(OPTIONS, kv_dtype="float16"),
    ):
        assert prepare_system(model, other)[0].plan_path == ""


def test_a_plan_stays_that_of_its_machine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is measured anew, and with more memory; a note says so. Others are told apart."""
    path = saved(model, planned(model, OPTIONS))
    named = replace(OPTIONS, plan=path)

    def loads_by(machine: Machine, measured: Machine | None) -> str:
        monkeypatch.setattr(placement_choice, "read_layout", lambda: layout_of(machine))
        monkeypatch.setattr(placement_choice, "read_cached", lambda layout: measured)
        system, config = prepare_system(model, OPTIONS)
        assert system.plan_path == prepare_system(model, named)[0].plan_path == str(path)
        return plan_note(system, config)

    def of_nodes(**changes: Any) -> Machine:
        return replace(MACHINE, nodes=tuple(replace(node, **changes) for node in NODES))

    assert loads_by(MACHINE, None) == loads_by(MACHINE, MACHINE) == ""
    assert loads_by(MACHINE, of_nodes(read_gb_per_s=41.0, rows_gb_per_s=9.0)) == ""
    slower = loads_by(MACHINE, of_nodes(read_gb_per_s=20.0))
    assert "this machine read 81 GB/s and reads 40 (`hotcold plan` makes another)" in slower
    larger = loads_by(of_nodes(total_bytes=32 << 30), None)
    assert "this machine had 32.00 GiB of memory and has 64.00 GiB" in larger
    other = of_nodes(num_cores=2)
    monkeypatch.setattr(placement_choice, "read_layout", lambda: layout_of(other))
    assert prepare_system(model, OPTIONS)[0].plan_path == ""
    with pytest.raises(ArtifactError, match=r"node0 of 1 cores, .* not the machine .* of 2 cores"):
        prepare_system(model, named)


def test_a_named_plan_for_other_options_is_refused(model: Path, tmp_path: Path) -> None:
    path = saved(model, planned(model, OPTIONS))
    with pytest.raises(ArtifactError, match="--context 128, not --context 64") as caught:
        prepare_system(model, replace(OPTIONS, context_length=64, plan=path))
    assert "\n" not in str(caught.value)
    other = make_tiny("llama-relu", tmp_path / "other", seed=1)
    with pytest.raises(ArtifactError, match="belongs to the model 'model'"):
        prepare_system(other, replace(OPTIONS, plan=path))
    with pytest.raises(ArtifactError, match="there is no plan file"):
        prepare_system(model, replace(OPTIONS, plan=tmp_path / "none"))


def test_a_plan_with_a_gpu_is_left_alone_unless_named(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_choice, "read_layout", lambda: layout_of(WITH_GPU))
    plan = planned(model, OPTIONS, WITH_GPU)
    assert plan.num_gpus == 1
    path = saved(model, plan)
    assert prepare_system(model, OPTIONS)[0].plan_path == ""
    with pytest.raises(UsageError, match="GPU"):
        prepare_system(model, replace(OPTIONS, plan=path))


def test_the_same_tokens_with_a_plan_and_without(model: Path) -> None:
    request = greedy([1, 2, 3], 8)

    def run() -> tuple[list[int], list[int]]:
        """The tokens of the system that is chosen now, and the neurons of each CPU service."""
        config, _ = prepare_system(model, OPTIONS)
        specs = service_specs(config, read_model(model))
        with InProcessSystem(model, specs=specs) as system:
            driver = Driver(config, system.exchange, system.topology)
            ids = complete(driver, request).ids
            driver.close()
        return ids, [sum(map(len, spec.neuron_ids or [])) for spec in specs[1:]]

    without, assigned = run()
    assert len(without) == 8 and assigned[0] == assigned[1]
    plan = planned(model, OPTIONS)
    places = plan.neuron_device.copy()
    places[:, ::3] = 0  # two thirds of the neurons
    places[:, 1::3] = 0
    places[:, 2::3] = 1
    saved(model, replace(plan, neuron_device=places))
    with_plan, planned_for = run()
    a_share = places.size / num_shares(read_model(model))
    for device, size in enumerate(planned_for):
        assert size == pytest.approx((places == device).sum(), abs=a_share / 2)
    assert with_plan == without
