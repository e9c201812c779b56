"""The benchmarks that interrupt commands and harm systems: what they call right."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.benchmark_programs import ROOT, error_of, rows_of, run_benchmark, table_of

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


def test_an_unknown_kind_of_fault_is_refused() -> None:
    told = error_of(run_benchmark("faults", "--only", "earthquake"))
    assert "'earthquake' is not one of 'kill -9', 'SIGSTOP'" in told


def test_mutants_have_their_files_and_tests() -> None:
    listed = tomllib.loads((ROOT / "benchmarks/mutants.toml").read_text())
    assert len(listed) > 100
    for file, tests in listed.items():
        assert (ROOT / file).is_file(), file
        for test in tests:
            path, _, name = test.partition("::")
            assert f"\ndef {name}(" in (ROOT / path).read_text(), test
