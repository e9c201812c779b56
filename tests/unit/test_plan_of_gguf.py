"""What is counted of a GGUF file, whose down projections some systems keep as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotcold.actors.cpu.cpu_service import load_cpu_service
from hotcold.actors.cpu.dense_service import load_dense_service
from hotcold.actors.protocol.messages import ServiceSpec, SystemConfig
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.setup import placement_choice
from hotcold.actors.setup.preflight import prepare_system
from hotcold.jobs.support import planning
from hotcold.model.config.build import read_config
from hotcold.model.weights.sizes import ffn_bytes
from hotcold.placement.machine.description import Machine
from tests.e2e.commands import run_main
from tests.placement_cases import layout_of, make_machine
from tests.tiny_models import make_tiny
from tests.unit.test_down_outputs import MIXED
from tests.unit.test_gguf_model import file_of, neurons, tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    file_of(tiny(), path, MIXED)
    return path


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of a stand-in for this machine: bytes of each."""
    gpus: list[int] = []

    def described(**_options: Any) -> Machine:
        return make_machine(gpu_bytes=tuple(gpus))

    monkeypatch.setattr(planning, "this_machine", described)
    monkeypatch.setattr(planning, "read_layout", lambda: layout_of(described()))
    monkeypatch.setattr(placement_choice, "read_layout", lambda: layout_of(described()))
    return gpus


def loaded_bytes(path: Path, is_dense: bool) -> int:
    """Of all neurons, as a service holds them."""
    config, ids = read_config(path), neurons(tiny())
    spec = ServiceSpec("cpu0", 1, 1, SystemConfig(str(path)), neuron_ids=list(ids))
    load = load_dense_service if is_dense else load_cpu_service
    service: Any = load(spec, config, lambda count: None)
    no_bytes = ("starts", "first_stripe", "stripes_at_once")
    held = {name: array for name, array in service.arrays._asdict().items() if name not in no_bytes}
    return sum(array.nbytes for array in held.values()) + 4 * 1024


def planned(path: Path, *arguments: str) -> dict[str, Any]:
    """The command's JSON, with all that it printed as `said`."""
    done = run_main("plan", path, "--cpu-actors", "1", *arguments, "--json")
    assert done.err == ""
    return done.report | {"said": done.out}


def neuron_bytes(report: dict[str, Any]) -> int:
    return sum(device["bytes"]["neurons"] for device in report["devices"])


def test_a_plan_of_what_keeps_the_files_rows(path: Path, gpus: list[int]) -> None:
    """Such a system loads by no plan, so none is written."""
    report = planned(path)
    assert neuron_bytes(report) == loaded_bytes(path, is_dense=True)
    assert report["path"] is None and "no plan file: none is needed" in report["said"]
    assert not (path.parent / "hotcold").exists()


def test_a_plan_to_be_named_is_of_rows_by_neurons(
    path: Path, gpus: list[int], tmp_path: Path
) -> None:
    report = planned(path, "--out", str(tmp_path / "plan"))
    assert neuron_bytes(report) == loaded_bytes(path, is_dense=False)
    options = SystemOptions(plan=Path(report["path"]), num_cpu_actors=1)
    system, config = prepare_system(path, options)
    assert system.plan_path == report["path"] and not system.down_transposed
    assert ffn_bytes(config, 1024) == neuron_bytes(report)


@pytest.mark.parametrize(("arguments", "own"), [(("--mode", "exact"), []), ((), [8 << 30])])
def test_a_plan_of_what_loads_by_it(
    path: Path, gpus: list[int], arguments: tuple[str, ...], own: list[int]
) -> None:
    gpus += own
    report = planned(path, *arguments)
    written = Path(report["path"])
    assert written.exists() and "none is needed" not in report["said"]
    assert neuron_bytes(report) > loaded_bytes(path, is_dense=True)
    written.unlink()


@pytest.mark.parametrize(
    ("variant", "uses_gpu"), [("turbosparse-mixtral", False), ("mixtral", True)]
)
def test_experts_with_predictors_are_planned_without_a_gpu(
    variant: str, uses_gpu: bool, gpus: list[int], tmp_path: Path
) -> None:
    gpus.append(8 << 30)
    report = planned(make_tiny(variant, tmp_path / "m"))
    assert any("gpu" in device["name"] for device in report["devices"]) == uses_gpu


def test_doctor_counts_what_is_loaded(path: Path) -> None:
    needed = json.loads(run_main("doctor", path, "--no-measure", "--json").out.splitlines()[-1])
    assert needed["model"]["ffn_bytes"] == loaded_bytes(path, is_dense=True)
