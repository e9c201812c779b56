"""What the progress line shows: bytes where they are counted, kernels that had to be compiled."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import pytest
import ray
from numba.extending import overload
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
from hotcold.actors.telemetry.vitals import CompileWatch
from hotcold.jobs.support.console import bytes_column


def test_a_process_knows_that_it_compiles() -> None:
    watch, seen = CompileWatch(), []

    def one(x: int) -> int:
        raise NotImplementedError

    @overload(one)
    def choose(x):
        seen.append(watch.is_compiling)
        return lambda x: 1

    @numba.njit
    def one_more(x: int) -> int:
        return x + one(x)

    assert one_more(3) == 4 and set(seen) == {True} and not watch.is_compiling


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


def test_what_a_loading_driver_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of all services together, and kernels from the first that has to be compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
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

    compiling = "compiling kernels for bfloat16, once"
    assert told("starting services") == LoadProgress(0, 1000, "starting services")
    assert told(PREPARING) == LoadProgress(0, 1000, PREPARING)
    gpu.told, cpu.told = ServiceProgress(0, False), ServiceProgress(0, True)
    assert told(PREPARING) == LoadProgress(0, 1000, compiling)
    cpu.told = ServiceProgress(0, False, written_bytes=300, file_bytes=1000)
    assert told(PREPARING) == LoadProgress(300, 1000, WRITING_NEURONS)
    gpu.told, cpu.told = ServiceProgress(100, False), ServiceProgress(250, False)
    assert told(LOADING_WEIGHTS) == LoadProgress(350, 1000, LOADING_WEIGHTS, ("a note",))
    assert told(LOADING_KERNELS) == LoadProgress(1000, 1000, LOADING_KERNELS, ("a note",))
    gpu.told, cpu.told = ServiceProgress(200, False), ServiceProgress(250, True)
    kernels = tmp_path / "hotcold/numba/serve_ffn-1"
    kernels.mkdir(parents=True)
    for name in ("a.nbc.lock", "a.nbc", "b.nbc.lock", "c.nbc.lock"):
        (kernels / name).touch()
    os.utime(kernels / "c.nbc.lock", (0, 0))  # of another start
    compiling += ": 1 of 2"
    assert told(LOADING_WEIGHTS) == LoadProgress(450, 1000, compiling, ("a note",))
    cpu.told = None  # it compiles: what it said last holds
    assert told(LOADING_WEIGHTS) == LoadProgress(450, 1000, compiling, ("a note",))
    cpu.told = ServiceProgress(300, False)  # all compiled, and weights are read on
    assert told(LOADING_WEIGHTS) == LoadProgress(500, 1000, LOADING_WEIGHTS, ("a note",))
    assert told(LOADING_KERNELS) == LoadProgress(1000, 1000, compiling, ("a note",))
    assert told("ready") == LoadProgress(1000, 1000, "ready", ("a note",))
    replacer.stage = "restarting the cpu0 service"
    assert told("ready").stage == replacer.stage
