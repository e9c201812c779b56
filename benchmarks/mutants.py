"""Mutation testing by Cosmic Ray: whether the tests notice a changed operator, number or branch.

    python -m benchmarks.mutants --sample 100 --out benchmarks/results/mutants
    python -m benchmarks.mutants --file actors/driver/scheduler.py --sample 20

`benchmarks/mutants.toml` lists the files, each with the tests nearest to it. The mutants are drawn
from all that Cosmic Ray makes of these files, one file after the other, by `--seed`. Each is made
in a copy of the checkout, where its file's tests are run. OUT.json and OUT.md say which survived.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:  # in the bench extra only
    from cosmic_ray.work_item import MutationSpec

_ROOT = Path(__file__).resolve().parents[1]
LISTED: dict[str, list[str]] = tomllib.loads(
    (_ROOT / "benchmarks/mutants.toml").read_text()
)  # file -> ids of its tests
_TIMEOUT_S = 300.0  # of the tests of one mutant
_KINDS = ("killed", "survived", "incompetent")


@dataclass(frozen=True)
class Result:
    """What became of one mutant: "killed", "survived" or "incompetent" (it cannot be imported)."""

    file: str
    operator: str
    outcome: str
    diff: str


def copy_checkout(folder: Path) -> None:
    """Copy what git tracks, changed files as they are, links as links."""
    listed = subprocess.check_output(["git", "-C", str(_ROOT), "ls-files", "-z"], text=True)
    for name in filter(None, listed.split("\0")):
        if (_ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_ROOT / name, folder / name, follow_symlinks=False)


def draw_mutants(files: Sequence[str], number: int, seed: int) -> list[MutationSpec]:
    """Draw `number` mutants of the current folder's files, as many from each as from the others."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import WorkDB, use_db

    draw, found = random.Random(seed), []
    for file in files:
        with use_db(":memory:", WorkDB.Mode.create) as database:
            init([Path(file)], database, {})
            mutants = [mutant for item in database.work_items for mutant in item.mutations]
        draw.shuffle(mutants)
        found.append(mutants)
    rounds = [mutants[i] for i in range(number) for mutants in found if i < len(mutants)]
    return rounds[:number]


def test_command(file: str) -> str:
    """Run the file's tests in one process, until the first that fails."""
    options = "-n0 -x -q --tb=no -p no:cacheprovider -m ''"
    return f"{sys.executable} -m pytest {options} {' '.join(LISTED[file])}"


def try_mutant(mutant: MutationSpec) -> Result:
    """Run the tests of its file with it. Errors: ClickException where they cannot be run."""
    from cosmic_ray.mutating import mutate_and_test

    file = mutant.module_path.as_posix()
    found = mutate_and_test([mutant], test_command(file), _TIMEOUT_S)
    if found.test_outcome is None:
        raise click.ClickException(f"{file}, {mutant.operator_name}: {found.output}")
    return Result(file, mutant.operator_name, found.test_outcome.value, found.diff or "")


def table(results: Sequence[Result], seed: int) -> str:
    """Write the report in Markdown: counts by file, and the survivors' changes."""
    lines = [f"# Mutants\n\n{date.today()}, seed {seed}, {len(results)} mutants.\n"]
    lines += ["| file | killed | survived | incompetent |", "| --- | --- | --- | --- |"]
    for file in sorted({result.file for result in results}):
        outcomes = [result.outcome for result in results if result.file == file]
        counts = " | ".join(str(outcomes.count(kind)) for kind in _KINDS)
        lines.append(f"| `{file}` | {counts} |")
    lines += [
        f"\n```diff\n{result.diff}\n```" for result in results if result.outcome == "survived"
    ]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--file", "files", multiple=True, help="Only mutants of this file; repeatable.")
@click.option("--sample", default=100, show_default=True, help="How many mutants.")
@click.option("--seed", default=1, show_default=True, help="Which of them.")
@click.option("--out", type=Path, help="OUT.json and OUT.md get the results.")
def main(files: tuple[str, ...], sample: int, seed: int, out: Path | None) -> None:
    """Make mutants of the listed files, one at a time, and run the tests of each."""
    if unknown := [file for file in files if file not in LISTED]:
        raise click.UsageError(f"{unknown[0]} is not in benchmarks/mutants.toml")
    target, results = out and out.resolve(), []
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        os.chdir(folder)
        os.environ["PYTHONPATH"] = folder
        for file in files or LISTED:
            if subprocess.run(test_command(file), shell=True, capture_output=True).returncode:
                raise click.ClickException(f"{file}: its tests fail without a mutant")
        for mutant in draw_mutants(files or list(LISTED), sample, seed):
            results.append(try_mutant(mutant))
            click.echo(f"{results[-1].outcome:12} {results[-1].file} {results[-1].operator}")
        os.chdir("/")
    text = table(results, seed)
    if target is None:
        click.echo(text)
        return
    target.with_suffix(".md").write_text(text)
    target.with_suffix(".json").write_text(json.dumps([asdict(one) for one in results], indent=1))


if __name__ == "__main__":
    main()
