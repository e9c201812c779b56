"""Random requests of all kinds at once: each token and log-probability as alone, to the last bit.

    python -m benchmarks.random_requests [MODEL] --requests 10000 --minutes 60
    python -m benchmarks.random_requests --requests 200 --kv-dtype q8 --seed 7

Starts two systems of one model. The plain one computes every prompt from its beginning, without
speculation, one request at a time. The other one has all that could change an answer and must not:
beginnings of prompts kept in memory and in a file (`--prefix-cache`), speculation, eight requests
at once in a KV cache with room for three, so some are preempted. Some requests are cancelled, now
and then the system starts anew, or all of it is killed first. Each request is drawn from --seed and
its number, so a run repeats; a difference is printed with its request as JSON.
"""

from __future__ import annotations

import json
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.frame import HERE, Json, head, heading, program, progress
from benchmarks.load import leaks
from hotcold.actors.protocol.messages import GenerateRequest, Grammar, SystemConfig, TokenEvent
from hotcold.actors.setup.preflight import prepare_system
from hotcold.actors.system import System
from hotcold.jobs.support.options import split_system_options, system_options
from hotcold.model.config.build import read_config
from hotcold.model.errors import HotcoldError
from hotcold.model.files.locate import locate_model
from hotcold.model.parameters import Number
from hotcold.model.sampling import PARAMETERS, SamplingParams
from hotcold.model.text.tokenizer import Tokenizer

_CLIENTS = 8
_AHEAD = 24  # requests whose right answers are known and that wait for a client
_PREFIX_CACHE = 64 << 20  # bytes
_SHOWN_EVERY, _MOST_WRONG, _LONGEST_ANSWER, _REMEMBERED = 500, 20, 48, 40
_STOPS = (" the", ".", "\n", "e", "():", "of ")
_GRAMMARS = (
    Grammar("json_schema", '{"type": "array", "items": {"enum": ["one", "two"]}, "maxItems": 6}'),
    Grammar("lark", "start: /[a-z]+( [a-z]+)*[.]/"),
)


class Draws:
    """Draws requests to one model, in the order of their numbers, by what earlier ones were."""

    def __init__(self, path: Path, seed: int, context: int) -> None:
        self._seed, self._context, self._text = seed, context, list[int]()
        self._vocab, self._tokenizer = read_config(path).vocab_size, Tokenizer.from_model(path)
        if self._tokenizer is not None:
            pages = "".join(file.read_text() for file in sorted((HERE / "docs").glob("[a-g]*.md")))
            self._text = self._tokenizer.encode(pages[: 1 << 17], False)
        self._earlier: list[tuple[GenerateRequest, list[int]]] = []  # with their answers

    def draw(self, number: int) -> GenerateRequest:
        """The request of that number."""
        name = f"{self._seed}-{number}"
        chance = random.Random(name)
        if self._earlier and chance.random() < 0.1:  # the same again; as `n` has it, another seed
            same, _ = chance.choice(self._earlier[-8:])
            seed = chance.choice((same.sampling.seed, chance.randrange(1 << 31)))
            return replace(same, sampling=replace(same.sampling, seed=seed), request_id=name)
        prompt = self._prompt(chance)[: self._context - 2]
        has_grammar = self._tokenizer is not None and chance.random() < 0.15
        return GenerateRequest(
            self._sampling(chance, min(_LONGEST_ANSWER, self._context - len(prompt))),
            prompt_ids=prompt,
            request_id=name,
            grammar=chance.choice(_GRAMMARS) if has_grammar else None,
            num_logprobs=chance.choice((None, 0, 1, 5, 20)),
            num_prompt_logprobs=2 if chance.random() < 0.03 else None,
            wants_embedding=chance.random() < 0.02,
            use_cache=chance.random() < 0.95,
            cache_salt=chance.choice(("", "", "", "one", "two")),
        )

    def add(self, request: GenerateRequest, answer: Sequence[int]) -> None:
        """Remember a request and its answer for later prompts."""
        self._earlier = [*self._earlier, (request, list(answer))][-_REMEMBERED:]

    def _prompt(self, chance: random.Random) -> list[int]:
        kind = chance.random()
        if not self._earlier or kind < 0.35:  # often just at, before or after a page or chunk
            near = chance.choice((32, 64, 97, 128, 192, 256, 320)) + chance.randrange(-1, 2)
            short = int(1 + chance.random() ** 2 * self._context)
            return self._new(chance, near if chance.random() < 0.3 else short)
        request, answer = chance.choice(self._earlier)
        earlier = list(request.prompt_ids or [])
        if kind < 0.6:  # it goes on after the answer: a conversation's next turn
            return earlier + answer + self._new(chance, chance.randrange(1, 60))
        place = chance.randrange(len(earlier))
        if kind < 0.85:  # the same beginning
            return earlier[:place] + self._new(chance, chance.randrange(1, 80))
        return earlier[:place] + self._new(chance, 1) + earlier[place + 1 :]  # edited

    def _new(self, chance: random.Random, length: int) -> list[int]:
        """New tokens: text, or drawn ids; a part that is repeated now and then."""
        found = [chance.randrange(self._vocab) for _ in range(length)]
        if self._text and chance.random() < 0.9:
            first = chance.randrange(max(1, len(self._text) - length))
            found = self._text[first : first + length]
        period = chance.randrange(1, 20) if chance.random() < 0.25 else length
        return (found[:period] * (length // period + 1))[:length]

    def _sampling(self, chance: random.Random, room: int) -> SamplingParams:
        """Usual values of the parameters that matter most, and some of all others."""
        most = max(1, min(room, chance.randrange(1, _LONGEST_ANSWER + 1)))
        some = [chance.randrange(self._vocab) for _ in range(5)]
        stops = chance.sample(_STOPS, 2) if self._tokenizer is not None else []
        sets: list[dict[str, Sequence[Any]]] = [
            {"temperature": (0.0, chance.uniform(0.0, 1.5), 1.0), "top_k": (0, 1, 5, 40),
             "top_p": (1.0, 0.95, 0.5), "min_p": (0.0, 0.05, 0.3), "ignore_eos": (False, True),
             "seed": [chance.randrange(1 << 31)], "max_tokens": [most]},
            {"repeat_penalty": (1.0, 1.3, 0.8), "presence_penalty": (0.0, 1.5),
             "frequency_penalty": (0.0, 0.7), "repeat_last_n": (-1, 8, 64),
             "penalize_prompt": (False, True)},
            {"logit_bias": [[(one, chance.uniform(-8, 8)) for one in dict.fromkeys(some)]]},
            {"stop": [stops], "stop_token_ids": [some[:3]], "min_tokens": range(most + 1),
             "include_stop_str_in_output": (False, True)},
        ]  # fmt: skip
        chosen = [one for n, one in enumerate(sets) if n == 0 or chance.random() < 0.3]
        given = {name: chance.choice(of[name]) for of in chosen for name in of}
        others = {
            name: chance.uniform(one.kind.low, min(one.kind.high, one.kind.low + 2.0))
            for name, one in PARAMETERS.items()
            if isinstance(one.kind, Number) and name not in given and chance.random() < 0.05
        }
        try:
            return SamplingParams.of_given(given | others, SamplingParams())
        except HotcoldError:  # two that do not go together
            return SamplingParams.of_given(given, SamplingParams())


def answer_of(system: System, request: GenerateRequest, leave_after: int | None = None) -> Json:
    """All that an answer says; `leave_after`: cancel it after so many tokens."""
    events, error = list[TokenEvent](), ""
    stream: Any = system.generate(request)
    try:
        while leave_after is None or sum(len(e.token_ids) for e in events) < leave_after:
            if (event := next(stream, None)) is None:
                break
            events.append(event)
    except HotcoldError as problem:
        error = str(problem)
    finally:
        stream.close()
    lists = ("token_ids", "logprobs", "prompt_logprobs", "text")
    found: Json = {name: [x for e in events for x in getattr(e, name)] for name in lists}
    result = events[-1].result if events and not error else None
    told = {} if result is None else {"finish": result.finish_reason, "embedding": result.embedding}
    numbers = {} if result is None else result.as_json()
    return {**found, "error": error, "finish": "", "embedding": None, **told, "numbers": numbers}


def difference(found: Json, expected: Json) -> str:
    """What differs first, "" for nothing; an answer without an end may be shorter."""
    is_whole = bool(found["finish"] or found["error"])
    for name, value in found.items():
        wanted = expected[name]
        if not is_whole:
            wanted = wanted[: len(value)] if isinstance(value, list) else value
        if name != "numbers" and value != wanted:
            return f"{name}: {value!r} instead of {wanted!r}"
    return ""


class Run:
    """Clients that ask the tested system what the plain one has answered."""

    def __init__(self, plain: System, config: SystemConfig, draws: Draws, harms: bool) -> None:
        self._plain, self._config, self._draws, self._harms = plain, config, draws, harms
        self.system, self._known = System.start(config), dict[str, Json]()
        self._asked: queue.Queue[tuple[int, GenerateRequest, Json] | None] = queue.Queue(_AHEAD)
        self._lock, self.counts, self.wrong = threading.Lock(), Counter[str](), list[Json]()

    def run(self, num_requests: int, until_s: float) -> None:
        """Ask so many requests, or until that time."""
        clients = [threading.Thread(target=self._ask_all, daemon=True) for _ in range(_CLIENTS)]
        for client in clients:
            client.start()
        for number in range(num_requests):
            if time.monotonic() > until_s or len(self.wrong) >= _MOST_WRONG:
                break
            request = self._draws.draw(number)
            if self._harms and random.Random(number).random() < 0.004:
                self._asked.join()
                self._restart(number)
            alone = replace(request, request_id="", use_cache=False)
            key = json.dumps(asdict(alone), default=str)
            if key not in self._known:
                self._known[key] = answer_of(self._plain, alone)
            self._draws.add(request, self._known[key]["token_ids"])
            self._asked.put((number, request, self._known[key]))
            if number % _SHOWN_EVERY == 0:
                progress(f"request {number}: {dict(self.counts)}")
        for _ in clients:
            self._asked.put(None)
        for client in clients:
            client.join()
        if lent := leaks(self.system):
            self._add(difference=f"in the end are lent: {lent}")

    def _restart(self, number: int) -> None:
        """End the system and start it again; every second time all of it is killed at once."""
        if number % 2:
            running = [psutil.Process(pid) for pid in self.system.call("processes").values()]
            for one in running:
                one.kill()
            psutil.wait_procs(running, timeout=30)
        self.system.end()
        self.system = System.start(self._config)
        self.counts["restarts"] += 1

    def _ask_all(self) -> None:
        while (asked := self._asked.get()) is not None:
            try:
                self._ask(*asked)
            except Exception as problem:
                self._add(number=asked[0], difference=repr(problem))
            finally:
                self._asked.task_done()
        self._asked.task_done()

    def _ask(self, number: int, request: GenerateRequest, expected: Json) -> None:
        chance = random.Random(-number)
        fate, leaves = chance.random(), chance.choice((0, 1, 1, 2, 5, 12, 30))
        found = answer_of(self.system, request, leaves if fate < 0.15 else None)
        if wrong := difference(found, expected):
            self._add(number=number, difference=wrong, request=asdict(request))
            return
        numbers, kind = found["numbers"], "refused" if found["error"] else found["finish"] or "left"
        with self._lock:
            self.counts.update({kind: 1, "tokens": len(found["token_ids"])})
            self.counts["cached"] += numbers.get("cached_tokens", 0)
            self.counts["drafts accepted"] += numbers.get("accepted_tokens", 0)

    def _add(self, **found: Any) -> None:
        with self._lock:
            self.wrong.append(found)
        click.echo(json.dumps(found, default=str), err=True)


@program
@click.argument("model", required=False)
@click.option("--requests", default=10_000)
@click.option("--minutes", default=1e6, help="Fewer requests, if this is over.")
@click.option("--seed", default=0)
@click.option("--restarts/--no-restarts", default=True)
@system_options
def main(
    model: str | None, requests: int, minutes: float, seed: int, restarts: bool, **values: Any
) -> tuple[Json, str]:
    """Compare random requests' answers, to the bit, with those of a plain system."""
    until_s = time.monotonic() + minutes * 60
    path, given = locate_model(model), split_system_options(values)
    context, kept = given.context_length or 512, given.prefix_cache_bytes or _PREFIX_CACHE
    sizes: Json = {"context_length": context, "kv_positions": 3 * context, "max_batch": _CLIENTS}
    cold = replace(given, **sizes, prefix_cache_bytes=0, speculate="off", draft="auto")
    plain, _ = prepare_system(path, cold)
    config, _ = prepare_system(path, replace(given, **sizes, prefix_cache_bytes=kept))
    draws = Draws(path, seed, config.context_length)
    with System.start(plain, others=[config]) as alone:
        run = Run(alone, config, draws, restarts)
        try:
            run.run(requests, until_s)
        finally:
            run.system.end()
    report = head(path, config.num_threads) | {"counts": dict(run.counts), "wrong": run.wrong}
    counts = ", ".join(f"{count} {name}" for name, count in run.counts.items())
    text = heading(report, path.name, f"seed {seed}, mode {config.mode}")
    return report, f"{text}{counts}; {len(run.wrong)} differ from the plain system's.\n"


if __name__ == "__main__":
    main()
