"""Benchmarks are programs that nothing imports, so tests run them as `python -m` does."""

from __future__ import annotations

import io
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


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    status: int
    out: str
    err: str


def run_benchmark(name: str, *arguments: object) -> Outcome:
    """Run `python -m benchmarks.name` in this process, which has imported most of it."""
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(ROOT)
        patch.setattr("sys.argv", [name, *map(str, arguments)])
        patch.delitem(sys.modules, f"benchmarks.{name}", raising=False)  # a program begins anew
        try:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code or 0
    return Outcome(status, out.getvalue(), err.getvalue())


def run_in_own_process(name: str, *arguments: object) -> Outcome:
    """The same in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    return Outcome(done.returncode, done.stdout, done.stderr)


def output_of(outcome: Outcome) -> str:
    """The standard output of a run that must succeed."""
    assert outcome.status == 0, outcome.err
    return outcome.out
