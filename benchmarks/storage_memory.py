"""Whether --cpu-memory is kept: the most memory of all processes over a mixed load, at some sizes.

    python -m benchmarks.storage_memory MODEL --cpu-memory 3.6GiB --cpu-memory 3.2GiB --minutes 20

Each size is a run of `benchmarks.storage_run` in a memory cgroup (version 1, by root), which is a
little larger, so that a broken promise shows as a peak. Its load is `mixed_load`: answers, prompts
of several lengths, conversations, cancelled requests, three at once. The greatest total is the
cgroup's own, resident memory and page cache of all processes, Ray's included. Pages of libraries
that another cgroup read before are not in it; the most of them that was seen is told beside it.
Nothing is timed, so other programs may run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.limited_run import Limits, run_limited
from benchmarks.runs import Json, table_option, where_and_when, write_report
from benchmarks.storage import ROOM, files_of
from hotcold.jobs.support.options import Bytes

_GIB, _MIB = 1 << 30, 1 << 20
_TOKENS = 8
_OTHERS_EVERY_S = 15.0


def table_of(report: Json) -> str:
    """The report as Markdown: a row for each size."""
    lines = [
        f"Memory of all processes under a mixed load of {report['minutes']:g} minutes a size, "
        f"`{report['mode']}`; {report['shape']}; {report['machine']}; {report['date']}.\n",
        "| promised GiB | requests | greatest GiB | of the promise | pages of others, MiB "
        "| with them, of the promise | resident GiB then | page cache MiB then | after s |",
        "|" + " --- |" * 9,
        *(_row(run) for run in report["runs"]),
    ]
    return "\n".join(lines) + "\n"


def _row(run: Json) -> str:
    size, peak = run["promised"], run["peak"]
    with_others = peak["total"] + peak["others"]
    values = [
        f"{size / _GIB:.2f}",
        ", ".join(f"{count} {kind}" for kind, count in run["requests"].items()),
        f"{peak['total'] / _GIB:.3f}",
        f"{peak['total'] / size:.3f}",
        f"{peak['others'] / _MIB:.0f}",
        f"{with_others / size:.3f}",
        f"{peak['resident'] / _GIB:.3f}",
        f"{peak['page_cache'] / _MIB:.0f}",
        f"{peak['after_s']:.0f}",
    ]
    return f"| {' | '.join(values)} |"


@click.command()
@table_option(table_of)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--cpu-memory", "sizes", type=Bytes(), multiple=True, required=True)
@click.option("--minutes", default=20.0, show_default=True, help="Of load, a size.")
@click.option("--mode", default="sign", show_default=True)
@click.option("--dtype", help="As of `hotcold generate`.")
@click.option("--context", default=1024, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write OUT.json and OUT.md.")
def main(
    model: Path,
    sizes: Sequence[int],
    minutes: float,
    mode: str,
    dtype: str | None,
    context: int,
    threads: int,
    out: Path | None,
) -> None:
    """Load MODEL for some minutes with each --cpu-memory."""
    options = ["--mode", mode, "--context", str(context), "--threads", str(threads)]
    options += [] if dtype is None else ["--dtype", dtype]
    options += ["--tokens", str(_TOKENS), "--load", str(60 * minutes)]
    runs: list[Json] = []
    report = where_and_when(model, threads) | {"minutes": minutes, "mode": mode, "runs": runs}
    for size in sizes:
        command = [sys.executable, "-m", "benchmarks.storage_run", str(model), *options]
        command += ["--cpu-memory", str(size)]
        limits = Limits(int(size * ROOM))
        text, peak = run_limited(command, limits, files_of(model), _OTHERS_EVERY_S)
        told: dict[str, Any] = json.loads(text.splitlines()[-1])
        runs.append({"promised": size, "requests": told["requests"], "peak": asdict(peak)})
        write_report(report, table_of(report), out)


if __name__ == "__main__":
    main()
