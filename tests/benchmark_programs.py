"""Benchmarks are programs that nothing imports, so tests run them as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ABOUT = {"machine": "a machine", "date": "2000-01-01", "shape": "some layers", "batch": 1}


def run_benchmark(
    name: str, *arguments: object, modules: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `benchmarks.name`; `modules` is a folder whose modules come first, PATH holds none."""
    path = [str(modules)] if modules else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, str(ROOT)]), "PATH": ""}
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def output_of(name: str, *arguments: object, modules: Path | None = None) -> str:
    """The standard output of a run that must succeed."""
    done = run_benchmark(name, *arguments, modules=modules)
    assert done.returncode == 0, done.stderr
    return done.stdout


def error_of(name: str, *arguments: object) -> str:
    """The error line of a run that must fail, without the usage that click prints above it."""
    done = run_benchmark(name, *arguments)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert lines == done.stderr.splitlines()[-1:]
    return lines[0]


def table_of(name: str, report: dict[str, Any], folder: Path) -> str:
    """The table that the benchmark makes of a report."""
    file = folder / "report.json"
    file.write_text(json.dumps(ABOUT | report))
    return output_of(name, "--table-of", file)


def rows_of(table: str) -> list[list[str]]:
    """The cells of each row, headers and rules left out."""
    lines = table.splitlines()
    rules = [number for number, line in enumerate(lines) if line.startswith("| ---")]
    wide = {lines[rule].count("|") for rule in rules}
    rows = [line for number, line in enumerate(lines) if line.startswith("|")
            and number not in rules and number + 1 not in rules]  # fmt: skip
    assert {row.count("|") for row in rows} <= wide
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
