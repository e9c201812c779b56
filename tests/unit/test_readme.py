"""README says what is true: its commands parse, its files exist, its table is the report's."""

import re
import shlex
from pathlib import Path

import click
import pytest

from jobs.cli import cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def _commands() -> list[str]:
    lines = [
        line.split("#")[0].strip()
        for block in re.findall(r"```sh\n(.*?)```", README, re.S)
        for line in block.splitlines()
    ]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [re.sub(r"^\S*hotcold ", "", part) for part in parts if re.match(r"\S*hotcold ", part)]


def test_there_are_commands() -> None:
    assert len(_commands()) > 5


@pytest.mark.parametrize("line", _commands())
def test_command_parses(line: str) -> None:
    command: click.Command = cli
    words = shlex.split(line)
    with click.Context(cli, info_name="hotcold") as context:
        while isinstance(command, click.Group):
            found = command.get_command(context, words.pop(0))
            assert found is not None
            command = found
        command.make_context(command.name or "", words, parent=context)


def test_files_of_the_tree_exist() -> None:
    tree = README[README.index("## The tree") :]
    folder = ""
    seen = 0
    for line in tree.splitlines():
        top = re.match(r"    (\w+/)", line)
        folder = top[1] if top else folder
        for name in re.findall(r"[\w]+\.(?:py|md)\b", line):
            assert (ROOT / folder / name).exists(), f"{folder}{name}"
            seen += 1
    assert seen > 30


def test_every_top_level_package_is_in_the_tree() -> None:
    tree = README[README.index("## The tree") :]
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert {name for name in packages if f"    {name}/" not in tree} == set()


def test_tables_are_the_reports() -> None:
    found = re.findall(r"<!-- (benchmarks/results/\S+\.md) -->\n(.*?)<!-- end -->", README, re.S)
    assert found
    for path, table in found:
        assert table.strip() == (ROOT / path).read_text().strip()


def test_the_table_of_requests_at_once_is_its_reports() -> None:
    path = re.search(r"benchmarks/results/\S+-batches\.md", README)
    assert path is not None
    row = r"\| (\w+) \| decode of (\d+) requests at once, .*? \| [\d.]+ \| ([\d.]+) \| ([\d.]+) "
    reported = {
        (kind, batch): f"{float(speed):.0f} ({ratio} ×)"
        for kind, batch, speed, ratio in re.findall(row, (ROOT / path[0]).read_text())
    }
    shown: dict[tuple[str, str], str] = {}
    for line in re.findall(r"^\| (?:f16|q8|q4) \| \d+ \(.*$", README, re.M):
        kind, *cells = (cell.strip() for cell in line.strip("| ").split("|"))
        shown |= {
            (kind, batch): cell for batch, cell in zip(("4", "8", "16", "32"), cells, strict=True)
        }
    assert shown == reported and len(shown) == 12


def test_the_table_of_whole_models_is_its_reports() -> None:
    rows = re.findall(r"^\| ([\w-]+), 0\.\d+ \| (.*) \|$", README, re.M)
    for shape, cells in rows:
        report = (ROOT / f"benchmarks/results/{shape}.md").read_text()
        decode = next(line for line in report.splitlines() if "decode of" in line)
        assert decode.split(" | ")[2:5] == cells.split(" | ")
    assert len(rows) == 2


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
