"""Models larger than memory: speed and memory of hotcold, and of llama.cpp with mmap, in one limit.

    python -m benchmarks.storage MODEL --cpu-memory 3.9GiB --gguf FILE --out REPORT
    python -m benchmarks.storage MODEL --resident 0.25 --resident 0.5 --resident 0.75 --text FILE

For each size, in turn and --repeat times: what the model's files have in the page cache is let go
of, a memory cgroup is made (version 1, by root; without one nothing is limited and peaks are not
known), and `benchmarks.storage_run` measures hotcold in it with --cpu-memory, or llama.cpp runs in
it with mmap: llama-bench (`--llama-bench`), else its Python library, where --gguf names the model.
hotcold's cgroup is a little larger than the size, so that a promise that is broken shows as a peak
and not as death. Peaks are the cgroup's own: resident memory and page cache of all processes, Ray's
included, over decoding, prompts, and in the last round a mixed load of --load seconds. A share
of the neurons (--resident) is kept without such limits, however small the model is.

Speeds are means over --answers, each to a prompt of its own (of --text, a file as of `hotcold
profile`: what experts are chosen depends on it). Each --disk-limit above 0 is a blkio cgroup in
which neither program reads more than that a second, for each size; not with everything in memory,
which --no-all leaves out. Right after each run the disk is read without computing, under the same
limits, in reads of --read-bytes at random places of the same file: as many tokens a second as that
gives is the disk's limit. Planned is what `hotcold plan` says; at this memory's speed is the same
with a token's time in memory as it was measured with all there, and the disk as it was right after
the run. At the end, of the --ablation-at size, the first mode and limit, the ablation: what is left
out of how neurons are read comes back, one thing a row.
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
    plan: dict[str, float] = field(default_factory=dict)  # with memory's speed as measured
    head_ms: float = 0.0


@dataclass(frozen=True)
class Case:
    """How much of the model is in memory: bytes that were promised, or a share of its neurons."""

    cpu_memory: int = 0
    resident: float = 1.0

    @property
    def is_all(self) -> bool:
        """Whether everything is."""
        return not self.cpu_memory and self.resident == 1

    @property
    def options(self) -> list[str]:
        """Of `benchmarks.storage_run`."""
        if self.cpu_memory:
            return ["--cpu-memory", str(self.cpu_memory)]
        return [] if self.is_all else ["--resident", str(self.resident)]

    def __str__(self) -> str:
        if self.cpu_memory:
            return f"{self.cpu_memory / _GIB:.2f}"
        return "all" if self.is_all else f"{self.resident:.0%}"

    def limits(self, disk_bytes_per_s: int, room: float = ROOM) -> Limits:
        """Of a program that is to keep to it; the disk's is 0 for none."""
        return Limits() if self.is_all else Limits(int(self.cpu_memory * room), disk_bytes_per_s)


def hotcold_run(model: Path, case: Case, limits: Limits, options: Sequence[str]) -> Run:
    """`benchmarks.storage_run` of that case."""
    command = [sys.executable, "-m", "benchmarks.storage_run", str(model), *options, *case.options]
    text, peak = run_limited(command, limits, files_of(model))
    report: dict[str, Any] = json.loads(text.splitlines()[-1])
    click.echo(f"{case} {' '.join(options)}: {report}, {peak}", err=True)
    return Run(
        report["tokens_per_s"],
        peak,
        report["reads"],
        report["disk_bytes_per_s"],
        report["mean_ms"],
        report["p99_ms"],
        report["prompt_tokens_per_s"],
        report["plan"],
        report["per_token_ms"]["head"],
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
    *("disk limit MB/s", "at this memory's speed", "MB planned", "ms waited", "experts guessed"),
    "read ahead, of use",
)


def _speed(runs: Sequence[Run]) -> float:
    """The median; 0 of none."""
    return median(run.tokens_per_s for run in runs) if runs else 0.0


def _line(
    name: str, case: Case, disk_limit: int, runs: Sequence[Run],
    whole: float, llama: float, planned: float,
) -> str:  # fmt: skip
    """A row of the table: medians; the greatest peak; empty where a figure is not known."""

    def middle(values: Iterable[float], spec: str) -> str:
        found = median([*values] or [0])
        return format(found, spec) if found else ""

    def of_reads(part: str, spec: str, unit: float = 1.0) -> str:
        return middle((run.reads.get(part, 0.0) / unit for run in runs), spec)

    peak = max(run.peak.total for run in runs)
    share = f"{peak / case.cpu_memory:.3f}" if case.cpu_memory and peak else ""
    said = [str(case), name, middle((run.tokens_per_s for run in runs), ".2f")]
    said.append(f"{planned:.2f}" if planned else "")
    said.append(f"{_speed(runs) / whole:.2f}" if whole else "")
    said.append(f"{_speed(runs) / llama:.1f}" if llama else "")
    said.append(middle((run.mean_ms for run in runs), ".0f"))
    said.append(middle((run.p99_ms for run in runs), ".0f"))
    said.append(middle((run.prompt_tokens_per_s for run in runs), ".1f"))
    said += [f"{peak / _GIB:.2f}" if peak else "", share]
    said.append(of_reads("bytes_read", ".1f", 1e6))
    said += [of_reads("hit_rate", ".1%"), of_reads("wait_share", ".1%")]
    read = [run for run in runs if run.reads]
    said.append(middle((run.disk_bytes_per_s / 1e6 for run in read), ".0f"))
    said.append(
        middle((run.disk_bytes_per_s / max(1.0, run.reads["bytes_read"]) for run in read), ".1f")
    )
    said.append(f"{disk_limit / 1e6:.0f}" if disk_limit else "")
    said.append(middle((run.plan.get("tokens_per_s", 0.0) for run in runs), ".2f"))
    said.append(middle((run.plan.get("read_bytes", 0.0) / 1e6 for run in runs), ".1f"))
    said.append(middle((run.mean_ms * run.reads["wait_share"] for run in read), ".1f"))
    said += [of_reads("recall", ".1%"), of_reads("useful_ahead", ".1%")]
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
@click.option("--cpu-memory", "sizes", type=Bytes(), multiple=True)
@click.option(
    "--resident",
    "shares",
    type=click.FloatRange(0, 1),
    multiple=True,
    help="Share of the neurons in memory.",
)
@click.option("--mode", "modes", multiple=True, default=["sign"], show_default=True)
@click.option("--dtype", help="As of `hotcold generate`.")
@click.option("--tokens", default=64, show_default=True, help="Of an answer.")
@click.option("--answers", default=4, show_default=True)
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="To take prompts of.")
@click.option("--prompt", default=512, show_default=True, help="A prompt to be measured; 0: none.")
@click.option("--context", default=1024, show_default=True)
@click.option("--repeat", default=2, show_default=True)
@click.option("--load", "load_s", default=20.0, show_default=True, help="Seconds of mixed load.")
@click.option("--threads", default=2, show_default=True)
@click.option("--read-bytes", type=Bytes(), default="16KiB", show_default=True)
@click.option("--ablation/--no-ablation", default=True, show_default=True)
@click.option("--ablation-at", default=1, show_default=True, help="Which of the sizes.")
@click.option(
    "--disk-limit",
    "disk_limits",
    type=Bytes(),
    multiple=True,
    default=["0"],
    help="Bytes a second that either program may read, by a blkio cgroup; 0: no limit.",
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
    shares: Sequence[float],
    modes: Sequence[str],
    dtype: str | None,
    tokens: int,
    answers: int,
    text: Path | None,
    prompt: int,
    context: int,
    repeat: int,
    load_s: float,
    threads: int,
    read_bytes: int,
    ablation: bool,
    ablation_at: int,
    disk_limits: Sequence[int],
    with_all: bool,
    llama_tokens: int | None,
    llama: str | None,
    gguf: Path | None,
    out: Path | None,
) -> None:
    """Measure MODEL with all in memory, and with less of it."""
    asked = ["--threads", str(threads), "--context", str(context)]
    asked += [] if dtype is None else ["--dtype", dtype]
    common = [*asked, "--tokens", str(tokens), "--answers", str(answers)]
    common += ["--read-bytes", str(read_bytes)]
    common += [] if text is None else ["--text", str(text)]
    program = [sys.executable, "-m", "benchmarks.llama_python"] if llama is None else [llama]
    cases = [*(Case(size) for size in sizes), *(Case(resident=share) for share in shares)]
    if not cases:
        raise click.UsageError("give --cpu-memory or --resident")
    limited = [(case, limit) for limit in disk_limits for case in cases]
    runs: dict[tuple[str, Case, int], list[Run]] = {}
    planned: dict[tuple[str, Case, int], float] = {}

    def measure(name: str, case: Case, limit: int, options: Sequence[str]) -> None:
        found = runs.get((f"hotcold {options[options.index('--mode') + 1]}", Case(), 0), [])
        with_memory = [*common, *options]
        if found and not case.is_all:
            with_memory += ["--memory-ms", str(1e3 / _speed(found))]
            with_memory += ["--head-ms", str(median(run.head_ms for run in found))]
        run = hotcold_run(model, case, case.limits(limit), with_memory)
        runs.setdefault((name, case, limit), []).append(run)

    for turn in range(repeat):
        for case, limit in [*[(Case(), 0)] * with_all, *limited]:
            for mode in modes:
                name, options = f"hotcold {mode}", ["--mode", mode, "--prompt", str(prompt)]
                if not case.is_all and turn == repeat - 1:
                    options += ["--load", str(load_s)]
                if case.cpu_memory and turn == 0:
                    speed = planned_speed(model, case.cpu_memory, limit, [*asked, "--mode", mode])
                    planned[name, case, limit] = speed
                measure(name, case, limit, options)
            if gguf is not None and case.resident == 1:
                limits = case.limits(limit, room=1)
                found = llama_run(program, gguf, limits, llama_tokens or tokens, threads)
                runs.setdefault(("llama.cpp", case, limit), []).append(found)
    rows = ABLATION if read_config(model).experts is None else ABLATION_OF_EXPERTS
    for name, without in rows.items() if ablation else ():
        left_out = [word for part in without for word in ("--without", part)]
        case, limit = cases[min(ablation_at, len(cases)) - 1], disk_limits[0]
        measure(f"{modes[0]}: {name}", case, limit, ["--mode", modes[0], *left_out])
    programs = [*(f"hotcold {mode}" for mode in modes), "llama.cpp"]
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + " --- |" * len(_COLUMNS)]
    for (name, case, limit), found_runs in runs.items():
        own = runs.get((name if name in programs else programs[0], Case(), 0), [])
        llama_runs = runs.get(("llama.cpp", case, limit), []) if name != "llama.cpp" else []
        speeds = _speed(own), _speed(llama_runs), planned.get((name, case, limit), 0.0)
        lines.append(_line(name, case, limit, found_runs, *speeds))
    click.echo("\n".join(lines))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        heading = f"# {model.name}: neurons on storage\n\n"
        out.with_suffix(".md").write_text(heading + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
