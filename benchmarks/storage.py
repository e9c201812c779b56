"""Models larger than memory: speed and memory of hotcold, and of llama.cpp with mmap, in one limit.

    python -m benchmarks.storage MODEL --cpu-memory 3GiB --llama-bench PATH --gguf FILE --out REPORT

For each size, in turn and --repeat times: what the model's files have in the page cache is let go
of, a memory cgroup is made (version 1, by root; without one nothing is limited and peaks are not
known), and `hotcold bench decode` runs in it with --cpu-memory, or llama-bench with mmap.
hotcold's cgroup is a little larger than the size, so that a promise that is broken shows as a peak
and not as death.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from jobs.support.options import Bytes
from model.mapped_file import forget_pages

_CGROUPS = Path("/sys/fs/cgroup/memory")
_ROOM = 1.25  # of the cgroup beside what was promised
_LOOKS, _LOOK_S = 50, 0.1
_GIB = 1 << 30


@dataclass(frozen=True)
class Run:
    """One program under one limit. Units: tokens a second, bytes; 0 where it is not known."""

    tokens_per_s: float
    peak_bytes: int
    reads: dict[str, float]


@contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path | None]:
    """A memory cgroup of its own for what joins it; None where none can be made."""
    folder = _CGROUPS / f"hotcold-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        for _ in range(_LOOKS):
            with suppress(OSError):  # what was started in it may still be ending
                folder.rmdir()
                break
            time.sleep(_LOOK_S)


def run_limited(command: Sequence[str], limit_bytes: int, files: Sequence[Path]) -> tuple[str, int]:
    """Standard output of a command in a cgroup of its own, and the most that it had.

    `files` are not in the page cache when it begins.
    Errors:  click.ClickException where the command fails
    """
    for file in files:
        forget_pages(file)
    with memory_cgroup(limit_bytes) as folder:

        def join() -> None:
            if folder is not None:
                (folder / "cgroup.procs").write_text("0")

        found = subprocess.run(
            command, capture_output=True, text=True, preexec_fn=join, check=False
        )
        peak = 0
        if folder is not None:
            peak = int((folder / "memory.max_usage_in_bytes").read_text())
    if found.returncode:
        raise click.ClickException(f"{' '.join(command)}\n{found.stderr[-2000:]}")
    return found.stdout, peak


def hotcold_run(model: Path, size: int | None, limit: int, options: Sequence[str]) -> Run:
    """`hotcold bench decode` with that --cpu-memory; all that there is without a size."""
    command = [sys.executable, "-m", "jobs.cli", "bench", "decode", str(model), "--json"]
    command += ["--repeat", "1", *options]
    if size is not None:
        command += ["--cpu-memory", str(size)]
    text, peak = run_limited(command, limit, _files(model))
    report: dict[str, Any] = json.loads(text.splitlines()[-1])
    click.echo(f"{size} {' '.join(options)}: {report['tokens_per_s']:.2f}, {peak}", err=True)
    return Run(report["tokens_per_s"], peak, report["reads"])


def llama_run(program: Path, gguf: Path, limit: int, tokens: int, threads: int) -> Run:
    """llama-bench with mmap: one run that warms up is a part of it, as its pages are then there."""
    command = [str(program), "-m", str(gguf), "-p", "0", "-n", str(tokens), "-t", str(threads)]
    text, peak = run_limited([*command, "-r", "1", "-mmp", "1", "-o", "json"], limit, [gguf])
    return Run(json.loads(text)[0]["avg_ts"], peak, {})


def _files(model: Path) -> list[Path]:
    if model.is_file():
        return [model]
    return [path for path in model.rglob("*") if path.is_file()]


def _line(name: str, size: int | None, runs: Sequence[Run], whole: float) -> str:
    """A row of the table."""
    speed = median(run.tokens_per_s for run in runs)
    reads = runs[-1].reads
    said = ["all" if size is None else f"{size / _GIB:.2f}", name, f"{speed:.2f}"]
    said.append(f"{speed / whole:.2f}" if whole else "")
    peak = max(run.peak_bytes for run in runs)
    said.append(f"{peak / _GIB:.2f}" if peak else "")
    if reads:
        said += [f"{reads['bytes_read'] / 1e6:.1f}", f"{reads['hit_rate']:.1%}"]
        said.append(f"{reads['wait_share']:.1%}")
    else:
        said += ["", "", ""]
    return f"| {' | '.join(said)} |"


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--cpu-memory", "sizes", type=Bytes(), multiple=True, required=True)
@click.option("--mode", "modes", multiple=True, default=["exact"], show_default=True)
@click.option("--dtype", help="As of `hotcold bench decode`.")
@click.option("--tokens", default=48, show_default=True)
@click.option("--context", default=512, show_default=True)
@click.option("--repeat", default=3, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--llama-bench", "llama", type=click.Path(exists=True, path_type=Path))
@click.option("--gguf", type=click.Path(exists=True, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Write the table there too.")
def main(
    model: Path,
    sizes: Sequence[int],
    modes: Sequence[str],
    dtype: str | None,
    tokens: int,
    context: int,
    repeat: int,
    threads: int,
    llama: Path | None,
    gguf: Path | None,
    out: Path | None,
) -> None:
    """Measure MODEL with all in memory, and under each --cpu-memory."""
    options = ["--tokens", str(tokens), "--threads", str(threads), "--context", str(context)]
    options += [] if dtype is None else ["--dtype", dtype]
    runs: dict[tuple[str, int | None], list[Run]] = {}
    for _ in range(repeat):
        for size in (None, *sizes):
            limit = 1 << 42 if size is None else int(size * _ROOM)
            for mode in modes:
                found = hotcold_run(model, size, limit, [*options, "--mode", mode])
                runs.setdefault((f"hotcold {mode}", size), []).append(found)
            if llama is not None and gguf is not None:
                limit = 1 << 42 if size is None else size
                found = llama_run(llama, gguf, limit, tokens, threads)
                runs.setdefault(("llama.cpp", size), []).append(found)
    lines = [
        "| GiB | program | tokens/s | of its own in memory | peak GiB | MB read a step | found in "
        "memory | waited |",
        "|" + " --- |" * 8,
    ]
    for (name, size), found_runs in runs.items():
        whole = median(run.tokens_per_s for run in runs[name, None])
        lines.append(_line(name, size, found_runs, whole))
    click.echo("\n".join(lines))
    if out is not None:
        out.write_text(f"# {model.name}: neurons on storage\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
