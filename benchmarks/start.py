"""How long a start takes, from the command to the first text of the embedded model, and its parts.

    python -m benchmarks.start [--runs 5] [--beside OTHER]
    python -m benchmarks.start --kept [--runs 20]
    python -m benchmarks.start --empty [--runs 3] [--beside OTHER] [--model SOME.gguf]

Prints the median seconds of each part. `--beside` measures another checkout in turn with this one,
without its parts, and prints this checkout's seconds over the other's. Run it once before, so that
no kernel has to be compiled, on a machine that does nothing else.

`--kept` asks in turn with a system of the command's own and with one that is kept, and prints the
seconds to the first text: least, median, most; then what each end of a kept system leaves.

`--empty` starts with nothing compiled, in an empty home, and prints the seconds to each first text,
and the CPU seconds of all its processes by then.
"""

import ctypes
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import click
import psutil

from benchmarks.kept_ends import HEAD, what_is_left

HERE = Path(__file__).resolve().parents[1]
_QUESTION = "What does textwrap.dedent do?"
_COMMAND = (
    "-m",
    "hotcold.jobs.cli",
    "generate",
    "--chat",
    "--temperature",
    "0",
    "--prompt",
    _QUESTION,
)
_PR_SET_CHILD_SUBREAPER = 36
_FIRST, _ALL = "to the first text", "to the end of the command"


def command_seconds(
    checkout: Path, options: Sequence[str] = (), changes: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Seconds from starting `hotcold generate` to its first text, and to its end."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), **(changes or {})}
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *_COMMAND, *options],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        some = process.stdout.read(1)
        first_s = time.perf_counter() - began
        process.stdout.read()
    if not some or process.returncode:
        raise click.ClickException(f"{checkout}: `hotcold generate` failed")
    return {_FIRST: first_s, _ALL: time.perf_counter() - began}


def empty_seconds(checkout: Path, model: str | None) -> tuple[float, float]:
    """Seconds to the first text where nothing is compiled, and CPU seconds of all processes.

    This process becomes the parent of what the command leaves.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    arguments = [sys.executable, *_COMMAND, *([] if model is None else [model])]
    with tempfile.TemporaryDirectory(prefix="hc-", dir="/tmp") as home:
        changes = {"HOME": home, "PYTHONPATH": str(checkout)}
        environment = {name: v for name, v in os.environ.items() if not name.startswith("XDG_")}
        before, began = _cpu_seconds(), time.perf_counter()
        with subprocess.Popen(
            arguments,
            cwd=checkout,
            env=environment | changes,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            some = process.stdout.read(1)
            found = time.perf_counter() - began, _cpu_seconds() - before
            process.stdout.read()
        if not some or process.returncode:
            raise click.ClickException(f"{checkout}: `hotcold generate` failed")
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.wait()
    return found


def _cpu_seconds() -> float:
    """CPU seconds of this process and of all that it has started, also where they have ended."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user, system, and both of children
    return total


def part_seconds() -> dict[str, float]:
    """Seconds of each part of a start, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.start", "--one"]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_parts() -> dict[str, float]:
    """Start a system, ask for one token, stop; seconds of each part. Only once a process."""
    began = time.perf_counter()
    seconds: dict[str, float] = {}

    def end_part(name: str) -> None:
        nonlocal began
        now = time.perf_counter()
        seconds[name] = seconds.get(name, 0.0) + now - began
        began = now

    from hotcold.actors.launch import start_local_ray
    from hotcold.actors.protocol.messages import GenerateRequest
    from hotcold.actors.setup.preflight import SystemOptions, prepare_system
    from hotcold.actors.setup.shards import arena_layout
    from hotcold.actors.system import System
    from hotcold.model.files.locate import locate_model
    from hotcold.model.sampling import SamplingParams

    system, config = prepare_system(locate_model(None), SystemOptions())
    end_part("imports of the command")
    start_local_ray(system.num_threads, arena_layout(system, config).num_bytes)
    end_part("Ray")
    stage = "starting services"

    def told(now: str) -> None:
        nonlocal stage
        if now != stage:
            end_part(stage)
            stage = now

    running = System.start(system, on_progress=lambda progress: told(progress.stage))
    end_part(stage)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    messages = [{"role": "user", "content": _QUESTION}]
    running.complete(GenerateRequest(sampling, messages=messages))
    end_part("a prompt, to its first token")
    running.stop()
    end_part("stopping the system")

    import ray

    ray.shutdown()
    end_part("ending Ray")
    return seconds


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each part over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: statistics.median(run[name] for run in runs if name in run) for name in names}


def kept_seconds(runs: int) -> dict[str, list[float]]:
    """Seconds to the first text of each way, in turn; nothing stays in the end."""
    found: dict[str, list[float]] = {"fresh": [], "kept": []}
    with tempfile.TemporaryDirectory(prefix="hc-", dir="/tmp") as folder:
        changes = {"XDG_RUNTIME_DIR": folder}
        try:
            command_seconds(HERE, ["--keep", "1h"], changes)
            for _ in range(runs):
                found["fresh"].append(command_seconds(HERE, ["--own"], changes)[_FIRST])
                found["kept"].append(command_seconds(HERE, [], changes)[_FIRST])
        finally:
            subprocess.run(
                [sys.executable, "-m", "hotcold.jobs.cli", "stop"],
                cwd=HERE,
                env={**os.environ, "PYTHONPATH": str(HERE), **changes},
                stdout=subprocess.DEVNULL,
                check=True,
            )
    return found


@click.command()
@click.option("--runs", default=5, type=click.IntRange(1), show_default=True)
@click.option("--beside", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--kept", is_flag=True, help="Beside a system that is kept.")
@click.option("--empty", is_flag=True, help="With nothing compiled.")
@click.option("--model", help="With --empty: instead of the embedded one.")
@click.option("--one", is_flag=True, hidden=True)
def main(
    runs: int, beside: Path | None, kept: bool, empty: bool, model: str | None, one: bool
) -> None:
    """Print how long a start takes."""
    if one:
        click.echo(json.dumps(measure_parts()))
        return
    click.echo(f"{platform.machine()}, {os.cpu_count()} CPUs, {datetime.date.today()}, {runs} runs")
    if kept:
        for way, seconds in kept_seconds(runs).items():
            median = statistics.median(seconds)
            click.echo(f"{min(seconds):6.2f} {median:6.2f} {max(seconds):6.2f} s {_FIRST}, {way}")
        click.echo(HEAD)
        for left in what_is_left():
            click.echo(left)
        return
    checkouts = [HERE] if beside is None else [HERE, beside.resolve()]
    if empty:
        for _ in range(runs):
            for checkout in checkouts:
                first_s, cpu_s = empty_seconds(checkout, model)
                click.echo(f"{first_s:6.2f} s {_FIRST}, {cpu_s:6.2f} CPU s: {checkout}")
        return
    found: list[list[dict[str, float]]] = [[] for _ in checkouts]
    for _ in range(runs):
        for each, checkout in zip(found, checkouts, strict=True):
            each.append(command_seconds(checkout))
    here, *others = [medians(each) for each in found]
    for name, seconds in here.items():
        line = f"{seconds:6.2f} s {name}"
        for other in others:
            line += f"; {other[name]:.2f} s there, ratio {seconds / other[name]:.2f}"
        click.echo(line)
    for name, seconds in medians([part_seconds() for _ in range(runs)]).items():
        click.echo(f"{seconds:6.2f} s   {name}")


if __name__ == "__main__":
    main()
