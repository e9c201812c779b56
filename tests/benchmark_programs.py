"""Benchmarks are programs that nothing imports, so tests run them as `python -m` does."""

from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ABOUT = {"machine": "a machine", "date": "2000-01-01", "shape": "some layers", "batch": 1}


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: int
    out: str
    err: str


def run_benchmark(name: str, *arguments: object) -> Outcome:
    """Run `python -m benchmarks.name` in this process, which has imported most of it; no PATH."""
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(ROOT)
        patch.setenv("PATH", "")
        patch.setattr("sys.argv", [name, *map(str, arguments)])
        patch.delitem(sys.modules, f"benchmarks.{name}", raising=False)  # a program begins anew
        try:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code or 0
    return Outcome(status, out.getvalue(), err.getvalue())


def run_in_own_process(name: str, *arguments: object, modules: Path | None = None) -> Outcome:
    """The same in a process of its own; `modules` is a folder whose modules come first."""
    path = [str(modules)] if modules else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, str(ROOT)]), "PATH": ""}
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    return Outcome(done.returncode, done.stdout, done.stderr)


def output_of(outcome: Outcome) -> str:
    """The standard output of a run that must succeed."""
    assert outcome.status == 0, outcome.err
    return outcome.out


def error_of(outcome: Outcome) -> str:
    """The error line of a run that must fail, without the usage that click prints above it."""
    assert outcome.status != 0 and "Traceback" not in outcome.err
    lines = [line for line in outcome.err.splitlines() if line.startswith("Error: ")]
    assert lines == outcome.err.splitlines()[-1:]
    return lines[0]


def table_of(name: str, report: dict[str, Any], folder: Path) -> str:
    """The table that the benchmark makes of a report."""
    file = folder / "report.json"
    file.write_text(json.dumps(ABOUT | report))
    return output_of(run_benchmark(name, "--table-of", file))


def rows_of(table: str) -> list[list[str]]:
    """The cells of each row, headers and rules left out."""
    lines = table.splitlines()
    rules = [number for number, line in enumerate(lines) if line.startswith("| ---")]
    wide = {lines[rule].count("|") for rule in rules}
    rows = [line for number, line in enumerate(lines) if line.startswith("|")
            and number not in rules and number + 1 not in rules]  # fmt: skip
    assert {row.count("|") for row in rows} <= wide
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
