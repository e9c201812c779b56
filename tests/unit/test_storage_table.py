"""The table of `benchmarks.storage`: what is in which column, and what is drawn of it."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import click
import pytest

from benchmarks.limited_run import Peak
from benchmarks.storage import _COLUMNS, Case, Program, Report, Run, _line, table
from benchmarks.storage_plot import points_of

_READS = {"bytes_read": 40e6, "wait_share": 0.5, "hit_rate": 0.9, "recall": 0.8}
_STORED = Run(20.0, Peak(3 << 30), _READS, 2e9, 50.0, 80.0, plan={"tokens_per_s": 22.0}, services=2)


def _row(run: Run, case: Case, limit: int = 0, planned: float = 0.0) -> dict[str, str]:
    line = _line("hotcold dense", case, limit, [run], 40.0, 0.0, planned)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    return dict(zip(_COLUMNS, cells, strict=True))


def test_a_row_says_what_was_measured() -> None:
    row = _row(_STORED, Case(4 << 30), 1_000_000_000, 25.0)
    assert (row["GiB"], row["of the promise"], row["disk limit MB/s"]) == ("4.00", "0.750", "1000")
    assert (row["tokens/s"], row["planned"], row["of its own in memory"]) == (
        "20.00",
        "25.00",
        "0.50",
    )
    assert (row["ms waited"], row["its limit, tokens/s"]) == ("25.0", "50.0")
    assert (row["experts guessed"], row["read ahead, of use"]) == ("80.0%", "")
    assert row["at this memory's speed"] == "22.00"


def test_a_share_is_no_promise() -> None:
    case = Case(resident=0.25)
    assert case.options == ["--resident", "0.25"] and case.limits(5).memory_bytes == 0
    assert case.limits(5).disk_bytes_per_s == 5 and Case().limits(5).disk_bytes_per_s == 0
    row = _row(_STORED, case)
    assert row["GiB"] == "25%" and row["of the promise"] == ""


def test_rows_with_sizes_are_drawn(tmp_path: Path) -> None:
    cases = [Case(), Case(2 << 30), Case(resident=0.5)]
    lines = [_line("hotcold dense", case, 0, [_STORED], 40.0, 0.0, 25.0) for case in cases]
    report = tmp_path / "report.md"
    report.write_text("\n".join(lines))
    points = points_of(report, "hotcold dense")
    assert [point.gib for point in points] == [2.0, 3.0]
    assert points[0].planned == 25.0 and points[0].allowed == pytest.approx(50.0)


def test_a_report_goes_on_from_what_it_has(tmp_path: Path) -> None:
    path, settings = tmp_path / "report.json", {"model": "m"}
    whole = Program("hotcold dense", Case(), 0, ("--mode", "dense"))
    half = Program("hotcold dense", Case(2 << 30), 5, ("--mode", "dense"))
    llama = Program("llama.cpp", half.case, 5)
    Report(path, settings).add(whole, Run(40.0, Peak()))
    Report(path, settings).add(half, _STORED)
    again = Report(path, settings)
    assert again.runs("hotcold dense", half.case, 5) == [_STORED]
    assert again.runs("hotcold dense", half.case, 0) == again.runs("llama.cpp", half.case, 5) == []
    again.add(llama, Run(2.0, Peak()))
    again.add(half, _STORED)
    assert len(Report(path, settings).runs("hotcold dense", half.case, 5)) == 2
    rows = [line.split("|")[2:7] for line in table(again, [whole, half, llama, half])[2:]]
    assert [row[4].strip() for row in rows] == ["", "10.0", ""]
    assert [row[3].strip() for row in rows] == ["1.00", "0.50", ""]
    assert again.heading == (
        f"model m; room 1.25 of a size is hotcold's cgroup; services 2; days {date.today()}.\n\n"
    )
    with pytest.raises(click.UsageError, match="other options"):
        Report(path, {"model": "other"})
