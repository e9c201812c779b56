"""What a long prompt costs its neighbours: gaps between their tokens, answers of /health, ends.

    python -m benchmarks.neighbours MODEL [--prompt-tokens 8000] [--prompt-tokens 2000]

First with driver and services in this process, where each token and each layer of a chunk is seen:
the gaps between two tokens of other streams, alone and while a prompt is read, beside the longest
layer of a chunk, and what is still computed for a request whose reader leaves. `--chunks-at-once 4`
is as where neurons are on storage. Then over HTTP with `hotcold serve`: how long /health and
/metrics take meanwhile, the gaps that a client sees (the server hands tokens on 25 times a second),
and seconds until a client that left is given up.
"""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.mixed_load import wait_until_ready
from benchmarks.runs import Json, table_option, where_and_when, write_report
from hotcold.actors.driver.driver import Driver
from hotcold.actors.driver.engine import Engine
from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig, TokenEvent
from hotcold.jobs.support.listening import listen
from hotcold.model.files.locate import locate_model
from hotcold.model.sampling import SamplingParams
from hotcold.placement.machine.survey import usable_cores
from tests.actors.in_process import InProcessSystem

_ALONE_S = 2.0
_WAIT_S = 1800.0
_POLL_S = 0.02
_CHUNK = 512


@dataclass
class Watch:
    """When the engine ran steps and layers of prompts: (began, ended), in seconds."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    layers: list[tuple[float, float]] = field(default_factory=list)

    def on(self, engine: Engine) -> None:
        """Note what the engine runs from now on."""
        self._wrap(engine, "step", self.steps)
        self._wrap(engine, "run_layer", self.layers)

    def _wrap(self, engine: Engine, name: str, times: list[tuple[float, float]]) -> None:
        inner = getattr(engine, name)

        def timed(*given: Any, **named: Any) -> Any:
            began = time.monotonic()
            try:
                return inner(*given, **named)
            finally:
                times.append((began, time.monotonic()))

        setattr(engine, name, timed)

    def gaps(self, first: float, last: float) -> list[float]:
        """Between the ends of steps that follow each other, within two moments."""
        ends = [ended for _, ended in self.steps if first <= ended <= last]
        return np.diff(ends).tolist()

    def longest(self, times: list[tuple[float, float]], first: float, last: float) -> float:
        """Seconds of the longest one within two moments."""
        return max((end - begin for begin, end in times if first <= end <= last), default=0.0)

    def count(self, times: list[tuple[float, float]], first: float, last: float) -> int:
        """How many began within two moments."""
        return sum(first <= began <= last for began, _ in times)


class Asked:
    """One request to a driver in this process, read by a thread."""

    def __init__(self, driver: Driver, prompt: list[int], max_tokens: int, name: str) -> None:
        self.name, self._driver = name, driver
        self.events: list[tuple[float, TokenEvent]] = []
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(sampling, prompt_ids=prompt, request_id=name)
        self._events = driver.generate(request)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for event in self._events:
            self.events.append((time.monotonic(), event))

    def wait(self) -> None:
        """Return at its end."""
        self._thread.join(_WAIT_S)
        if self._thread.is_alive():
            raise click.ClickException(f"{self.name} does not end")

    def leave(self) -> float:
        """Cancel it; the moment."""
        now = time.monotonic()
        self._driver.cancel(self.name)
        return now

    @property
    def num_tokens(self) -> int:
        """How many tokens have come."""
        return sum(event.num_tokens for _, event in self.events)


def _await(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + _WAIT_S
    while not is_so():
        if time.monotonic() > ends:
            raise click.ClickException("what was waited for does not come")
        time.sleep(0.001)


def _prompt(num_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 250, num_tokens).tolist()


@contextmanager
def in_process(
    path: Path, context: int, streams: int, chunks_at_once: int
) -> Iterator[tuple[Driver, Watch]]:
    """A driver and its services in this process, and what its engine runs."""
    slots = streams + 1
    with InProcessSystem(
        path, 1, len(usable_cores()), num_slots=slots, num_positions=context,
        max_tokens=_CHUNK, kv_dtype="float16",
    ) as system:  # fmt: skip
        config = SystemConfig(
            str(path), "exact" if system.config.is_sparse else "dense", context_length=context,
            kv_positions=slots * context,
        )  # fmt: skip
        for service in system.services:
            service.prepare_prompts()
        driver, watch = Driver(config, system.exchange, system.topology), Watch()
        driver.engine.chunks_at_once = chunks_at_once
        watch.on(driver.engine)
        try:
            yield driver, watch
        finally:
            driver.close()


def measure_gaps(driver: Driver, watch: Watch, streams: int, prompt_tokens: int) -> Json:
    """Gaps between steps of `streams` others, alone and while a prompt is read."""
    others = [Asked(driver, _prompt(8, n), 1 << 20, f"other {n}") for n in range(streams)]
    _await(lambda: all(other.num_tokens > 4 for other in others))
    alone = time.monotonic()
    time.sleep(_ALONE_S)
    began = time.monotonic()
    Asked(driver, _prompt(prompt_tokens, 99), 1, "prompt").wait()
    ended = time.monotonic()
    for other in others:
        other.leave()
    for other in others:
        other.wait()
    return {
        "prompt_tokens": prompt_tokens,
        "prompt_s": ended - began,
        "alone_ms": quantiles(watch.gaps(alone, began)),
        "meanwhile_ms": quantiles(watch.gaps(began, ended)),
        "longest_layer_ms": 1e3 * watch.longest(watch.layers, began, ended),
        "longest_step_ms": 1e3 * watch.longest(watch.steps, began, ended),
    }


def measure_leaving(driver: Driver, watch: Watch, streams: int, prompt_tokens: int) -> Json:
    """Layers and steps that begin between a reader's leaving and its request's end."""
    found: Json = {}

    def left(asked: Asked) -> Json:
        at = asked.leave()
        asked.wait()
        ended = asked.events[-1][0]
        return {
            "ms": 1e3 * (ended - at),
            "layers": watch.count(watch.layers, at, ended),
            "steps": watch.count(watch.steps, at, ended),
        }

    in_answer = Asked(driver, _prompt(8, 1), 1 << 20, "in an answer")
    _await(lambda: in_answer.num_tokens > 4)
    found["in an answer"] = left(in_answer)
    before = len(watch.layers)
    in_prompt = Asked(driver, _prompt(prompt_tokens, 2), 1, "in a prompt")
    _await(lambda: len(watch.layers) > before + 5)
    found["in a prompt"] = left(in_prompt)
    before = len(watch.layers)
    others = [Asked(driver, _prompt(8, n), 1 << 20, f"other {n}") for n in range(streams)]
    reading = Asked(driver, _prompt(prompt_tokens, 3), 1, "reads")
    _await(lambda: len(watch.layers) > before + 5)
    queued = Asked(driver, _prompt(prompt_tokens, 4), 1, "queued")
    _await(lambda: driver.load().num_waiting > 0)
    found["queued"] = left(queued)
    for one in (*others, reading):
        one.leave()
        one.wait()
    return found


def quantiles(seconds: list[float]) -> list[float]:
    """p50, p99 and the most, in ms."""
    if not seconds:
        return [0.0, 0.0, 0.0]
    return [1e3 * float(np.quantile(seconds, share)) for share in (0.5, 0.99, 1.0)]


class Poller:
    """Asks for one path again and again on one connection; seconds of each answer."""

    def __init__(self, port: int, path: str) -> None:
        self._port, self._path = port, path
        self.seconds: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._ended.wait(_POLL_S):
            began = time.monotonic()
            connection.request("GET", self._path)
            answer = connection.getresponse()
            answer.read()
            self.seconds.append(time.monotonic() - began)
            if answer.status != 200:
                raise click.ClickException(f"{self._path} was answered {answer.status}")
        connection.close()

    def end(self) -> list[float]:
        """p50, p99 and the most, in ms."""
        self._ended.set()
        self._thread.join(120)
        return quantiles(self.seconds)


class HttpStream:
    """A streamed completion of a server; when its lines come."""

    def __init__(self, port: int, prompt: list[int], max_tokens: int) -> None:
        self.times: list[float] = []
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0,
                "ignore_eos": True}  # fmt: skip
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_WAIT_S)
        self._body = json.dumps(body)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            self._connection.request("POST", "/v1/completions", self._body)
            for line in self._connection.getresponse():
                if line.startswith(b"data: {"):
                    self.times.append(time.monotonic())
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            return  # left

    def leave(self) -> None:
        """Close the connection."""
        assert self._connection.sock is not None
        self._connection.sock.shutdown(socket.SHUT_RDWR)


def _gauge(port: int, name: str) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    (line,) = [line for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]
    return float(line.rsplit(" ", 1)[1])


def _polled(port: int, until: Callable[[], None]) -> Json:
    pollers = {path: Poller(port, path) for path in ("/health", "/metrics")}
    until()
    return {path: poller.end() for path, poller in pollers.items()}


def measure_server(port: int, prompt_tokens: int, streams: int) -> Json:
    """Latencies, gaps and leaving as a client of the server sees them."""
    found: Json = {"prompt_tokens": prompt_tokens}
    found["idle_ms"] = _polled(port, lambda: time.sleep(_ALONE_S))
    others = [HttpStream(port, _prompt(8, n), 1 << 20) for n in range(streams)]
    _await(lambda: all(len(other.times) > 2 for other in others))
    prompt = HttpStream(port, _prompt(prompt_tokens, 5), 1)
    began = time.monotonic()
    found["meanwhile_ms"] = _polled(port, prompt.thread.join)
    ended = time.monotonic()
    found["prompt_s"] = ended - began
    seen = [at for at in others[0].times if began <= at <= ended]
    found["gaps_ms"] = quantiles(np.diff(seen).tolist())
    leaves = HttpStream(port, _prompt(prompt_tokens, 6), 1)
    _await(lambda: _gauge(port, "num_requests_running") > streams)
    time.sleep(0.3 * found["prompt_s"])
    at = time.monotonic()
    leaves.leave()
    _await(lambda: _gauge(port, "num_requests_running") <= streams)
    found["left_in_prompt_s"] = time.monotonic() - at
    at = time.monotonic()
    for other in others:
        other.leave()
    _await(lambda: _gauge(port, "num_requests_running") == 0)
    found["left_in_answer_s"] = time.monotonic() - at
    return found


def with_server(
    path: Path, context: int, options: list[str], sizes: list[int], streams: int
) -> list[Json]:
    """`measure_server` of each size, of one `hotcold serve`."""
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    command = [
        sys.executable, "-m", "hotcold.jobs.cli", "serve", str(path), "--port", str(port),
        "--context", str(context), "--kv-tokens", str(context * (streams + 1)), *options,
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(port, server)
        return [measure_server(port, size, streams) for size in sizes]
    finally:
        server.terminate()
        server.wait(60)


def table_of(report: Json) -> str:
    """The report as Markdown."""
    three = "{:.1f}, {:.1f}, {:.1f}".format
    lines = [
        f"{report['model']}: {report['shape']}; {report['machine']}; {report['date']}; "
        f"{report['streams']} other streams. p50, p99 and the most, in ms.",
        "",
        "| prompt | chunks at once | takes, s | gaps alone | gaps meanwhile "
        "| longest layer of a chunk | longest step |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {one['prompt_tokens']} | {one['chunks_at_once']} | {one['prompt_s']:.1f} "
        f"| {three(*one['alone_ms'])} | {three(*one['meanwhile_ms'])} "
        f"| {one['longest_layer_ms']:.1f} | {one['longest_step_ms']:.1f} |"
        for one in report["gaps"]
    ]
    lines += ["", "| a reader leaves | until its end, ms | layers begun | steps begun |",
              "| --- | --- | --- | --- |"]  # fmt: skip
    lines += [
        f"| {name} | {one['ms']:.1f} | {one['layers']} | {one['steps']} |"
        for name, one in report["leaving"].items()
    ]
    if report["server"]:
        lines += [
            "",
            "| `hotcold serve`, prompt | /health idle | meanwhile | /metrics idle | meanwhile "
            "| gaps that a client sees | left in a prompt, s | in an answer, s |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
    lines += [
        f"| {one['prompt_tokens']} | "
        + " | ".join(
            three(*one[when][path])
            for path in ("/health", "/metrics")
            for when in ("idle_ms", "meanwhile_ms")
        )
        + f" | {three(*one['gaps_ms'])} | {one['left_in_prompt_s']:.2f} "
        f"| {one['left_in_answer_s']:.2f} |"
        for one in report["server"]
    ]
    return "\n".join(lines) + "\n"


@click.command()
@click.argument("model", required=False)
@click.option("--prompt-tokens", "sizes", type=int, multiple=True, default=(2000, 8000))
@click.option("--streams", default=1, help="Others that stream meanwhile.")
@click.option("--chunks-at-once", type=int, multiple=True, default=(1, 4))
@click.option("--serve/--no-serve", default=True)
@click.option("--option", "options", multiple=True, help="One more word for `hotcold serve`.")
@click.option("--out", type=click.Path(path_type=Path))
@table_option(table_of)
def main(
    model: str | None,
    sizes: tuple[int, ...],
    streams: int,
    chunks_at_once: tuple[int, ...],
    serve: bool,
    options: tuple[str, ...],
    out: Path | None,
) -> None:
    """Measure what a long prompt costs its neighbours."""
    path = locate_model(model)
    context = max(sizes) + 192
    report = where_and_when(path, len(usable_cores()))
    report |= {"model": path.name, "streams": streams, "gaps": [], "server": []}
    for at_once in chunks_at_once:
        with in_process(path, context, streams, at_once) as (driver, watch):
            for size in sizes:
                figures = measure_gaps(driver, watch, streams, size)
                report["gaps"].append({"chunks_at_once": at_once, **figures})
            report["leaving"] = measure_leaving(driver, watch, streams, max(sizes))
    if serve:
        report["server"] = with_server(path, context, list(options), list(sizes), streams)
    write_report(report, table_of(report), out)


if __name__ == "__main__":
    main()
