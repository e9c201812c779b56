"""How long a start takes, and what a system that waits for requests weighs.

    python -m benchmarks.start [MODEL] --way fresh --way kept [--runs 5] [--beside OTHER]
    python -m benchmarks.start [MODEL] --way empty --runs 3
    python -m benchmarks.start [MODEL] --way serve --seconds 300

`fresh` is `hotcold generate` with a system of its own, `kept` one that asks a system that stays,
`empty` the first start of all, with nothing compiled, in an empty home: seconds to the first text
and to the command's end, CPU seconds of all its processes by the first text. `serve` starts
`hotcold serve`, asks it for a few tokens, waits until it rests, and looks for so many seconds at
each of its processes: memory (proportional set size, so what processes share is counted once; and
what each has alone), threads, the share of one core, and how often it woke.

`--beside` measures another checkout in turn with this one. Run it once before, so that no kernel
has to be compiled (but for `empty`), on a machine that does nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil

from benchmarks.frame import (
    EXISTING,
    HERE,
    Checkout,
    Json,
    head,
    heading,
    kilobytes,
    program,
    progress,
    serving,
    spread,
    table,
)  # fmt: skip
from hotcold.model.files.locate import locate_model
from hotcold.placement.machine.survey import usable_cores

_ASK = ("--chat", "--temperature", "0", "--prompt", "What does textwrap.dedent do?")
_SETTLED_S = 12.0  # a system that is idle prepares for long prompts, and then rests
_PR_SET_CHILD_SUBREAPER = 36
_PARTS = ("first text, s", "end of the command, s", "CPU s by the first text")
_WEIGHT = ("PSS, MB", "alone, MB", "threads", "% of a core", "wakes/s")


def started(checkout: Checkout, *arguments: str) -> Json:
    """Seconds of one `hotcold generate`; this process inherits what it leaves behind."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    cpu, began = _cpu_seconds(), time.perf_counter()
    with checkout.popen("generate", *arguments, *_ASK) as process:
        some = process.stdout.read(1)
        found = [time.perf_counter() - began, 0.0, _cpu_seconds() - cpu]
        process.stdout.read()
    if not some or process.returncode:
        raise click.ClickException(f"{checkout.folder}: `hotcold generate` failed")
    found[1] = time.perf_counter() - began
    return dict(zip(_PARTS, found, strict=True))


def _cpu_seconds() -> float:
    """Of this process and of all that it has started, also where they have ended."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user, system, and both of children
    return total


def start_of(way: str, folder: Path, model: list[str]) -> Json:
    """One start of a way."""
    with tempfile.TemporaryDirectory(prefix="hc-", dir="/tmp") as scratch:
        homes = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
        changes = dict.fromkeys(homes, scratch) if way == "empty" else {}
        checkout = Checkout(folder, {**changes, "XDG_RUNTIME_DIR": scratch})
        if way != "kept":
            found = started(checkout, *model, "--own")
            psutil.wait_procs(psutil.Process().children(recursive=True), timeout=60)
            return found
        try:
            checkout.run("generate", *model, *_ASK, "--keep", "1h")
            return started(checkout, *model)
        finally:
            checkout.run("stop")


def weights_of(root: int, seconds: float) -> Iterator[tuple[str, list[float]]]:
    """Each process from `root` down over `seconds`, by the columns of _WEIGHT, and their sum."""
    parent = psutil.Process(root)
    processes = [parent, *parent.children(recursive=True)]
    before, began = {one.pid: _used(one.pid) for one in processes}, time.perf_counter()
    time.sleep(seconds)
    passed, all_of, names = time.perf_counter() - began, [0.0] * len(_WEIGHT), Counter[str]()
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            cpu_s, wakes = (a - b for a, b in zip(_used(one.pid), before[one.pid], strict=True))
            memory = [kilobytes(one.pid, "smaps_rollup", name) * 1024 / 1e6
                      for name in ("Pss", "Private_Clean", "Private_Dirty")]  # fmt: skip
            found = [memory[0], sum(memory[1:]), float(one.num_threads())]
            found += [100 * cpu_s / passed, wakes / passed]
            line = one.cmdline()
            named = [part for part in line if part.startswith("ray::") or part.endswith(".py")]
            all_of = [a + b for a, b in zip(all_of, found, strict=True)]
            name = (Path(named[0]).name if named else one.name()).strip()
            names[name] += 1
            yield f"{name} {names[name]}", found
    yield "all", all_of


def _used(process_id: int) -> tuple[float, int]:
    """CPU seconds and wakes of a process's threads so far."""
    cpu_ns = wakes = 0
    for thread in Path(f"/proc/{process_id}/task").glob("*"):
        with suppress(OSError):  # it has ended
            cpu_ns += int((thread / "schedstat").read_text().split()[0])
            status = (thread / "status").read_text()
            wakes += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return cpu_ns / 1e9, wakes


def ask(address: str, **body: Any) -> Json:
    """A completion of a server."""
    with urllib.request.urlopen(f"{address}/v1/models") as found:
        body["model"] = json.load(found)["data"][0]["id"]
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), kind)
    with urllib.request.urlopen(request, timeout=300) as answer:
        told: Json = json.load(answer)
        return told


@program
@click.argument("model", required=False)
@click.option("--way", "ways", type=click.Choice(["fresh", "kept", "empty", "serve"]),
              multiple=True, default=["fresh", "kept"])  # fmt: skip
@click.option("--runs", type=click.IntRange(1), default=5)
@click.option("--seconds", type=click.FloatRange(1), default=60.0, help="Of rest, of `serve`.")
@click.option("--beside", type=EXISTING, help="Another checkout, measured in turn.")
def main(
    model: str | None, ways: tuple[str, ...], runs: int, seconds: float, beside: Path | None
) -> tuple[Json, str]:
    """Measure starts of MODEL, the embedded one without it, and what waiting costs."""
    folders, named = [HERE, *([beside.resolve()] if beside else [])], [model] if model else []
    report = head(locate_model(model), len(usable_cores())) | {"runs": runs, "starts": {}}
    for way in ways:
        rows = report["starts"].setdefault(way, {str(folder): [] for folder in folders})
        for number in range(runs):
            for folder in folders:
                if way == "serve":
                    with serving(Checkout(folder), *named) as (server, address):
                        ask(address, prompt="Once upon a time", max_tokens=8)
                        time.sleep(_SETTLED_S)
                        rows[str(folder)].append(dict(weights_of(server.pid, seconds)))
                else:
                    rows[str(folder)].append(start_of(way, folder, named))
            progress(f"{way}: {number + 1} of {runs}")
    text = heading(report, f"{runs} starts, in turn" if beside else f"{runs} starts")
    starts = [(way, where, found) for way in report["starts"] if way != "serve"
              for where, found in report["starts"][way].items()]  # fmt: skip
    lines = [[way, os.path.basename(where), *(spread([one[part] for one in found])
             for part in _PARTS)] for way, where, found in starts]  # fmt: skip
    text += table(["start", "checkout", *_PARTS], lines) if lines else ""
    for where, found in report["starts"].get("serve", {}).items():
        rows = [[name, *(f"{median(one[name][i] for one in found if name in one):.1f}"
                         for i in range(len(_WEIGHT)))] for name in found[-1]]  # fmt: skip
        text += "\n" + table([f"`serve`, {os.path.basename(where)}", *_WEIGHT], rows)
    return report, text


if __name__ == "__main__":
    main()
