"""Services killed and stopped at random moments while requests run: what becomes of the tokens.

    python -m benchmarks.faults --faults 200 --out benchmarks/results/faults

Half of the faults come over one long generation after another, half over a batch of eight requests
with prompts of 1 to 400 tokens, greedy and drawn. Each is a kill -9 or a SIGSTOP of a service drawn
at random. Every answer is compared with that of an undisturbed run of the same system. The time to
recover is from the fault to the first token after the silence that it caused, without time in which
this process did not run either: of a machine that was suspended, or busy with others. Faults keep
the pace that the system allows: fewer than ten in a minute.
"""

import itertools
import os
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import numpy as np

from actors.protocol.messages import GenerateRequest, Generation, SystemConfig
from actors.system import System
from benchmarks.runs import Json, table_option, where_and_when, write_report
from model.errors import HotcoldError
from model.files.locate import locate_model
from model.sampling import SamplingParams

_SERVICES = ("gpu", "cpu0", "cpu1")
_SIGNALS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
_A_MINUTE_S, _MOST_A_MINUTE = 66.0, 9  # a fault may be noticed some seconds late
_TICK_S, _LONGEST_TICK_S = 0.02, 0.2
_SETTLED_S = 0.6  # a fault is over when tokens have come for so long
_LONGEST_RECOVERY_S = 300.0
_PROMPT_TOKENS = (1, 7, 31, 40, 100, 200, 300, 400)


@dataclass
class Fault:
    """One fault; moments by a `RunningClock`, in seconds."""

    service: str
    kind: str
    moment_s: float
    recovered_s: float


class RunningClock:
    """Seconds in which this process ran."""

    def __init__(self) -> None:
        self.now_s = 0.0
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(_TICK_S)
            now = time.monotonic()
            self.now_s += min(now - last, _LONGEST_TICK_S)
            last = now


class Load:
    """Requests that start again as soon as they have ended, until told to stop."""

    def __init__(self, system: System, requests: list[GenerateRequest]) -> None:
        """Run each request alone first, for the tokens that it must give."""
        self._system = system
        self._requests = requests
        self.clock = RunningClock()
        self._expected = [system.complete(request).ids for request in requests]
        self._stopping = threading.Event()
        self._moments: deque[float] = deque(maxlen=100_000)  # of tokens, of all requests
        self._lock = threading.Lock()
        self.num_right = 0
        self.wrong: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(len(requests))
        ]

    def start(self) -> None:
        """Start all requests."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Return when those that run have ended."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def moments(self) -> list[float]:
        """When tokens came."""
        with self._lock:
            return list(self._moments)

    def _run(self, number: int) -> None:
        while not self._stopping.is_set():
            try:
                found = self._complete(self._requests[number])
                problem = "" if found.ids == self._expected[number] else "other tokens"
            except HotcoldError as error:
                problem = str(error)
            with self._lock:
                self.num_right += not problem
                if problem:
                    self.wrong.append(f"request {number}: {problem}")
            if problem:
                return

    def _complete(self, request: GenerateRequest) -> Generation:
        result = None
        for event in self._system.generate(request):
            with self._lock:
                self._moments.append(self.clock.now_s)
            result = event.result
        if result is None:
            raise HotcoldError("the stream ended without a result")
        return result


def _requests(count: int, context: int) -> list[GenerateRequest]:
    random = np.random.default_rng(count)
    found = []
    for n in range(count):
        ids = random.integers(10, 4000, _PROMPT_TOKENS[n] if count > 1 else 50).tolist()
        sampling = SamplingParams(
            max_tokens=context - len(ids) - 8 if count == 1 else 200 + 100 * n,
            temperature=0.9 if n % 2 else 0.0,
            seed=n,
            ignore_eos=True,
        )
        found.append(GenerateRequest(sampling, prompt_ids=ids))
    return found


def _inject(system: System, load: Load, random: np.random.Generator) -> Fault:
    """One fault at a random moment; returns when tokens flow again."""
    pids = system.call("processes")
    service, kind = str(random.choice(_SERVICES)), str(random.choice(list(_SIGNALS)))
    time.sleep(float(random.uniform(0.05, 0.5)))
    moment = load.clock.now_s
    os.kill(pids[service], _SIGNALS[kind])
    while True:
        time.sleep(0.05)
        now, moments = load.clock.now_s, load.moments()
        if load.wrong:
            return Fault(service, kind, moment, now)
        after = [moment, *(at for at in moments if at > moment)]
        gaps = [(later - at, later) for at, later in itertools.pairwise(after)]
        longest = max(gaps, default=(0.0, now))
        if longest[0] > 0.5 and after[-1] - longest[1] > _SETTLED_S:
            return Fault(service, kind, moment, longest[1])
        if now - moment > _LONGEST_RECOVERY_S:
            load.wrong.append(f"no token for long after {kind} of {service}")


def _part(system: System, load: Load, num_faults: int, seed: int, lately: deque[float]) -> Json:
    random, faults = np.random.default_rng(seed), list[Fault]()
    load.start()
    while len(faults) < num_faults and not load.wrong:
        if len(lately) == _MOST_A_MINUTE:
            time.sleep(max(0.0, lately[0] + _A_MINUTE_S - time.monotonic()))
        lately.append(time.monotonic())
        faults.append(_inject(system, load, random))
        fault = faults[-1]
        took_s = fault.recovered_s - fault.moment_s
        click.echo(f"{len(faults)}: {fault.kind} of {fault.service}: {took_s:.2f} s", err=True)
    load.stop()
    if load.wrong:
        click.echo("; ".join(load.wrong), err=True)
    took = [[f.kind, f.service, f.recovered_s - f.moment_s] for f in faults]
    return {"faults": took, "right": load.num_right, "wrong": load.wrong}


def table_of(report: Json) -> str:
    """The report as Markdown, a row for each load and kind of fault."""
    lines = [
        f"The demo model: {report['shape']}; {report['machine']}; {report['date']}; a GPU service "
        "on the CPU and two CPU services",
        "",
        "| load | fault | faults | answers as undisturbed | others | median s | worst s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, part in report["parts"].items():
        answers = f"{part['right']} | {len(part['wrong'])}"
        for kind in _SIGNALS:
            took = [seconds for what, _, seconds in part["faults"] if what == kind]
            if took:
                spread = f"{median(took):.2f} | {max(took):.2f}"
                lines.append(f"| {name} | {kind} | {len(took)} | {answers} | {spread} |")
    lines += ["", "Seconds are from the fault to the next token, of any request."]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--faults", type=click.IntRange(min=2), default=200, show_default=True)
@click.option("--exchange", type=click.Choice(["arena", "calls"]), default="arena")
@click.option("--seed", default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Writes OUT.json and OUT.md.")
@table_option(table_of)
def main(faults: int, exchange: str, seed: int, out: Path | None) -> None:
    """Kill and stop services while requests run, and compare what they answer."""
    path = locate_model(None)
    config = SystemConfig(
        str(path),
        num_cpu_actors=2,
        num_threads=2,
        context_length=4096,
        kv_positions=8 * 4096,
        exchange=exchange,
    )
    parts: Json = {}
    lately: deque[float] = deque(maxlen=_MOST_A_MINUTE)
    with System.start(config) as system:
        for name, count in (("one long generation", 1), ("batch of eight", 8)):
            load = Load(system, _requests(count, config.context_length))
            parts[name] = _part(system, load, faults // 2, seed + count, lately)
    report = where_and_when(path, config.num_threads) | {"parts": parts, "exchange": exchange}
    write_report(report, table_of(report), out)
    if any(part["wrong"] for part in parts.values()):
        raise click.ClickException("some answers differ; see the report")


if __name__ == "__main__":
    main()
