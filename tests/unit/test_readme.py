"""README is short and true: its tree is the folders', its figures are the reports'."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.documents import ROOT, page

README = page("README.md").text
SPEED = page("docs/speed.md").text
MAX_LINES = 110


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= MAX_LINES


def test_it_begins_with_a_picture_and_two_commands() -> None:
    assert README.index("┌──") < README.index("## Set up")
    first, second = (part.split("```")[0] for part in README.split("```sh\n")[1:3])
    assert first.count("\n") == second.count("\n") == 1
    assert "hotcold generate" in first and second.rstrip().endswith("pytest")


def test_the_tree_is_the_folders() -> None:
    text = README[README.index("## Where is what") :]
    shown = set(re.findall(r"^    (\S+)/ +\S", text, re.M)) | set(re.findall(r"`(\w+)/`", text))
    tracked = subprocess.check_output(["git", "-C", str(ROOT), "ls-files"], text=True).split()
    folders = {path.split("/")[0] for path in tracked if "/" in path and path[0] != "."}
    assert shown == folders


def _report(name: str) -> list[list[str]]:
    """The cells of every row of a report's table."""
    text = (ROOT / "benchmarks/results" / f"{name}.md").read_text()
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]


def test_what_a_predictor_costs_is_the_reports() -> None:
    shown = re.findall(r"^\| ((?:sign|lowrank) 0\.\d+ \| .*) \|$", SPEED, re.M)
    rows = {" | ".join(cells[i] for i in (0, 1, 2, 3, 5, 9)) for cells in _report("demo-modes")}
    assert len(shown) == 4 and set(shown) <= rows


ROWS = re.findall(r"^\| (\w+), (.*?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, re.M)


def test_readme_shows_rows_and_says_what_they_are_of() -> None:
    assert len(ROWS) == 3
    speed = README[README.index("## Speed") : README.index("## Where is what")]
    assert "random weights" in speed


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_a_row_of_readme_is_a_reports(row: tuple[str, ...]) -> None:
    kind, what, *figures = row
    kind_of_work, *mode = what.split(", ")
    label = f"{kind_of_work} of " if mode else kind_of_work
    (found,) = (
        cells
        for cells in _report("llama-7b-8-layers")
        if cells[0] == kind
        and cells[1].startswith(label)
        and (not mode or f", {mode[0]}," in cells[1])
        and "tokens/s" in cells[1]
    )
    assert [found[2], found[3], found[4].split()[0]] == figures


SECTIONS = [
    section
    for section in re.split(r"^## ", SPEED, flags=re.M)
    if "/results/" in section and "\n| " in section and "<!-- " not in section
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_figures_are_of_the_reports_that_a_section_names(section: str) -> None:
    """Each ratio and each speed of its tables is in one of these, rounded."""
    reports = [ROOT / path for path in re.findall(r"benchmarks/results/\S+?\.md", section)]
    told = "".join(path.read_text() for path in reports)
    known = {float(figure) for figure in re.findall(r"\d+\.?\d*", told)}
    rows = re.findall(r"^\|[^|]*\|(.*[\d].*)\|$", section, re.M)
    figures = re.findall(r"\d+\.\d+|\d+(?= \()", "\n".join(rows))
    assert figures
    missing = [
        figure
        for figure in figures
        if figure not in {f"{one:.{len(figure.partition('.')[2])}f}" for one in known}
    ]
    assert not missing
