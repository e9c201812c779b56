"""An hour of everything at once against one server: what it answers, and what it goes on holding.

    python -m benchmarks.mixed_load --minutes 60 --out benchmarks/results/mixed-load

Starts `hotcold serve` with the demo model, or `--model`. Clients ask without pause: greedy and
drawn answers to prompts of 1 to 400 tokens, streamed or not, some of which they leave in the
middle, and bad requests. Every whole answer is compared with that of the same server asked one
request at a time. Beside them are hostile clients (`benchmarks.hostile_clients`): they ask nothing,
read nothing, or ask for far too much. Memory, open files, threads and shared memory of all its
processes are read from /proc meanwhile, and when everybody has gone; then all places must be free.

With `--resident 0.5` half of a model's neurons or experts stay on storage
(`benchmarks.stored_system`). With `--cpu-memory`, which the server gets too, all that is resident
must be within that, and as root it runs in a memory cgroup that is a little larger, whose peak has
the page cache too.
"""

import http.client
import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil

from benchmarks.hostile_clients import Flood, SilentClient, StalledReader
from benchmarks.limited_run import PEAK, joining, memory_cgroup
from benchmarks.load_clients import CONTEXT, Client, Tally, make_questions, post
from benchmarks.process_memory import memory_of, shared_memory_bytes
from benchmarks.runs import Json, table_option, where_and_when, write_report
from benchmarks.storage import ROOM
from hotcold.jobs.support.listening import listen
from hotcold.jobs.support.options import Bytes
from hotcold.model.files.locate import locate_model
from hotcold.placement.machine.survey import usable_cores

_START_S = 900.0  # kernels may have to be compiled
_SAMPLE_S = 10.0
_WARM_S = 300.0  # growth is looked for after that
_SETTLE_S = 60.0  # for what has ended to be cleaned up
_PARALLEL = 8  # as `hotcold serve` has it
_PLACES = 72  # for answers that run or wait


def role_of(process: psutil.Process) -> str:
    """What a process of the system is for."""
    command = " ".join(process.cmdline())
    for word, role in {
        "DriverActor": "driver",
        "ServiceActor": "services",
        "hotcold.jobs.cli serve": "server",
        "benchmarks.stored_system": "server",
    }.items():
        if word in command:
            return role
    return "Ray"


class Sampler:
    """Reads what a process and all its descendants hold, now and then."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._started = time.monotonic()
        self.samples: list[Json] = []

    def run_until(self, ended: threading.Event) -> None:
        """Take a sample every ten seconds until `ended` is set."""
        while not ended.wait(_SAMPLE_S):
            self.samples.append(self.sample())

    def sample(self) -> Json:
        """Bytes resident by role (what is shared counted once), open files, shared memory."""
        by_role: dict[str, list[int]] = {}
        files = threads = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                by_role.setdefault(role_of(process), []).append(process.pid)
                files += process.num_fds()
                threads += process.num_threads()
        shared = shared_memory_bytes(pid for pids in by_role.values() for pid in pids)
        return {
            "at_s": time.monotonic() - self._started,
            "resident_mb": {
                role: memory_of(pids)["resident_bytes"] / 1e6 for role, pids in by_role.items()
            },
            "open_files": files,
            "threads": threads,
            "processes": sum(len(pids) for pids in by_role.values()),
            "shared_memory_mb": shared / 1e6,
        }


def growth(before: Json, samples: list[Json], after: Json) -> Json:
    """Each figure before the load, in the minute after the fifth, in the last one, and after."""
    warm = [s for s in samples if s["at_s"] >= min(_WARM_S, samples[-1]["at_s"] / 3)]
    length = max(1, round(60 / _SAMPLE_S))
    found: Json = {}
    for name in ("server", "driver", "services", "Ray"):
        values = [s["resident_mb"].get(name, 0.0) for s in (before, *warm, after)]
        found[f"resident MB, {name}"] = _four(values, length)
    for name in ("open_files", "threads", "processes", "shared_memory_mb"):
        values = [s[name] for s in (before, *warm, after)]
        found[name.replace("_", " ").replace(" mb", ", MB")] = _four(values, length)
    return found


def total_mb(sample: Json) -> float:
    """Megabytes resident of all processes together."""
    return float(sum(sample["resident_mb"].values()))


def _four(values: list[float], length: int) -> list[float]:
    """The first, medians of `length` at both ends of what is between, and the last."""
    first, *between, last = values
    return [first, median(between[:length]), median(between[-length:]), last]


def percentiles(values: list[float]) -> list[float]:
    """Median and 99th percentile."""
    ordered = sorted(values) or [0.0]
    return [ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]]


def table_of(report: Json) -> str:
    """The report as Markdown."""
    name, kept = report.get("model", "The demo model"), report.get("resident", 1.0)
    stored = f"; {kept:.0%} of the neurons in memory" if kept < 1 else ""
    lines = [
        f"{name}: {report['shape']}; {report['machine']}; {report['date']}; "
        f"{report['clients']} clients for {report['minutes']:g} minutes{stored}",
        "",
        f"{sum(report['outcomes'].values())} requests: "
        + ", ".join(f"{count} {name}" for name, count in report["outcomes"].items())
        + f"; {report['tokens_per_s']:.0f} tokens/s in whole answers.",
        "",
        "| seconds | median | p99 |",
        "| --- | --- | --- |",
        "| to the first token | {:.2f} | {:.2f} |".format(*report["first_token_s"]),
        "| of an answer | {:.2f} | {:.2f} |".format(*report["answer_s"]),
        "",
        "| held | before | after five minutes | at the end | when all have gone |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, figures in report["growth"].items():
        lines.append(f"| {name} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")
    if "promised_mb" in report:
        lines += ["", f"At most {report['most_resident_mb']:.0f} MB resident at once"]
        if "cgroup_peak_mb" in report:
            lines[-1] += f", {report['cgroup_peak_mb']:.0f} MB with the page cache"
        lines[-1] += f"; {report['promised_mb']:.0f} MB were promised."
    return "\n".join(lines) + "\n"


def wait_until_ready(port: int, server: "subprocess.Popen[bytes]") -> None:
    """Return when the server is ready. Errors: ClickException where it ends or is too slow."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise click.ClickException("the server does not become ready")


def all_places_free(port: int, places: int) -> bool:
    """Whether so many answers are taken at once, which is all that the server takes."""
    body = {"prompt": [5], "max_tokens": 1, "n": places}
    connection, response = post(port, json.dumps(body).encode())
    response.read()
    connection.close()
    return response.status == 200


def settled(port: int, sampler: "Sampler", before: Json) -> Json:
    """What is held once all places are free and no more files are open than `before`, or late."""
    deadline, found = time.monotonic() + _SETTLE_S, sampler.sample()
    while time.monotonic() < deadline and found["open_files"] > before["open_files"]:
        time.sleep(1)
        found = sampler.sample()
    return {**found, "all_places_free": all_places_free(port, _PLACES)}


def run_load(port: int, pid: int, clients: int, minutes: float, num_questions: int) -> Json:
    """Ask one at a time, then everything at once; the report's figures."""
    questions = make_questions(port, num_questions)
    tally, sampler, ended = Tally(), Sampler(psutil.Process(pid)), threading.Event()
    if not all_places_free(port, _PLACES):
        raise click.ClickException(f"the server does not take {_PLACES} answers at once")
    before = sampler.sample()
    runners: list[Any] = [Client(port, questions, tally, n) for n in range(clients)]
    runners += [SilentClient(port, tally), StalledReader(port, tally), Flood(port, tally)]
    threads = [threading.Thread(target=r.run_until, args=(ended,)) for r in (*runners, sampler)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    with click.progressbar(range(round(minutes * 60)), label="load", file=sys.stderr) as seconds:
        for _ in seconds:
            time.sleep(1)
    ended.set()
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - started
    after = settled(port, sampler, before)
    if not after["all_places_free"]:
        tally.add_wrong("places are still taken when everybody has gone")
    return {
        "clients": clients,
        "minutes": minutes,
        "outcomes": dict(tally.outcomes),
        "wrong": tally.wrong[:20],
        "tokens_per_s": tally.num_tokens / took_s,
        "first_token_s": percentiles(tally.first_token_s),
        "answer_s": percentiles(tally.answer_s),
        "growth": growth(before, sampler.samples, after),
        "most_resident_mb": max(total_mb(s) for s in (before, *sampler.samples, after)),
        "samples": sampler.samples[:: max(1, len(sampler.samples) // 60)],
    }


def serving(port: int, model: Path | None, resident: float, cpu_memory: int | None) -> list[str]:
    """The command line of the server."""
    program = ["hotcold.jobs.cli"] if resident >= 1 else ["benchmarks.stored_system", str(resident)]
    options = ["--log", "none", "--port", str(port), "--queue", str(_PLACES - _PARALLEL)]
    options += ["--context", str(CONTEXT), "--kv-tokens", str(8 * CONTEXT)]
    if cpu_memory:
        options += ["--cpu-memory", str(cpu_memory)]
    named = [] if model is None else [str(model)]
    return [sys.executable, "-m", *program, "serve", *named, *options]


@click.command()
@click.option("--minutes", default=60.0, show_default=True)
@click.option("--clients", default=16, show_default=True)
@click.option("--questions", default=200, show_default=True)
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="Else the demo model.")
@click.option("--resident", default=1.0, show_default=True, help="Neurons in memory, a share.")
@click.option("--cpu-memory", type=Bytes(), help="What all processes may take.")
@click.option("--out", type=click.Path(path_type=Path), help="Writes OUT.json and OUT.md.")
@table_option(table_of)
def main(
    minutes: float,
    clients: int,
    questions: int,
    model: Path | None,
    resident: float,
    cpu_memory: int | None,
    out: Path | None,
) -> None:
    """Load a server, compare its answers, and see whether it grows."""
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    report = where_and_when(model or locate_model(None), len(usable_cores()))
    with memory_cgroup(int((cpu_memory or 0) * ROOM)) as group:
        server = subprocess.Popen(
            serving(port, model, resident, cpu_memory), preexec_fn=joining([group])
        )
        try:
            wait_until_ready(port, server)
            report |= run_load(port, server.pid, clients, minutes, questions)
        finally:
            server.terminate()
            server.wait(60)
        if group is not None:
            report["cgroup_peak_mb"] = int((group / PEAK).read_text()) / 1e6
    if model is not None:
        report |= {"model": model.name, "resident": resident}
    if cpu_memory:
        report["promised_mb"] = cpu_memory / 1e6
        if report["most_resident_mb"] > report["promised_mb"]:
            report["wrong"].append("more memory than was promised")
    write_report(report, table_of(report), out)
    if report["wrong"]:
        raise click.ClickException(f"{len(report['wrong'])} things were wrong; see the report")


if __name__ == "__main__":
    main()
