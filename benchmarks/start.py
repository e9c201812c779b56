"""How long a start takes, and what a system that waits for requests weighs.

    python -m benchmarks.start [MODEL] --way fresh --way kept [--runs 5] [--beside OTHER]
    python -m benchmarks.start [MODEL] --way empty --runs 3
    python -m benchmarks.start [MODEL] --way serve --seconds 300

`fresh` is `hotcold generate` with a system of its own, `kept` one that asks a system that stays,
`empty` the first start of all, with nothing compiled, in an empty home. `serve` starts `hotcold
serve`, asks it something, waits until it rests, and looks for so many seconds at each of its
processes: memory (proportional set size, so what is shared is counted once; and what each has
alone), threads, the share of one core, wakes. `--beside` measures another checkout in turn. Run it
once before, so that no kernel has to be compiled (but for `empty`), while nothing else runs.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil

from benchmarks import frame
from benchmarks.frame import Checkout, Json, kilobytes, spread, table
from hotcold.model.files.locate import locate_model
from hotcold.placement.machine.survey import usable_cores

_ASK = ("--chat", "--temperature", "0", "--prompt", "What does textwrap.dedent do?")
_SETTLED_S = 12.0  # a system that is idle prepares for long prompts, and then rests
_PARTS = ("first text, s", "end of the command, s")
_WEIGHT = ("PSS, MB", "alone, MB", "threads", "% of a core", "wakes/s")


def started(checkout: Checkout, *arguments: str) -> list[float]:
    """One `hotcold generate`, by _PARTS."""
    began = time.perf_counter()
    with checkout.popen("generate", *arguments, *_ASK) as process:
        assert process.stdout is not None
        some = process.stdout.read(1)
        first_s = time.perf_counter() - began
        process.stdout.read()
    if not some or process.returncode:
        raise click.ClickException(f"{checkout.folder}: `hotcold generate` failed")
    return [first_s, time.perf_counter() - began]


def start_of(way: str, folder: Path, model: list[str]) -> list[float]:
    """One start of a way."""
    with tempfile.TemporaryDirectory("", "hc-", "/tmp", ignore_cleanup_errors=True) as scratch:
        homes = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
        changes = dict.fromkeys(homes, scratch) if way == "empty" else {}
        checkout = Checkout(folder, {**changes, "XDG_RUNTIME_DIR": scratch})
        if way != "kept":
            return started(checkout, *model, "--own")
        try:
            checkout.run("generate", *model, *_ASK, "--keep", "1h")
            return started(checkout, *model)
        finally:
            checkout.run("stop")


def weights_of(root: int, seconds: float) -> Iterator[tuple[str, list[float]]]:
    """Each process from `root` down over `seconds`, by _WEIGHT, and their sum."""
    processes = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    before, all_of, names = [_used(one.pid) for one in processes], [0.0] * 5, Counter[str]()
    time.sleep(seconds)
    for one, (cpu_s, wakes) in zip(processes, before, strict=True):
        with suppress(psutil.NoSuchProcess):
            now, parts = _used(one.pid), ("Pss", "Private_Clean", "Private_Dirty")
            pss, *alone = (kilobytes(one.pid, "smaps_rollup", part) / 1e3 for part in parts)
            rates = [100 * (now[0] - cpu_s) / seconds, (now[1] - wakes) / seconds]
            found = [pss, sum(alone), float(one.num_threads()), *rates]
            all_of = [a + b for a, b in zip(all_of, found, strict=True)]
            name = next((part for part in one.cmdline() if part.startswith("ray::")), one.name())
            names[name] += 1
            yield f"{name.strip()} {names[name]}", found
    yield "all", all_of


def _used(process_id: int) -> tuple[float, int]:
    """CPU seconds and wakes of a process's threads so far."""
    cpu_ns = wakes = 0
    for thread in Path(f"/proc/{process_id}/task").glob("*"):
        with suppress(OSError):  # it has ended
            cpu_ns += int((thread / "schedstat").read_text().split()[0])
            wakes += kilobytes(process_id, f"task/{thread.name}/status", "voluntary_ctxt_switches")
    return cpu_ns / 1e9, wakes


@frame.program
@click.argument("model", required=False)
@click.option("--way", "ways", type=click.Choice(["fresh", "kept", "empty", "serve"]),
              multiple=True, default=["fresh", "kept"])  # fmt: skip
@click.option("--runs", type=click.IntRange(1), default=5)
@click.option("--seconds", type=click.FloatRange(1), default=60.0, help="Of rest, of `serve`.")
@click.option("--beside", type=frame.EXISTING, help="Another checkout, measured in turn.")
def main(
    model: str | None, ways: tuple[str, ...], runs: int, seconds: float, beside: Path | None
) -> tuple[Json, str]:
    """Measure starts of MODEL, the embedded one without it, and what waiting costs."""
    path = locate_model(model)
    folders = [frame.HERE, *([beside.resolve()] if beside else [])]
    named = [str(path.resolve())] if model else []
    report: Json = frame.head(path, len(usable_cores())) | {"starts": []}
    text = frame.heading(report, f"{runs} starts" + ", in turn" * bool(beside))
    for way in ways:
        found: list[list[Any]] = [[] for _ in folders]
        for number in range(runs):
            for mine, folder in zip(found, folders, strict=True):
                if way != "serve":
                    mine.append(start_of(way, folder, named))
                    continue
                with frame.serving(Checkout(folder), *named) as server:
                    Checkout(folder).run("generate", *named, *_ASK)  # which asks the server
                    time.sleep(_SETTLED_S)
                    mine.append(dict(weights_of(server.pid, seconds)))
            frame.progress(f"{way}: {number + 1} of {runs}")
        for mine, folder in zip(found, folders, strict=True):
            report["starts"].append({"way": way, "checkout": str(folder), "runs": mine})
            if way == "serve":
                columns = list(_WEIGHT)
                rows = [[name, *(f"{median(of):.1f}" for of in zip(*(one[name] for one in mine
                        if name in one), strict=True))] for name in mine[-1]]  # fmt: skip
            else:
                columns, rows = [*_PARTS], [["", *map(spread, zip(*mine, strict=True))]]
            text += table([f"`{way}`, {folder.name}", *columns], rows) + "\n"
    return report, text


if __name__ == "__main__":
    main()
