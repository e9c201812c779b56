"""The benchmarks that interrupt commands and harm systems: what they call right."""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.benchmark_programs import (
    ROOT,
    error_of,
    output_of,
    rows_of,
    run_benchmark,
    run_in_own_process,
    table_of,
)

FAULTS = runpy.run_module("benchmarks.faults")  # nothing imports it

BEFORE_RAY, BEFORE_OUTPUT, IN_OUTPUT, AFTER = (
    "before Ray",
    "before output",
    "in the output",
    "after it",
)


def interrupt(command: str, status: int, **changes: Any) -> dict[str, Any]:
    """One with pipes, before Ray, that left nothing."""
    usual = {
        "terminal": False,
        "moment_s": 1.0,
        "had_ray": False,
        "seen": 0.0,
        "output": 0.0,
        "wrong": "",
    }
    return usual | {"command": command, "status": status} | changes


def test_what_is_right_of_an_interrupt(tmp_path: Path) -> None:
    begun, whole = {"had_ray": True}, {"had_ray": True, "seen": 1.0, "output": 1.0}
    half = {"had_ray": True, "seen": 0.3, "output": 0.5}
    typed = {"terminal": True}
    interrupts = [
        interrupt("generate", 130),
        interrupt("generate", -2),  # Python was not there yet
        interrupt("generate", -2, **begun),
        interrupt("generate", 0, **begun),
        interrupt("generate", 130, **half),
        interrupt("generate", -11, **half),
        interrupt("generate", 0, **half),
        interrupt("generate", 0, **(half | {"output": 1.0})),  # it was as good as done
        interrupt("generate", 130, **(half | {"wrong": "process raylet left"})),
        interrupt("generate", 130, **whole),
        interrupt("generate", 0, **whole),
        interrupt("chat", 130, **half),
        interrupt("chat", 130, **(typed | half)),  # it ends the answer, not the conversation
        interrupt("chat", 0, **(typed | half)),
        interrupt("serve", 130, **(typed | begun)),
        interrupt("serve", 0, **(typed | whole)),
        interrupt("serve", 130, **(typed | whole)),
    ]
    table = table_of("interrupts", {"interrupts": interrupts, "beside": 2, "seed": 7}, tmp_path)
    assert rows_of(table) == [
        ["generate", "pipes", BEFORE_RAY, "2", "2", "-2: 1, 130: 1"],
        ["generate", "pipes", BEFORE_OUTPUT, "2", "0", "-2: 1, 0: 1"],
        ["generate", "pipes", IN_OUTPUT, "5", "2", "-11: 1, 0: 2, 130: 2"],
        ["generate", "pipes", AFTER, "2", "2", "0: 1, 130: 1"],
        ["chat", "terminal", IN_OUTPUT, "2", "1", "0: 1, 130: 1"],
        ["chat", "pipes", IN_OUTPUT, "1", "1", "130: 1"],
        ["serve", "terminal", BEFORE_OUTPUT, "1", "1", "130: 1"],
        ["serve", "terminal", IN_OUTPUT, "2", "1", "0: 1, 130: 1"],
    ]
    assert "seed 7, beside 2 busy programs" in table
    problems = [line for line in table.splitlines() if line.startswith("- ")]
    assert problems.count("- generate, in the output: process raylet left") == 1
    assert "- generate, in the output: exit status -11" in problems and len(problems) == 7


@pytest.mark.parametrize("leaks", ["", "2 requests that run"])
def test_faults_are_counted_by_load_and_kind(leaks: str, tmp_path: Path) -> None:
    part = {
        "faults": [["kill -9", 0, 2.0], ["scaled", 1, 0.5], ["kill -9", 2, 4.0]],
        "right": 5,
        "wrong": [],
        "leaks": leaks,
    }
    report = {"parts": {"batch of eight": part}, "exchange": "arena", "seed": 3}
    table = table_of("faults", report, tmp_path)
    assert rows_of(table) == [
        ["batch of eight", "kill -9", "2", "5", "0", "3.00", "4.00"],
        ["batch of eight", "scaled", "1", "5", "0", "0.50", "0.50"],
    ]
    assert "3 faults, seed 3: median 2.00 s, worst 4.00 s." in table
    assert f"Left lent in the end: {leaks or 'no request, no page'}." in table


class Replacing:
    """A system of one service, a process that sleeps; a lost one is replaced after a while."""

    def __init__(self, after_s: float) -> None:
        self.processes = [subprocess.Popen(["sleep", "1000"])]
        self.is_restarting = False
        self._after_s = after_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._replace)
        self._thread.start()

    def call(self, method: str) -> Any:
        if method == "processes":
            return {"driver": os.getpid(), "cpu0": self.processes[-1].pid}
        assert method == "progress"
        stage = "restarting the cpu0 service" if self.is_restarting else "ready"
        return SimpleNamespace(stage=stage)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        for process in self.processes:
            process.kill()
            process.wait()

    def _replace(self) -> None:
        while not self._closing.wait(0.01):
            status = psutil.Process(self.processes[-1].pid).status()
            if status in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                self.is_restarting = True
                self.processes[-1].kill()
                self._closing.wait(self._after_s)
                self.processes.append(subprocess.Popen(["sleep", "1000"]))
                self.is_restarting = False


class Tokens:
    """A load whose tokens never cease, as where those of before a fault come late."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.clock = self

    @property
    def now_s(self) -> float:
        return time.monotonic()

    def first_after(self, at_s: float) -> float | None:
        return at_s + 0.01 if self.now_s > at_s + 0.01 else None


@pytest.fixture
def replaced_after(request: pytest.FixtureRequest) -> Iterator[Replacing]:
    system = Replacing(request.param)
    yield system
    system.close()


@pytest.mark.parametrize("replaced_after", [0.02, 1.0], indirect=True)
@pytest.mark.parametrize("kind", ["kill -9", "SIGSTOP"])
def test_a_fault_is_over_when_the_lost_service_is_replaced(
    replaced_after: Replacing, kind: str
) -> None:
    """However soon that is, and however late: not when there was a silence, and tokens again."""
    load, before = Tokens(), replaced_after.processes[0]
    fault = FAULTS["inject"](replaced_after, load, FAULTS["KINDS"][kind], 7, random.Random(3))
    assert (fault.number, fault.kind, load.wrong) == (7, kind, [])
    assert before.wait() == -9 and len(replaced_after.processes) == 2
    assert not replaced_after.is_restarting
    if replaced_after._after_s == 1.0:
        assert fault.recovered_s - fault.over_s > 0.3


@pytest.mark.parametrize("replaced_after", [1000.0], indirect=True)
def test_a_service_that_is_never_replaced_is_told(
    replaced_after: Replacing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAULTS, "_LONGEST_RECOVERY_S", 2.0)
    load = Tokens()
    kind = FAULTS["KINDS"]["kill -9"]
    assert FAULTS["inject"](replaced_after, load, kind, 7, random.Random(3)) is None
    assert load.wrong == ["no token for long after fault 7, kill -9"]


@pytest.mark.thorough
def test_a_few_faults(tmp_path: Path) -> None:
    """On a machine with nothing else to do, too, where a service is back within half a second."""
    out = tmp_path / "report"
    kinds = "kill -9", "SIGSTOP", "service paused", "driver paused", "all paused"
    only = [word for kind in kinds for word in ("--only", kind)]
    options = ["--faults", 10, "--context", 512, "--out", out]
    output_of(run_in_own_process("faults", *options, *only))
    parts = json.loads(out.with_suffix(".json").read_text())["parts"]
    assert [len(part["faults"]) for part in parts.values()] == [5, 5]
    for part in parts.values():
        assert part["right"] > 0 and part["wrong"] == [] and part["leaks"] == ""


def test_an_unknown_kind_of_fault_is_refused() -> None:
    told = error_of(run_benchmark("faults", "--only", "earthquake"))
    assert "'earthquake' is not one of 'kill -9', 'kill -9 of two'" in told


def test_mutants_have_their_files_and_tests() -> None:
    listed = tomllib.loads((ROOT / "benchmarks/mutants.toml").read_text())
    assert len(listed) > 100
    for file, tests in listed.items():
        assert (ROOT / file).is_file(), file
        for test in tests:
            path, _, name = test.partition("::")
            assert f"\ndef {name}(" in (ROOT / path).read_text(), test
