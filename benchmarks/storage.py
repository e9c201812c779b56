"""Models larger than memory: speed and memory of hotcold, and of llama.cpp with mmap, in one limit.

    python -m benchmarks.storage MODEL --cpu-memory 3.9GiB --gguf FILE --out REPORT
    python -m benchmarks.storage MODEL --resident 0.25 --resident 0.5 --text FILE --out REPORT

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
out of how neurons are read comes back, one thing a row, over two answers.

What was measured is kept in REPORT.json run by run, and the table made of it: the same command goes
on from there, so with --stop-after it may be cut into pieces, and one that failed may be repeated.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil

from benchmarks.limited_run import Limits, Peak, run_limited
from benchmarks.runs import where_and_when
from hotcold.jobs.support.options import Bytes
from hotcold.model.byte_sizes import binary_text
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
    planned: float = 0.0  # by `hotcold plan`
    services: int = 0  # of the CPU


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
        services=report["services"],
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


_ABLATION_ANSWERS = 2


@dataclass(frozen=True)
class Program:
    """A program under one limit, to be measured. limit: the disk's bytes a second, 0 for none.

    name: of the table's row; options: of `benchmarks.storage_run`, none of llama.cpp
    """

    name: str
    case: Case
    limit: int
    options: tuple[str, ...] = ()

    @property
    def mode(self) -> str:
        """Of hotcold; "" of llama.cpp."""
        return self.options[1] if self.options else ""


class Report:
    """What was measured so far, in a file that each run is added to."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """The runs that the file has. Errors: click.UsageError where they had other settings."""
        self._path, self._settings = path, settings
        self._runs: list[dict[str, Any]] = []
        if path.exists():
            found = json.loads(path.read_text())
            if found["settings"] != settings:
                raise click.UsageError(f"{path} was measured with other options; remove it")
            self._runs = found["runs"]

    def runs(self, name: str, case: Case, limit: int) -> list[Run]:
        """Those of a row."""
        key = [name, str(case), limit]
        return [
            Run(**{**each["run"], "peak": Peak(**each["run"]["peak"])})
            for each in self._runs
            if each["key"] == key
        ]

    def add(self, program: Program, run: Run) -> None:
        """Keep a run."""
        key = [program.name, str(program.case), program.limit]
        today = date.today().isoformat()
        self._runs.append({"key": key, "date": today, "run": asdict(run)})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {"settings": self._settings, "runs": self._runs}
        self._path.write_text(json.dumps(content, indent=1) + "\n")

    @property
    def heading(self) -> str:
        """Whatever decides the figures and is in no row: model, machine, days, settings."""
        said = self._settings | {"room": f"{ROOM:g} of a size is hotcold's cgroup"}
        days = sorted({each.get("date", "") for each in self._runs})
        numbers = sorted({each["run"].get("services", 0) for each in self._runs} - {0})
        said |= {"services": " and ".join(map(str, numbers)), "days": " and ".join(days)}
        known = [f"{name} {value}" for name, value in said.items() if value not in (None, "")]
        return f"{'; '.join(known)}.\n\n"


def table(report: Report, programs: Sequence[Program]) -> list[str]:
    """Lines of the table; a row for each program that has run."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + " --- |" * len(_COLUMNS)]
    for program in dict.fromkeys(programs):
        case, limit = program.case, program.limit
        if not (found := report.runs(program.name, case, limit)):
            continue
        whole = f"hotcold {program.mode}" if program.mode else program.name
        llama = report.runs("llama.cpp", case, limit) if program.mode else []
        of_all, planned = _speed(report.runs(whole, Case(), 0)), found[0].planned
        lines.append(_line(program.name, case, limit, found, of_all, _speed(llama), planned))
    return lines


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
@click.option("--llama-bench", "llama", help="The program; the Python library without it. Under a "
              "limit with --repack 0, as repacked weights are not mapped.")  # fmt: skip
@click.option("--gguf", type=click.Path(exists=True, path_type=Path))
@click.option("--stop-after", type=float, help="Begin no other run after so many seconds.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="REPORT, .md and .json")
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
    stop_after: float | None,
    out: Path,
) -> None:
    """Measure MODEL with all in memory, and with less of it."""
    started = time.monotonic()
    asked = ["--threads", str(threads), "--context", str(context)]
    asked += [] if dtype is None else ["--dtype", dtype]
    common = [*asked, "--tokens", str(tokens), "--read-bytes", str(read_bytes)]
    common += [] if text is None else ["--text", str(text)]
    cases = [*(Case(size) for size in sizes), *(Case(resident=share) for share in shares)]
    if not cases:
        raise click.UsageError("give --cpu-memory or --resident")

    def rows() -> Iterator[Program]:
        for case, limit in [(Case(), 0)] * with_all + [(c, d) for d in disk_limits for c in cases]:
            for mode in modes:
                yield Program(f"hotcold {mode}", case, limit, ("--mode", mode))
            if gguf is not None and case.resident == 1:
                yield Program("llama.cpp", case, limit)

    def ablated() -> Iterator[Program]:
        parts = ABLATION if read_config(model).experts is None else ABLATION_OF_EXPERTS
        case, limit = cases[min(ablation_at, len(cases)) - 1], disk_limits[0]
        for name, without in parts.items():
            options = tuple(word for part in without for word in ("--without", part))
            yield Program(f"{modes[0]}: {name}", case, limit, ("--mode", modes[0], *options))

    def measured(program: Program, turn: int) -> Run:
        case, limit, is_ablation = program.case, program.limit, turn < 0
        if not program.mode:
            command = (
                [sys.executable, "-m", "benchmarks.llama_python"] if llama is None else [llama]
            )
            command += ["--repack", "0"] if llama and not case.is_all else []
            limits, number = case.limits(limit, room=1), llama_tokens or tokens
            return llama_run(command, gguf or model, limits, number, threads)
        options = [*common, *program.options]
        options += ["--answers", str(_ABLATION_ANSWERS if is_ablation else answers)]
        options += [] if is_ablation else ["--prompt", str(prompt)]
        if not case.is_all:
            options += ["--load", str(load_s)] if turn == repeat - 1 else []
            if whole := report.runs(f"hotcold {program.mode}", Case(), 0):
                options += ["--memory-ms", str(1e3 / _speed(whole))]
                options += ["--head-ms", str(median(run.head_ms for run in whole))]
        run = hotcold_run(model, case, case.limits(limit), options)
        if case.cpu_memory and turn == 0:
            with_mode = [*asked, "--mode", program.mode]
            run = replace(run, planned=planned_speed(model, case.cpu_memory, limit, with_mode))
        return run

    where = where_and_when(model, threads)
    settings = {
        "model": model.name, "shape": where["shape"], "machine": where["machine"],
        "memory": f"{psutil.virtual_memory().total / _GIB:.0f} GiB", "room": ROOM, "dtype": dtype,
        "context": context, "answers": answers, "tokens": tokens, "prompts of": text and text.name,
        "a prompt of": prompt, "mixed load, s": load_s, "reads of": binary_text(read_bytes),
        "llama.cpp": Path(llama or "its Python library").name if gguf else None,
        "of": gguf and gguf.name, "its tokens": gguf and (llama_tokens or tokens),
    }  # fmt: skip
    report = Report(out.with_suffix(".json"), settings)
    turns = [(program, turn) for turn in range(repeat) for program in rows()]
    turns += [(program, -1) for program in ablated()] * ablation
    for program, turn in turns:
        if len(report.runs(program.name, program.case, program.limit)) > max(0, turn):
            continue
        if stop_after is not None and time.monotonic() - started > stop_after:
            click.echo("stopped; the same command goes on from here", err=True)
            break
        report.add(program, measured(program, turn))
    lines = table(report, [program for program, _ in turns])
    click.echo("\n".join(lines))
    heading = f"# {model.name}: neurons on storage\n\n"
    out.with_suffix(".md").write_text(heading + report.heading + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
