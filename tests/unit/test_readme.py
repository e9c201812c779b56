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


def test_tables_are_the_reports() -> None:
    found = re.findall(r"<!-- (benchmarks/results/\S+\.md) -->\n(.*?)<!-- end -->", SPEED, re.S)
    assert len(found) == 1
    for path, table in found:
        assert table.strip() == (ROOT / path).read_text().strip()


def _report(name: str) -> list[list[str]]:
    """The cells of every row of a report's table."""
    text = (ROOT / "benchmarks/results" / f"{name}.md").read_text()
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]


ROWS = re.findall(r"^\| (\w+), (.*?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, re.M)


def test_readme_shows_rows_and_says_what_they_are_of() -> None:
    assert len(ROWS) == 4
    speed = README[README.index("## Speed") : README.index("## Where is what")]
    assert "random weights" in speed


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_a_row_of_readme_is_a_reports(row: tuple[str, ...]) -> None:
    kind, what, *figures = row
    whole = what.endswith(", 32 layers")
    rows = _report("llama-7b" if whole else "llama-7b-8-layers")
    kind_of_work, *mode = what.removesuffix(", 32 layers").split(", ")
    label = f"{kind_of_work} of " if mode else kind_of_work
    (found,) = (
        cells
        for cells in rows
        if cells[0] == kind
        and cells[1].startswith(label)
        and (not mode or f", {mode[0]}," in cells[1])
        and "tokens/s" in cells[1]
    )
    assert [found[2], found[3], found[4].split()[0]] == figures


def test_the_table_of_requests_at_once_is_its_reports() -> None:
    section = SPEED[SPEED.index("## Several requests at once") : SPEED.index("## Small shapes")]
    lines = re.findall(r"^\| (f16|q8|q4) \| (.*) \|$", section, re.M)
    assert len(lines) == 3
    for kind, cells in lines:
        assert cells.split(" | ") == [
            f"{float(row[3]):.{1 if batch is None else 0}f} ({row[4].split()[0]} ×)"
            for row in _report(f"llama-7b-8-layers-xeon-bf16-{kind}")
            if (found := re.match(r"decode of (?:\d+ tokens|(\d+) requests .*), `exact`", row[1]))
            for batch in found.groups()
        ]


def test_the_table_as_avx2_is_its_reports() -> None:
    section = SPEED[SPEED.index("## As AVX2") : SPEED.index("## Several requests at once")]
    lines = re.findall(r"^\| (f16|q8|q4) \| (.*) \|$", section, re.M)
    assert len(lines) == 3
    rows, sign = _report("llama-7b-8-layers-as-avx2"), _report("llama-7b-8-layers-as-avx2-sign")
    for kind, cells in lines:
        predicted = [row for row in sign if row[0] == kind and row[1].startswith("decode of")]
        decode = predicted + [
            row for row in rows if row[0] == kind and row[1].startswith("decode of")
        ]
        prefill = [row for row in rows if row[0] == kind and row[1].startswith("prefill of")]
        assert cells.split(" | ") == [
            f"{float(row[3]):.{0 if 'at once' in row[1] else 1}f} ({row[4].split()[0]} ×)"
            for row in decode
        ] + [f"{row[4].split()[0]} ×" for row in prefill]


def test_the_table_of_small_models_as_avx2_is_its_reports() -> None:
    section = SPEED[SPEED.index("## As AVX2") : SPEED.index("## Several requests at once")]
    lines = re.findall(
        r"^\| \[.*?\]\(\S+/results/(\S+)\.md\).*?, (\d+) rounds \| (.*) \|$", section, re.M
    )
    assert [name for name, _, _ in lines] == [
        f"{model}-as-avx2" for model in ("smollm2", "gemma3", "qwen3-8b")
    ]
    for name, rounds, cells in lines:
        head = (ROOT / "benchmarks/results" / f"{name}.md").read_text().splitlines()[0]
        assert f"; {rounds} rounds," in head
        found = [row[4] for row in _report(name) if re.match("decode of|prefill of", row[1])]
        assert [cell.strip() for cell in cells.split("|")] == [*found, ""][:3]


def test_the_table_of_small_shapes_is_its_reports() -> None:
    section = SPEED[SPEED.index("## Small shapes") : SPEED.index("## Whole models")]
    names = re.findall(r"benchmarks/results/(\S+)\.md", section)
    lines = re.findall(r"^\| (?:SmolLM2|12).*? \| (\d.*) \|$", section, re.M)
    assert len(names) == len(lines) == 3
    for name, cells in zip(names, lines, strict=True):
        assert cells.split(" | ") == [
            f"{float(row[3]):.3g} ({row[4].replace(' (', ' ×, ')}"
            for row in _report(name)
            if re.match(r"decode of \d+ tokens, `dense`", row[1])
        ]


def test_the_table_beside_llama_cpp_is_its_reports() -> None:
    rows = re.findall(r"^\| (decode|prefill)(,| of) (\S+).*? \| ([\d. |]+) \|$", SPEED, re.M)
    assert len(rows) == 4
    names = ("llama-7b-8-layers", "llama-7b-8-layers-xeon")
    columns = [(name, kind) for name in names for kind in ("f16", "q8", "q4")]
    for work, _, which, cells in rows:
        for (name, kind), shown in zip(columns, cells.split(" | "), strict=True):
            (found,) = (
                row[4].split()[0]
                for row in _report(name)
                if row[0] == kind and row[1].startswith(work) and f" {which}" in row[1]
            )
            assert found == shown, f"{name} {kind} {work} {which}"


def test_the_table_of_whole_models_is_its_reports() -> None:
    rows = re.findall(r"^\| ([\w-]+), 0\.\d+ \| (.*) \|$", SPEED, re.M)
    for shape, cells in rows:
        decode = next(row for row in _report(shape) if row[1].startswith("decode of"))
        assert decode[2:5] == cells.split(" | ")
    assert len(rows) == 2
