"""Models larger than memory: speed and memory of hotcold, and of llama.cpp with mmap, in one limit.

    python -m benchmarks.storage MODEL --cpu-memory 3.9GiB --gguf FILE --out REPORT

For each size, in turn and --repeat times: what the model's files have in the page cache is let go
of, a memory cgroup is made (version 1, by root; without one nothing is limited and peaks are not
known), and `benchmarks.storage_run` measures hotcold in it with --cpu-memory, or llama.cpp runs in
it with mmap: llama-bench (`--llama-bench`), else its Python library, where --gguf names the model.
hotcold's cgroup is a little larger than the size, so that a promise that is broken shows as a peak
and not as death. Peaks are the cgroup's own: resident memory and page cache of all processes, Ray's
included, over decoding, prompts, and in the last round a mixed load of --load seconds. Right after
each run the disk is read without computing, in reads of --read-bytes at random places of the same
file: as many tokens a second as that gives is the disk's limit. At the end, of the first size and
mode, the ablation: what is left out of how neurons are read comes back, one thing a row.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any

import click

from jobs.support.options import Bytes
from model.mapped_file import forget_pages
from placement.machine.measure_disk import measure_disk

_CGROUPS = Path("/sys/fs/cgroup/memory")
_ROOM = 1.25  # of the cgroup beside what was promised
_LOOKS, _LOOK_S = 50, 0.1
_GIB = 1 << 30


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


@dataclass(frozen=True)
class Peak:
    """The most that a cgroup had, and of what that was made when looks saw most. Units: bytes."""

    total: int = 0
    resident: int = 0
    page_cache: int = 0
    after_s: float = 0.0


@dataclass(frozen=True)
class Run:
    """One program under one limit; 0 where it is not known. Units: tokens a second, ms, bytes."""

    tokens_per_s: float
    peak: Peak
    reads: dict[str, float] = field(default_factory=dict)
    disk_bytes_per_s: float = 0.0
    mean_ms: float = 0.0
    p99_ms: float = 0.0
    prompt_tokens_per_s: float = 0.0


def run_limited(
    command: Sequence[str], limit_bytes: int, files: Sequence[Path]
) -> tuple[str, Peak]:
    """Standard output of a command in a cgroup of its own, and the most that it had.

    `files` are not in the page cache when it begins.
    Errors:  click.ClickException where the command fails
    """
    for file in files:
        forget_pages(file)
    with memory_cgroup(limit_bytes) as folder, TemporaryFile("w+") as out, TemporaryFile() as err:

        def join() -> None:
            if folder is not None:
                (folder / "cgroup.procs").write_text("0")

        running = subprocess.Popen(command, stdout=out, stderr=err, preexec_fn=join)
        peak, started = Peak(), time.monotonic()
        while running.poll() is None:
            peak = _look(folder, peak, time.monotonic() - started)
            time.sleep(_LOOK_S)
        if folder is not None:
            most = int((folder / "memory.max_usage_in_bytes").read_text())
            peak = replace(peak, total=most)
        out.seek(0)
        err.seek(0)
        if running.returncode:
            text = err.read().decode(errors="replace")[-2000:]
            raise click.ClickException(f"{' '.join(command)}\n{text}")
        return out.read(), peak


def _look(folder: Path | None, peak: Peak, seconds: float) -> Peak:
    """What the cgroup has now, where that is more."""
    if folder is None:
        return peak
    total = int((folder / "memory.usage_in_bytes").read_text())
    if total <= peak.total:
        return peak
    lines = (folder / "memory.stat").read_text().splitlines()
    stat = {name: int(value) for name, value in (line.split() for line in lines)}
    return Peak(total, stat["rss"], stat["cache"], seconds)


def hotcold_run(
    model: Path, size: int | None, limit: int, options: Sequence[str], read_bytes: int
) -> Run:
    """`benchmarks.storage_run` with that --cpu-memory; all that there is without a size."""
    command = [sys.executable, "-m", "benchmarks.storage_run", str(model), *options]
    if size is not None:
        command += ["--cpu-memory", str(size)]
    text, peak = run_limited(command, limit, _files(model))
    report: dict[str, Any] = json.loads(text.splitlines()[-1])
    click.echo(f"{size} {' '.join(options)}: {report}, {peak}", err=True)
    disk = measure_disk(Path(report["file"]), [read_bytes])[0] if report["file"] else 0.0
    return Run(
        report["tokens_per_s"],
        peak,
        report["reads"],
        disk,
        report["mean_ms"],
        report["p99_ms"],
        report["prompt_tokens_per_s"],
    )


def llama_run(program: Sequence[str], gguf: Path, limit: int, tokens: int, threads: int) -> Run:
    """llama.cpp with mmap: its warming up is part of the run, as its pages are then there."""
    command = [*program, "-m", str(gguf), "-p", "0", "-n", str(tokens), "-t", str(threads)]
    text, peak = run_limited([*command, "-r", "1", "-o", "jsonl"], limit, [gguf])
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return Run(next(each["samples_ts"][0] for each in found if each["n_gen"]), peak)


def _files(model: Path) -> list[Path]:
    if model.is_file():
        return [model]
    return [path for path in model.rglob("*") if path.is_file()]


_COLUMNS = (
    *("GiB", "program", "tokens/s", "of its own in memory", "ms a token", "p99"),
    *("prompt tokens/s", "peak GiB", "of the promise", "MB read a step", "found in memory"),
    *("waited", "disk alone MB/s", "its limit, tokens/s"),
)


def _line(name: str, size: int | None, runs: Sequence[Run], whole: float) -> str:
    """A row of the table: medians; the greatest peak."""

    def middle(values: Iterable[float], spec: str) -> str:
        found = median(values)
        return format(found, spec) if found else ""

    peak = max(run.peak.total for run in runs)
    share = f"{peak / size:.3f}" if size and peak else ""
    said = ["all" if size is None else f"{size / _GIB:.2f}", name]
    said.append(middle((run.tokens_per_s for run in runs), ".2f"))
    said.append(f"{median(run.tokens_per_s for run in runs) / whole:.2f}" if whole else "")
    said.append(middle((run.mean_ms for run in runs), ".0f"))
    said.append(middle((run.p99_ms for run in runs), ".0f"))
    said.append(middle((run.prompt_tokens_per_s for run in runs), ".1f"))
    said += [f"{peak / _GIB:.2f}" if peak else "", share]
    read = [run for run in runs if run.reads]
    if read:
        num_bytes = median(run.reads["bytes_read"] for run in read)
        disk = median(run.disk_bytes_per_s for run in read)
        said.append(f"{num_bytes / 1e6:.1f}")
        said.append(middle((run.reads["hit_rate"] for run in read), ".1%"))
        said.append(middle((run.reads["wait_share"] for run in read), ".1%"))
        said += [f"{disk / 1e6:.0f}", f"{disk / max(1.0, num_bytes):.1f}"]
    else:
        said += [""] * 5
    return f"| {' | '.join(said)} |"


# What each row of the ablation leaves out; the row that leaves out nothing is in the table.
ABLATION = {
    "rows apart, nothing kept, in sequence": ("bundles", "cache", "pipeline", "ahead"),
    "+ bundles": ("cache", "pipeline", "ahead"),
    "+ cache": ("pipeline", "ahead"),
    "+ pipeline": ("ahead",),
    "+ read ahead": (),
}


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--cpu-memory", "sizes", type=Bytes(), multiple=True, required=True)
@click.option("--mode", "modes", multiple=True, default=["sign"], show_default=True)
@click.option("--dtype", help="As of `hotcold generate`.")
@click.option("--tokens", default=64, show_default=True)
@click.option("--prompt", default=512, show_default=True, help="A prompt to be measured; 0: none.")
@click.option("--context", default=1024, show_default=True)
@click.option("--repeat", default=2, show_default=True)
@click.option("--load", "load_s", default=20.0, show_default=True, help="Seconds of mixed load.")
@click.option("--threads", default=2, show_default=True)
@click.option("--read-bytes", type=Bytes(), default="16KiB", show_default=True)
@click.option("--ablation/--no-ablation", default=True, show_default=True)
@click.option("--llama-bench", "llama", help="The program; the Python library without it.")
@click.option("--gguf", type=click.Path(exists=True, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Write the table there too.")
def main(
    model: Path,
    sizes: Sequence[int],
    modes: Sequence[str],
    dtype: str | None,
    tokens: int,
    prompt: int,
    context: int,
    repeat: int,
    load_s: float,
    threads: int,
    read_bytes: int,
    ablation: bool,
    llama: str | None,
    gguf: Path | None,
    out: Path | None,
) -> None:
    """Measure MODEL with all in memory, and under each --cpu-memory."""
    common = ["--threads", str(threads), "--context", str(context), "--tokens", str(tokens)]
    common += [] if dtype is None else ["--dtype", dtype]
    program = [sys.executable, "-m", "benchmarks.llama_python"] if llama is None else [llama]
    runs: dict[tuple[str, int | None], list[Run]] = {}
    for turn in range(repeat):
        for size in (None, *sizes):
            limit = 1 << 42 if size is None else int(size * _ROOM)
            for mode in modes:
                options = [*common, "--mode", mode, "--prompt", str(prompt)]
                if size is not None and turn == repeat - 1:
                    options += ["--load", str(load_s)]
                found = hotcold_run(model, size, limit, options, read_bytes)
                runs.setdefault((f"hotcold {mode}", size), []).append(found)
            if gguf is not None:
                limit = 1 << 42 if size is None else size
                found = llama_run(program, gguf, limit, tokens, threads)
                runs.setdefault(("llama.cpp", size), []).append(found)
    for name, without in ABLATION.items() if ablation else ():
        left_out = [word for part in without for word in ("--without", part)]
        options = [*common, "--mode", modes[0], *left_out]
        found = hotcold_run(model, sizes[0], int(sizes[0] * _ROOM), options, read_bytes)
        runs[f"{modes[0]}: {name}", sizes[0]] = [found]
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + " --- |" * len(_COLUMNS)]
    for (name, size), found_runs in runs.items():
        own = runs.get((name.partition(":")[0], None)) or runs[f"hotcold {modes[0]}", None]
        whole = median(run.tokens_per_s for run in own)
        lines.append(_line(name, size, found_runs, whole))
    click.echo("\n".join(lines))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        text = f"# {model.name}: neurons on storage\n\n" + "\n".join(lines) + "\n"
        out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
