"""What the progress line shows: bytes where they are counted, kernels that had to be compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numba
import pytest
import ray
from rich.progress import Progress

from hotcold.actors.processes.driver_actor import DriverActor
from hotcold.actors.processes.reports import LOADING_KERNELS, PREPARING
from hotcold.actors.protocol.messages import (
    LOADING_WEIGHTS,
    WRITING_NEURONS,
    LoadProgress,
    ServiceProgress,
    SystemConfig,
)
from hotcold.actors.telemetry.vitals import CompileCounter
from hotcold.jobs.support.console import bytes_column


def test_compiled_kernels_are_counted() -> None:
    counter = CompileCounter()

    @numba.njit
    def twice(x: int) -> int:
        return 2 * x

    assert twice(3) == 6 and twice(4) == 8
    assert counter.num_begun == 1 and not counter.is_compiling
    assert twice(1.5) == 3.0
    assert counter.num_begun == 2 and not counter.is_compiling


def test_bytes_are_shown_where_they_are_counted() -> None:
    bar = Progress()
    shown = {}
    for counts_bytes in (False, True):
        bar.add_task("", total=2_000_000, completed=1_000_000, counts_bytes=counts_bytes)
        shown[counts_bytes] = str(bytes_column().render(bar.tasks[-1]))
    assert shown == {False: "", True: "1.0/2.0 MB"}


class Loading:
    """Stands in for a service's actor; without `told` it does not answer."""

    told: ServiceProgress | None = None

    @property
    def loaded(self) -> Any:
        return SimpleNamespace(remote=lambda: self)


def answers(services: list[Loading], timeout: float) -> list[ServiceProgress]:
    """Stands in for `ray.get`."""
    told = [service.told for service in services if service.told is not None]
    if len(told) < len(services):
        raise ray.exceptions.GetTimeoutError
    return told


def test_what_a_loading_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of all services together, and kernels from the first that has to be compiled."""
    monkeypatch.setattr(ray, "get", answers)
    gpu, cpu = Loading(), Loading()
    replacer = SimpleNamespace(stage="")
    connection = SimpleNamespace(handles=[gpu, cpu], replacer=replacer)
    config = SimpleNamespace(dtype="bfloat16")
    services = SimpleNamespace(connection=connection, stage="", notes=("a note",), config=config)
    intervals: list[float] = []
    with monkeypatch.context() as patch:
        file = "hotcold.actors.processes.driver_actor"
        patch.setattr(f"{file}.SystemServices", lambda *arguments: services)
        patch.setattr(f"{file}.loaded_bytes", lambda system, config: 1000)
        patch.setattr("sys.setswitchinterval", intervals.append)
        spawn: Any = None
        driver: Any = DriverActor(SystemConfig("somewhere"), spawn, spawn)
    assert 0 < intervals[0] < 0.001  # the engine's thread waits for none of the others as long

    def told(stage: str) -> LoadProgress:
        driver.services.stage = stage
        found = driver.progress()
        assert isinstance(found, LoadProgress) and found.total_bytes == 1000
        return found

    compiling = "compiling kernels for bfloat16, once: 3 so far"
    assert told("starting services") == LoadProgress(0, 1000, "starting services")
    assert told(PREPARING) == LoadProgress(0, 1000, PREPARING)
    gpu.told, cpu.told = ServiceProgress(0, 0, False), ServiceProgress(0, 0, True)
    assert told(PREPARING) == LoadProgress(0, 1000, "compiling kernels, once")
    cpu.told = ServiceProgress(0, 0, False, written_bytes=300, file_bytes=1000)
    assert told(PREPARING) == LoadProgress(300, 1000, WRITING_NEURONS)
    gpu.told, cpu.told = ServiceProgress(100, 0, False), ServiceProgress(250, 0, False)
    assert told(LOADING_WEIGHTS) == LoadProgress(350, 1000, LOADING_WEIGHTS, ("a note",))
    gpu.told, cpu.told = ServiceProgress(200, 1, False), ServiceProgress(250, 2, True)
    assert told(LOADING_WEIGHTS) == LoadProgress(450, 1000, compiling, ("a note",))
    cpu.told = None  # it compiles: what it said last holds
    assert told(LOADING_WEIGHTS) == LoadProgress(450, 1000, compiling, ("a note",))
    cpu.told = ServiceProgress(300, 2, False)  # all compiled, and weights are read on
    assert told(LOADING_WEIGHTS) == LoadProgress(500, 1000, LOADING_WEIGHTS, ("a note",))
    assert told(LOADING_KERNELS) == LoadProgress(1000, 1000, compiling, ("a note",))
    gpu.told, cpu.told = ServiceProgress(500, 0, False), ServiceProgress(500, 0, False)
    assert told(LOADING_KERNELS) == LoadProgress(1000, 1000, LOADING_KERNELS, ("a note",))
    assert told("ready") == LoadProgress(1000, 1000, "ready", ("a note",))
    replacer.stage = "restarting the cpu0 service"
    assert told("ready").stage == replacer.stage
