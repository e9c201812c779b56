"""Random requests of all kinds at once: each token and log-probability as alone, to the last bit.

    python -m benchmarks.random_requests --requests 10000 --minutes 60
    python -m benchmarks.random_requests path/to/model --kv-dtype q8 --seed 7
    python -m benchmarks.random_requests --shape tiny --requests 200

Starts two systems of one model. The plain one computes every prompt from its beginning, without
speculation, one request at a time. The other one has all that could change an answer and must not:
beginnings of prompts kept in memory and in a file (`--prefix-cache`), speculation, eight requests
at once in a KV cache with room for three, so some are preempted. Some requests are cancelled in the
middle, now and then a service is killed, the system started anew, or all of it killed.

Prompts are new, or begin like earlier ones, are edited, or go on after an answer; long and short;
text of this program's documents where the model has a tokenizer. Each request is drawn from --seed
and its number, so a run repeats. A difference is printed with its request as JSON.
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.fault_load import leaks
from benchmarks.request_draws import Drawn, Draws
from benchmarks.runs import Json, table_option, where_and_when, write_report
from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig, TokenEvent
from hotcold.actors.protocol.options import OPTIONS, SystemOptions
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.system import System
from hotcold.model.errors import HotcoldError
from hotcold.model.files.locate import locate_model
from hotcold.model.synthetic.shape import DTYPES, resolve_shape

_CLIENTS = 8
_AHEAD = 24  # requests whose right answers are known and that wait for a client
_KILL_EVERY_S = 12.0  # the system gives up at the tenth lost service within a minute
_SHOWN_EVERY_S = 10.0
_PLAIN: Json = {"prefix_cache_bytes": 0, "speculate": "off"}
_SHOWN = {"cached_tokens": "prompt_tokens_kept", "accepted_tokens": "drafted_tokens_accepted"}


@dataclass(frozen=True)
class Answer:
    """All that an answer says. Log-probabilities are compared as they are."""

    ids: tuple[int, ...]
    logprobs: tuple[Any, ...]
    text: str
    finish_reason: str = ""
    prompt_logprobs: tuple[Any, ...] = ()
    embedding: tuple[float, ...] = ()
    error: str = ""
    numbers: Json = field(default_factory=dict, compare=False)  # of the command-line contract

    @classmethod
    def of(cls, events: list[TokenEvent], error: str = "") -> Answer:
        """What these events say; without a result it is the beginning of an answer."""
        result = events[-1].result if events else None
        return cls(
            ids=tuple(one for event in events for one in event.token_ids),
            logprobs=tuple(one for event in events for one in event.logprobs),
            text="".join(event.text for event in events),
            finish_reason="" if result is None else result.finish_reason,
            prompt_logprobs=tuple(one for event in events for one in event.prompt_logprobs),
            embedding=tuple(result.embedding or ()) if result is not None else (),
            error=error,
            numbers=result.as_json() if result is not None else {},
        )

    def difference(self, expected: Answer) -> str:
        """The first field that differs, with what is there; "" for none.

        An answer without an end may be shorter.
        """
        for name in (one.name for one in fields(self) if one.compare):
            value, wanted = getattr(self, name), getattr(expected, name)
            if not self.finish_reason and not self.error:
                wanted = "" if name == "finish_reason" else wanted[: len(value)]
                if name == "embedding" or (name == "prompt_logprobs" and not value):
                    continue
            if value != wanted:
                return f"{name}: {_first_difference(value, wanted)}"
        return ""


def _first_difference(value: Any, wanted: Any) -> str:
    if isinstance(value, str):
        return f"{value!r} instead of {wanted!r}"
    for place, (one, other) in enumerate(zip(value, wanted, strict=False)):
        if one != other:
            return f"at {place} {one} instead of {other}"
    return f"{len(value)} instead of {len(wanted)}"


@dataclass
class Tally:
    """What came of all requests."""

    differences: list[Json] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, **counts: int) -> None:
        """Add to the counts."""
        with self.lock:
            self.counts.update({name.replace("_", " "): by for name, by in counts.items()})

    def add_difference(self, drawn: Drawn, what: str) -> None:
        """Print a difference with its request."""
        request = asdict(drawn.request)
        self.add_problem({"number": drawn.number, "difference": what, "request": request})

    def add_problem(self, found: Json) -> None:
        """Print and count what should not be."""
        with self.lock:
            self.differences.append(found)
            self.counts["differences"] += 1
        click.echo(json.dumps(found), err=True)


def answer_of(system: System, request: GenerateRequest, leave_after: int | None = None) -> Answer:
    """Run a request; `leave_after`: cancel it after so many tokens."""
    events: list[TokenEvent] = []
    stream: Any = system.generate(request)
    try:
        num_tokens = 0
        while leave_after is None or num_tokens < leave_after:
            event = next(stream, None)
            if event is None:
                break
            events.append(event)
            num_tokens += len(event.token_ids)
    except HotcoldError as error:
        return Answer.of(events, str(error))
    finally:
        stream.close()
    return Answer.of(events)


class PlainAnswers:
    """The right answers: alone, cold, without speculation; each is computed once."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._known: dict[str, Answer] = {}

    def of(self, request: GenerateRequest) -> Answer:
        """The answer to a request."""
        key = json.dumps(asdict(replace(request, request_id="", use_cache=False)), default=str)
        if key not in self._known:
            self._known[key] = answer_of(self._system, replace(request, use_cache=False))
        return self._known[key]


class TestedSystem:
    """The system that is tested; it can be killed and started anew while nobody asks."""

    def __init__(self, config: SystemConfig, tally: Tally) -> None:
        self._config, self._tally = config, tally
        self.system = System.start(config)
        self._killed_s = 0.0
        self._changing = threading.Lock()

    def kill_service(self, chance: random.Random) -> None:
        """Kill a service, unless one was a moment ago."""
        with self._changing, suppress(HotcoldError):
            if time.monotonic() - self._killed_s < _KILL_EVERY_S:
                return
            self._killed_s = time.monotonic()
            processes: dict[str, int] = self.system.call("processes")
            name = chance.choice(sorted(set(processes) - {"driver"}))
            with suppress(ProcessLookupError):
                os.kill(processes[name], signal.SIGKILL)
            self._tally.count(services_killed=1)

    def restart(self, chance: random.Random) -> None:
        """End the system and start it again; in one of two cases all of it is killed at once."""
        if chance.random() < 0.5:
            processes: dict[str, int] = self.system.call("processes")
            for process_id in processes.values():
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
            _await_end(processes.values())
        self.system.end()
        self.system = System.start(self._config)
        self._tally.count(restarts=1)


def _await_end(process_ids: Any) -> None:
    for process_id in process_ids:
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            psutil.Process(process_id).wait(30)


class Run:
    """Clients that ask the tested system what the plain one has answered."""

    def __init__(self, plain: System, tested: TestedSystem, draws: Draws, tally: Tally) -> None:
        self._plain, self._tested = PlainAnswers(plain), tested
        self._draws, self._tally = draws, tally
        self._asked: queue.Queue[tuple[Drawn, Answer] | None] = queue.Queue(_AHEAD)

    def run(self, num_requests: int, until_s: float) -> None:
        """Ask so many requests, or until that time."""
        clients = [threading.Thread(target=self._ask_all, daemon=True) for _ in range(_CLIENTS)]
        for client in clients:
            client.start()
        shown_s = time.monotonic()
        for number in range(num_requests):
            if time.monotonic() > until_s or len(self._tally.differences) >= 20:
                break
            drawn = self._draws.draw(number)
            if drawn.restarts:
                self._asked.join()
                self._tested.restart(random.Random(number))
            expected = self._plain.of(drawn.request)
            self._draws.add(drawn, expected.ids)
            self._asked.put((drawn, expected))
            if time.monotonic() - shown_s > _SHOWN_EVERY_S:
                shown_s = time.monotonic()
                self._show(number)
        for _ in clients:
            self._asked.put(None)
        for client in clients:
            client.join()
        if lent := leaks(self._tested.system):
            self._tally.add_problem({"difference": f"in the end are lent: {lent}"})

    def _show(self, number: int) -> None:
        with self._tally.lock:
            counts = ", ".join(f"{count} {name}" for name, count in self._tally.counts.items())
        click.echo(f"request {number}: {counts}", err=True)

    def _ask_all(self) -> None:
        while (asked := self._asked.get()) is not None:
            try:
                self._ask(*asked)
            except Exception as problem:
                self._tally.add_difference(asked[0], f"{type(problem).__name__}: {problem}")
            finally:
                self._asked.task_done()
        self._asked.task_done()

    def _ask(self, drawn: Drawn, expected: Answer) -> None:
        killer: threading.Thread | None = None
        if drawn.kills:
            chance = random.Random(drawn.number)
            killer = threading.Thread(target=self._kill_soon, args=(chance,))
            killer.start()
        found = answer_of(self._tested.system, drawn.request, drawn.leaves_after)
        if killer is not None:
            killer.join()
        if difference := found.difference(expected):
            self._tally.add_difference(drawn, difference)
            return
        kind = "refused" if found.error else "whole" if found.finish_reason else "left"
        shown = {name: found.numbers.get(key, 0) for key, name in _SHOWN.items()}
        self._tally.count(**{kind: 1}, tokens=len(found.ids), **shown)

    def _kill_soon(self, chance: random.Random) -> None:
        time.sleep(chance.uniform(0.0, 0.3))
        self._tested.kill_service(chance)


@contextmanager
def model_of(model: str | None, shape: str | None, context: int) -> Iterator[Path]:
    """The model's path; a shape is written with random weights first."""
    if shape is None:
        yield locate_model(model)
        return
    from hotcold.model.synthetic.make import make_model

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / shape
        sizes = resolve_shape(shape, {"context": context})
        make_model(path, sizes, density=0.2, dtype=DTYPES["f16"], seed=1)
        yield path


def table_of(report: Json) -> str:
    """The report as Markdown."""
    counts = ", ".join(f"{count} {name}" for name, count in report["counts"].items())
    return (
        f"{report['model']}: {report['shape']}; {report['machine']}; {report['date']}; seed "
        f"{report['seed']}; options {report['options']}\n\n{counts}; "
        f"{report['counts'].get('differences', 0)} differ from the plain system's.\n"
    )


@click.command()
@click.argument("model", required=False)
@click.option("--shape", help="Instead of a MODEL: random weights of this shape, such as tiny.")
@click.option("--requests", default=10_000, show_default=True)
@click.option("--minutes", default=1e6, help="Fewer requests, if this is over.")
@click.option("--seed", default=0, show_default=True)
@click.option("--context", default=512, show_default=True)
@click.option("--mode")
@click.option("--dtype")
@click.option("--kv-dtype")
@click.option("--cpu-actors", type=int)
@click.option("--threads", type=int)
@click.option("--speculate", default="auto", show_default=True)
@click.option("--draft")
@click.option("--prefix-cache", default="64MB", show_default=True)
@click.option("--kills/--no-kills", default=True, help="Services that are killed, restarts.")
@click.option("--out", type=click.Path(path_type=Path), help="Writes OUT.json and OUT.md.")
@table_option(table_of)
def main(
    model: str | None, shape: str | None, requests: int, minutes: float, seed: int, context: int,
    mode: str | None, dtype: str | None, kv_dtype: str | None, cpu_actors: int | None,
    threads: int | None, speculate: str, draft: str | None, prefix_cache: str, kills: bool,
    out: Path | None,
) -> None:  # fmt: skip
    """Compare random requests' answers, to the bit, with those of a plain system."""
    until_s = time.monotonic() + minutes * 60
    both: Json = {
        "mode": mode, "weight_dtype": dtype, "kv_dtype": kv_dtype, "num_cpu_actors": cpu_actors,
        "num_threads": threads, "context_length": context, "max_batch": _CLIENTS,
        "kv_positions": 3 * context,
    }  # fmt: skip
    own: Json = {"speculate": speculate} | ({"draft": draft} if draft else {})
    own["prefix_cache_bytes"] = OPTIONS["prefix_cache_bytes"].value_of(prefix_cache)
    tally = Tally()
    with model_of(model, shape, context) as path:
        plain, _ = prepare_system(path, SystemOptions(**both | _PLAIN))
        config, _ = prepare_system(path, SystemOptions(**both | own))
        draws = Draws(path, seed, config.context_length, harms=kills)
        with System.start(plain, others=[config]) as cold:
            tested = TestedSystem(config, tally)
            try:
                Run(cold, tested, draws, tally).run(requests, until_s)
            finally:
                tested.system.end()
        report = where_and_when(path, config.num_threads) | {
            "model": path.name,
            "seed": seed,
            "options": {name: value for name, value in (both | own).items() if value is not None},
            "counts": dict(tally.counts),
            "differences": tally.differences,
        }
    write_report(report, table_of(report), out)
    if tally.differences:
        sys.exit(1)


if __name__ == "__main__":
    main()
