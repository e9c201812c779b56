"""Models larger than memory: speed and memory of hotcold, and of llama.cpp with mmap, in one limit.

    python -m benchmarks.storage MODEL --cpu-memory 3.9GiB --gguf FILE --out REPORT

For each size, in turn and --repeat times: what the model's files have in the page cache is let go
of, a memory cgroup is made (version 1, by root; without one nothing is limited and peaks are not
known), and `benchmarks.storage_run` measures hotcold in it with --cpu-memory, or llama.cpp runs in
it with mmap: llama-bench (`--llama-bench`), else its Python library, where --gguf names the model.
hotcold's cgroup is a little larger than the size, so that a promise that is broken shows as a peak
and not as death. Peaks are the cgroup's own: resident memory and page cache of all processes, Ray's
included, over decoding, prompts, and in the last round a mixed load of --load seconds. With
--disk-limit a blkio cgroup lets neither program read more than that a second, for each size; not
with everything in memory, which --no-all leaves out. Right after each run the disk is read without
computing, under the same limits, in reads of --read-bytes at random places of the same file: as
many tokens a second as that gives is the disk's limit. At the end, of the first size and mode, the
ablation: what is left out of how neurons are read comes back, one thing a row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.limited_run import Limits, Peak, run_limited
from hotcold.jobs.support.options import Bytes
from hotcold.model.config.build import read_config

ROOM = 1.25  # of the cgroup beside what was promised
_GIB = 1 << 30


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


def hotcold_run(model: Path, size: int | None, limits: Limits, options: Sequence[str]) -> Run:
    """`benchmarks.storage_run` with that --cpu-memory; all that there is without a size."""
    command = [sys.executable, "-m", "benchmarks.storage_run", str(model), *options]
    if size is not None:
        command += ["--cpu-memory", str(size)]
    text, peak = run_limited(command, limits, files_of(model))
    report: dict[str, Any] = json.loads(text.splitlines()[-1])
    click.echo(f"{size} {' '.join(options)}: {report}, {peak}", err=True)
    return Run(
        report["tokens_per_s"],
        peak,
        report["reads"],
        report["disk_bytes_per_s"],
        report["mean_ms"],
        report["p99_ms"],
        report["prompt_tokens_per_s"],
    )


def planned_speed(model: Path, size: int, disk_limit: int, options: Sequence[str]) -> float:
    """Tokens a second that `hotcold plan` expects, on such a disk."""
    command = [sys.executable, "-m", "hotcold.jobs.cli", "plan", str(model), *options]
    command += ["--cpu-memory", str(size), "--json"]
    text, _ = run_limited(command, Limits(disk_bytes_per_s=disk_limit), files_of(model))
    report: dict[str, Any] = json.loads(text.splitlines()[-1])
    return float(report["storage"][0]["tokens_per_s"])


def llama_run(program: Sequence[str], gguf: Path, limits: Limits, tokens: int, threads: int) -> Run:
    """llama.cpp with mmap: its warming up is part of the run, as its pages are then there."""
    command = [*program, "-m", str(gguf), "-p", "0", "-n", str(tokens), "-t", str(threads)]
    text, peak = run_limited([*command, "-r", "1", "-o", "jsonl"], limits, [gguf])
    click.echo(f"{limits}: {text.strip()}, {peak}", err=True)
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return Run(next(each["samples_ts"][0] for each in found if each["n_gen"]), peak)


def files_of(model: Path) -> list[Path]:
    """A model's files."""
    if model.is_file():
        return [model]
    return [path for path in model.rglob("*") if path.is_file()]


_COLUMNS = (
    *("GiB", "program", "tokens/s", "planned", "of its own in memory", "of llama.cpp"),
    *("ms a token", "p99", "prompt tokens/s", "peak GiB", "of the promise"),
    *("MB read a step", "found in memory", "waited", "disk alone MB/s", "its limit, tokens/s"),
)


def _speed(runs: Sequence[Run]) -> float:
    """The median; 0 of none."""
    return median(run.tokens_per_s for run in runs) if runs else 0.0


def _line(
    name: str, size: int | None, runs: Sequence[Run], whole: float, llama: float, planned: float
) -> str:
    """A row of the table: medians; the greatest peak; 0 where a speed is not known."""

    def middle(values: Iterable[float], spec: str) -> str:
        found = median(values)
        return format(found, spec) if found else ""

    peak = max(run.peak.total for run in runs)
    share = f"{peak / size:.3f}" if size and peak else ""
    said = ["all" if size is None else f"{size / _GIB:.2f}", name]
    said.append(middle((run.tokens_per_s for run in runs), ".2f"))
    said.append(f"{planned:.2f}" if planned else "")
    said.append(f"{_speed(runs) / whole:.2f}" if whole else "")
    said.append(f"{_speed(runs) / llama:.1f}" if llama else "")
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
ABLATION_OF_EXPERTS = {
    "nothing kept, in sequence": ("cache", "warm", "pipeline", "ahead"),
    "+ cache": ("warm", "pipeline", "ahead"),
    "+ filled by the profile": ("pipeline", "ahead"),
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
@click.option(
    "--disk-limit",
    type=Bytes(),
    default="0",
    help="Bytes a second that either program "
    "may read where a size limits it, by a blkio cgroup; none without it.",
)
@click.option(
    "--all/--no-all",
    "with_all",
    default=True,
    show_default=True,
    help="Also with everything in memory.",
)
@click.option("--llama-tokens", type=int, help="Of llama.cpp; as many as --tokens without it.")
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
    disk_limit: int,
    with_all: bool,
    llama_tokens: int | None,
    llama: str | None,
    gguf: Path | None,
    out: Path | None,
) -> None:
    """Measure MODEL with all in memory, and under each --cpu-memory."""
    asked = ["--threads", str(threads), "--context", str(context)]
    asked += [] if dtype is None else ["--dtype", dtype]
    common = [*asked, "--tokens", str(tokens), "--read-bytes", str(read_bytes)]
    program = [sys.executable, "-m", "benchmarks.llama_python"] if llama is None else [llama]
    runs: dict[tuple[str, int | None], list[Run]] = {}
    planned: dict[tuple[str, int | None], float] = {}
    for turn in range(repeat):
        for size in (*[None] * with_all, *sizes):
            limits = Limits() if size is None else Limits(int(size * ROOM), disk_limit)
            for mode in modes:
                options = [*common, "--mode", mode, "--prompt", str(prompt)]
                if size is not None and turn == repeat - 1:
                    options += ["--load", str(load_s)]
                if size is not None and turn == 0:
                    speed = planned_speed(model, size, disk_limit, [*asked, "--mode", mode])
                    planned[f"hotcold {mode}", size] = speed
                found = hotcold_run(model, size, limits, options)
                runs.setdefault((f"hotcold {mode}", size), []).append(found)
            if gguf is not None:
                limits = Limits() if size is None else Limits(size, disk_limit)
                found = llama_run(program, gguf, limits, llama_tokens or tokens, threads)
                runs.setdefault(("llama.cpp", size), []).append(found)
    rows = ABLATION if read_config(model).experts is None else ABLATION_OF_EXPERTS
    for name, without in rows.items() if ablation else ():
        left_out = [word for part in without for word in ("--without", part)]
        options = [*common, "--mode", modes[0], *left_out]
        limits = Limits(int(sizes[0] * ROOM), disk_limit)
        found = hotcold_run(model, sizes[0], limits, options)
        runs[f"{modes[0]}: {name}", sizes[0]] = [found]
    programs = [*(f"hotcold {mode}" for mode in modes), "llama.cpp"]
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + " --- |" * len(_COLUMNS)]
    for (name, size), found_runs in runs.items():
        own = runs.get((name if name in programs else programs[0], None), [])
        llama_runs = runs.get(("llama.cpp", size), []) if name != "llama.cpp" else []
        speeds = _speed(own), _speed(llama_runs), planned.get((name, size), 0.0)
        lines.append(_line(name, size, found_runs, *speeds))
    click.echo("\n".join(lines))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        text = f"# {model.name}: neurons on storage\n\n" + "\n".join(lines) + "\n"
        out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
