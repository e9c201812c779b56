"""What a system that waits for requests weighs: memory, processes, threads, processor.

    python -m benchmarks.weight [MODEL] [--seconds 300] [--repeat 10] [--beside OTHER] [--threads]

Starts `hotcold serve` and a kept system (`hotcold generate --keep`) in turn, asks each for a few
tokens, waits until it rests, and prints a row for each of its processes: the memory
(proportional set size, so what processes share is counted once; and what each has alone; for root
also all pages that they map, which is the same whoever else maps some of them), threads,
and over so many seconds the share of one core and how often it woke. Then it asks once more: the
time to the answer of a system that has rested. `--repeat` starts each so often, and prints medians
of the sums. `--beside` measures another checkout in turn with this one. `--threads` says which
threads woke. Run it once before, so that no kernel has to be compiled; compiling leaves memory
behind.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.process_memory import kilobytes, mapped_bytes

HERE = Path(__file__).resolve().parents[1]
_ASK = ("--prompt", "Once upon a time", "--max-tokens", "8", "--temperature", "0")
_SETTLED_S = 12.0  # a system that is idle prepares for long prompts, and then rests
_START_S = 300.0
_KINDS = ("serve", "kept")
_PRIVATE = ("Clean", "Dirty")
_MOST_THREADS = 40


@dataclass(frozen=True)
class Weight:
    """One process, or all of a system."""

    name: str
    pss_mb: float
    alone_mb: float
    threads: int
    cpu_percent: float  # of one core
    wakes_per_s: float
    mapped_mb: float = 0.0  # of all together

    def __str__(self) -> str:
        mapped = f", which map {self.mapped_mb:.1f} MB" if self.mapped_mb else ""
        return (
            f"{self.pss_mb:8.1f} {self.alone_mb:8.1f} {self.threads:8} {self.cpu_percent:8.2f} "
            f"{self.wakes_per_s:8.1f}  {self.name}{mapped}"
        )


HEAD = "     PSS    alone  threads    CPU %  wakes/s  process (MB, of one core)"


@dataclass(frozen=True)
class _Counts:
    """What one process has used so far."""

    cpu_s: float
    wakes: Counter[str]  # by the threads' names

    def __sub__(self, before: "_Counts") -> "_Counts":
        return _Counts(self.cpu_s - before.cpu_s, self.wakes - before.wakes)


class _User:
    """Runs a checkout's commands, with a folder of its own for systems that stay."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self._checkout, self._folder = checkout, folder
        changes = {"PYTHONPATH": str(checkout), "XDG_RUNTIME_DIR": str(folder)}
        self._environment = os.environ | changes

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "hotcold.jobs.cli", *arguments]

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            self.command(*arguments), cwd=self._checkout, env=self._environment,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    def begin(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.command(*arguments), cwd=self._checkout, env=self._environment,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    @contextmanager
    def serving(self, model: list[str]) -> Iterator[tuple[int, str]]:
        """`hotcold serve`: its process and its address."""
        with self.begin("serve", *model, "--port", "0", "--log", "none") as process:
            try:
                yield process.pid, _address(process)
            finally:
                process.terminate()

    @contextmanager
    def keeping(self, model: list[str]) -> Iterator[int]:
        """A kept system's process."""
        try:
            self.run("generate", *model, *_ASK, "--keep", "1h")
            (system,) = json.loads(self.run("ps", "--json").splitlines()[-1])["systems"]
            yield int(system["pid"])
        finally:
            self.run("stop")


def _address(process: "subprocess.Popen[str]") -> str:
    """Wait for the line in which a server says where it is."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("hotcold serves "):
            return line.split(" at ")[1].split(" ")[0]
    raise click.ClickException("`hotcold serve` has ended")


def _ask_server(address: str) -> None:
    body = {"model": "any", "prompt": _ASK[1], "max_tokens": 8, "temperature": 0}
    with urllib.request.urlopen(f"{address}/v1/models") as found:
        body["model"] = json.load(found)["data"][0]["id"]
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_START_S) as answer:
        answer.read()


def weigh(root: int, seconds: float) -> tuple[list[Weight], Counter[tuple[str, str]]]:
    """Each process from `root` down, and all together, over `seconds`; ended ones are left out.

    With them how often threads woke, by names of process and thread.
    """
    parent = psutil.Process(root)
    processes = [parent, *parent.children(recursive=True)]
    before = {process.pid: _counts(process.pid) for process in processes}
    began = time.perf_counter()
    time.sleep(seconds)
    passed = time.perf_counter() - began
    found, woken = [], Counter[tuple[str, str]]()
    for process in processes:
        if not process.is_running():
            continue
        name, used = _name(process), _counts(process.pid) - before[process.pid]
        woken.update({(name, thread): wakes for thread, wakes in used.wakes.items()})
        found.append(
            Weight(
                name,
                _megabytes(process.pid, "Pss"),
                sum(_megabytes(process.pid, f"Private_{kind}") for kind in _PRIVATE),
                process.num_threads(),
                100 * used.cpu_s / passed,
                used.wakes.total() / passed,
            )
        )
    mapped_mb = mapped_bytes(process.pid for process in processes) / 1e6
    total = _each_figure(sum, found, f"all {len(found)} processes")
    return [*found, replace(total, mapped_mb=mapped_mb)], woken


def _megabytes(process_id: int, name: str) -> float:
    return kilobytes(process_id, "smaps_rollup", name) * 1024 / 1e6


def median_of(sums: list[Weight]) -> Weight:
    """The median of each figure."""
    median = _each_figure(statistics.median, sums, f"median of {len(sums)}")
    return replace(median, threads=round(median.threads))


def _each_figure(of: Callable[[list[Any]], Any], found: list[Weight], name: str) -> Weight:
    """`of` all of a figure, figure by figure."""
    figures = (one.name for one in fields(Weight) if one.name != "name")
    return Weight(name, *(of([getattr(each, figure) for each in found]) for figure in figures))


def _counts(process_id: int) -> _Counts:
    """Of all threads; a thread's time is in nanoseconds, a process's own in hundredths."""
    cpu_ns, wakes = 0, Counter[str]()
    for thread in Path(f"/proc/{process_id}/task").iterdir():
        try:
            cpu_ns += int((thread / "schedstat").read_text().split()[0])
            status = (thread / "status").read_text()
            name = (thread / "comm").read_text().strip()
        except OSError:  # it has ended
            continue
        wakes[name] += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return _Counts(cpu_ns / 1e9, wakes)


def _name(process: psutil.Process) -> str:
    line = process.cmdline()
    if line and line[0].startswith("ray::"):
        return line[0].strip()
    named = [part for part in line if part.startswith("hotcold.") or part.endswith(".py")]
    return Path(named[0]).name if named else process.name()


@click.command()
@click.argument("model", nargs=-1)
@click.option("--seconds", type=click.FloatRange(1), default=60.0, show_default=True)
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True)
@click.option("--kind", type=click.Choice(_KINDS), multiple=True, default=_KINDS)
@click.option("--beside", type=click.Path(path_type=Path), help="Another checkout.")
@click.option("--threads", is_flag=True, help="Say which threads woke.")
def main(
    model: tuple[str, ...],
    seconds: float,
    repeat: int,
    kind: tuple[str, ...],
    beside: Path | None,
    threads: bool,
) -> None:
    """Print what each process of each kind of system weighs."""
    click.echo(f"{platform.machine()}, {os.cpu_count()} CPUs, {seconds:.0f} s of rest")
    sums: dict[tuple[str, Path], list[Weight]] = {}
    for _ in range(repeat):
        for one in kind:
            for checkout in [beside, HERE] if beside else [HERE]:
                with tempfile.TemporaryDirectory(prefix="hc-", dir="/tmp") as folder:
                    click.echo(f"\n{one}, {checkout}\n{HEAD}")
                    user = _User(checkout, Path(folder))
                    total = _measure(one, user, list(model), seconds, threads)
                    sums.setdefault((one, checkout), []).append(total)
    if repeat > 1:
        click.echo(f"\n{HEAD}")
        for (one, checkout), found in sums.items():
            click.echo(f"{median_of(found)}, {one}, {checkout}")


def _measure(kind: str, user: _User, model: list[str], seconds: float, threads: bool) -> Weight:
    """Print its rows; returns the last, of all processes."""
    if kind == "serve":
        with user.serving(model) as (process, address):
            _ask_server(address)
            time.sleep(_SETTLED_S)
            total = _report(process, seconds, threads)
            began = time.perf_counter()
            _ask_server(address)
            click.echo(f"8 tokens after that: {1e3 * (time.perf_counter() - began):.0f} ms")
    else:
        with user.keeping(model) as process:
            time.sleep(_SETTLED_S)
            total = _report(process, seconds, threads)
            began = time.perf_counter()
            user.run("generate", *model, *_ASK)
            click.echo(f"the command after that: {time.perf_counter() - began:.2f} s")
    return total


def _report(process: int, seconds: float, threads: bool) -> Weight:
    rows, woken = weigh(process, seconds)
    for row in rows:
        click.echo(str(row))
    for (name, thread), wakes in woken.most_common(_MOST_THREADS if threads else 0):
        click.echo(f"{wakes / seconds:46.1f}  {name}, {thread}")
    return rows[-1]


if __name__ == "__main__":
    main()
