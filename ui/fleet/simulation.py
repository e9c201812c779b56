"""A fleet in simulated time, by events of SimPy: the door's queue, its router, replicas.

What the fleet decides is decided by its own functions (`policy.py`). A replica's speeds are given:
it reads prompts one after another, and writes all answers at once, equally fast; where it does both
each has half of the time (docs/architecture.md, *Many requests*). No event is of one token.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import simpy

from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.ui.fleet import policy
from hotcold.ui.fleet.order import Speeds

_GAP_S = 30.0  # between two requests of a conversation, in the mean
_BURST_EVERY_S, _CALM_S = 150.0, 120.0
_LOOK_S = 1.0  # between two counts of requests
_SLOWNESS = 3.0  # of slow nodes
_AGAIN_S = 0.2  # until a request without a replica looks again
_NOTICE_S, _START_S = 5.0, 60.0  # a node that ends: its requests pause; until there is a new one
_OUT = 1 << 40  # requests at a node that is not there

Events = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class Service:
    """One replica.

    token_s: seconds for a prompt's token; num_pages: of its KV cache
    tokens_per_s: of all answers together, by how many there are at once, 1 among them
    """

    token_s: float
    tokens_per_s: Mapping[int, float]
    num_parallel: int = 8
    num_pages: int = 1024

    @cached_property
    def rates(self) -> list[float]:
        """Tokens a second of each of 0 to `num_parallel` answers; between known ones as a line."""
        known = sorted(self.tokens_per_s)
        numbers = np.arange(1, self.num_parallel + 1)
        total = np.interp(numbers, known, [self.tokens_per_s[number] for number in known])
        return [0.0, *(total / numbers)]


@dataclass(eq=False, slots=True)
class Request:
    """A request and what became of it; times in seconds, 0 where it did not come to that."""

    asked_s: float
    num_prompt: int
    num_answer: int
    keys: list[int]  # of the prompt's pages
    first_s: float = 0.0  # when its first token came
    ended_s: float = 0.0
    num_given: float = 0.0  # tokens of the answer, before the replica where it is
    num_cached: int = 0  # tokens of the prompt in the KV cache there
    num_left: float = 0.0  # tokens that are to be read there
    admitted_s: float = 0.0
    read_s: float = 0.0  # when that was done
    done: simpy.Event = field(init=False)


@dataclass(frozen=True)
class Load:
    """What clients ask: Poisson arrivals, exponential lengths.

    rate: requests a second; burst: times as many, for the last fifth of 150 s
    shared: share of prompts' tokens with which an earlier one began. Its root is the share of
    requests that go on with a conversation, and the share of tokens that these have in common
    """

    rate: float
    prompt_tokens: float
    answer_tokens: float
    shared: float = 0.0
    burst: float = 1.0

    def requests(self, number: int, seed: int) -> Iterator[Request]:
        """So many, in order of time."""
        chance, pages = random.Random(seed), count()

        def length(mean: float) -> int:
            return max(1, round(chance.expovariate(1 / mean)))

        def conversation() -> tuple[int, list[int]]:
            num_prompt = length(self.prompt_tokens)
            num_shared = round(num_prompt * share / PAGE_POSITIONS)
            return num_prompt, [next(pages) for _ in range(num_shared)]

        share, most, now = self.shared**0.5, self.rate * self.burst, 0.0
        open_ones = [conversation() for _ in range(round(self.rate * _GAP_S) or 1)]
        for _ in range(number):
            now += chance.expovariate(most)
            while now % _BURST_EVERY_S < _CALM_S and chance.random() * most >= self.rate:
                now += chance.expovariate(most)
            at = chance.randrange(len(open_ones))
            if chance.random() >= share:
                open_ones[at] = conversation()
            num_prompt, begun = open_ones[at]
            num_own = max(0, num_prompt // PAGE_POSITIONS - len(begun))
            keys = [*begun, *(next(pages) for _ in range(num_own))]
            yield Request(now, num_prompt, length(self.answer_tokens), keys)


class _Node:
    """A replica. It tells `has_answered` of each answer that has ended."""

    def __init__(
        self, fleet: Fleet, slowness: float, has_answered: Callable[[Request], None]
    ) -> None:
        env, self._has_answered = fleet.env, has_answered
        self._env, self._token_s = env, fleet.service.token_s * slowness
        self._rates = [rate / slowness for rate in fleet.service.rates]
        self._waiting: deque[Request] = deque()
        self._reading: deque[Request] = deque()
        # With what `_written` is at its end, and a number that no other has.
        self._writing: list[tuple[float, int, Request]] = []
        self._numbers = count()
        self._written, self._at_s = 0.0, env.now  # tokens of one answer since the start; until when
        self._next, self._ends_prompt = env.event(), False

    def take(self, request: Request) -> None:
        """Answer a request, from what it was given on."""
        request.done = self._env.event()
        self._waiting.append(request)
        self._advance()
        self._go_on()

    def end(self) -> None:
        """Have all requests go on elsewhere."""
        self._advance()
        self._next = self._env.event()
        for ends, _, request in self._writing:
            request.num_given = request.num_answer - (ends - self._written)
        for request in [*(one for *_, one in self._writing), *self._reading, *self._waiting]:
            request.done.succeed(False)

    def _advance(self) -> None:
        time_s = (self._env.now - self._at_s) * (0.5 if self._reading and self._writing else 1)
        self._at_s = self._env.now
        if self._reading:
            self._reading[0].num_left -= time_s / self._token_s
        self._written += time_s * self._rates[len(self._writing)]

    def _go_on(self) -> None:
        """Admit who waits, and come back when the next prompt or answer ends."""
        while self._waiting and len(self._reading) + len(self._writing) < len(self._rates) - 1:
            self._reading.append(self._waiting.popleft())
            self._reading[-1].admitted_s = self._env.now
        times = []
        if self._reading:
            times.append((self._reading[0].num_left * self._token_s, True))
        if self._writing:
            left = self._writing[0][0] - self._written
            times.append((left / self._rates[len(self._writing)], False))
        if times:
            time_s, self._ends_prompt = min(times)
            self._next = self._env.timeout(max(0.0, time_s) * len(times))
            self._next.callbacks.append(self._wake)

    def _wake(self, event: simpy.Event) -> None:
        if event is not self._next:
            return
        self._advance()
        if self._ends_prompt:
            request = self._reading.popleft()
            request.read_s = self._env.now
            request.first_s = request.first_s or request.read_s
            ends = self._written + request.num_answer - request.num_given - 1
            heapq.heappush(self._writing, (ends, next(self._numbers), request))
        else:
            request = heapq.heappop(self._writing)[-1]
            request.ended_s = self._env.now
            self._has_answered(request)
            request.done.succeed(True)
        self._go_on()


class Fleet:
    """Replicas, each on a node of its own, behind one door.

    most_waiting: others are refused
    mean_life_s: until a node ends: its requests pause for 5 s, a new one takes 60 s
    slow: the share of nodes that take three times as long
    """

    def __init__(
        self, service: Service, num_nodes: int, *, most_waiting: int = 64,
        mean_life_s: float = math.inf, slow: float = 0.0,
    ) -> None:  # fmt: skip
        self.env, self.chance, self.service = simpy.Environment(), random.Random(0), service
        self._num_nodes, self._mean_life_s, self._slow = num_nodes, mean_life_s, slow
        columns = (np.zeros(num_nodes, kind) for kind in (int, float, float))
        parallel = np.full(num_nodes, service.num_parallel)
        self.known = policy.ReplicaColumns(parallel, np.full(num_nodes, _OUT), *columns)
        self._places = service.num_parallel + policy.AHEAD
        self._queue: policy.FairQueue[simpy.Event] = policy.FairQueue(most_waiting)
        self._held: policy.HeldPages[int, int] = policy.HeldPages()
        self.nodes: dict[int, _Node] = {}
        for number in range(num_nodes):
            self.env.process(self._live(number, 0.0))

    @property
    def num_asked(self) -> int:
        """Requests that run or wait."""
        return self._queue.num_running + self._queue.num_waiting

    def ranked(self, num_tokens: np.ndarray) -> Iterator[int]:
        """Replicas, the first to be tried first, by the tokens of a prompt that each would read."""
        return policy.ranked(self.known, num_tokens)

    def run(self, requests: Iterable[Request]) -> list[Request]:
        """Ask all, each at its time, and wait for the last answer."""
        asked: list[Request] = []

        def arrivals() -> Events:
            for request in requests:
                yield self.env.timeout(request.asked_s - self.env.now)
                asked.append(request)
                self.env.process(self.ask(request))
            yield self.env.timeout(_LOOK_S)
            while self.num_asked:
                yield self.env.timeout(_LOOK_S)

        self.env.run(self.env.process(arrivals()))
        return asked

    def ask(self, request: Request) -> Events:
        """Answer a request, by as many replicas as it takes, or refuse it; for `env.process`."""
        turn = self.env.event()
        self._queue.join(turn, "")
        self._call_next()
        if (refused := self._queue.refuse()) is not None:
            refused.succeed(False)
        if not (yield turn):
            return
        while not request.ended_s:
            while self.known.count.min() >= self._places:
                yield self.env.timeout(_AGAIN_S)
            self._route(request)
            if not (yield request.done):
                yield self.env.timeout(_NOTICE_S)
        self._queue.end("")
        self._call_next()

    def _route(self, request: Request) -> None:
        held = self._held.beginnings(request.keys)
        num_cached = {one: policy.cached_tokens(of, PAGE_POSITIONS) for one, of in held.items()}
        num_tokens = np.full(self._num_nodes, request.num_prompt)
        for one, num in num_cached.items():
            num_tokens[one] -= num
        counts, ranks = self.known.count, self.ranked(num_tokens)
        number = next(one for one in ranks if counts[one] < self._places)
        counts[number] += 1
        self._held.add(number, request.keys, self.service.num_pages)
        self.known.num_pages[number] = self._held.count(number)
        request.num_cached = num_cached.get(number, 0)
        request.num_left = max(1.0, num_tokens[number] + request.num_given)
        self.nodes[number].take(request)

    def _has_answered(self, number: int, request: Request) -> None:
        known, num_read = self.known, request.num_prompt - request.num_cached
        speeds = Speeds(token_s=known.token_s[number], answer_s=known.answer_s[number])
        prefill_s, decode_s = request.read_s - request.admitted_s, request.ended_s - request.read_s
        policy.measure(speeds, num_read + int(request.num_given), prefill_s, decode_s)
        known.token_s[number], known.answer_s[number] = speeds["token_s"], speeds["answer_s"]
        known.count[number] -= 1

    def _call_next(self) -> None:
        room = self._places * len(self.nodes)
        for turn in self._queue.begin(room, room)[0]:
            turn.succeed(True)

    def _live(self, number: int, delay_s: float) -> Events:
        """A node, and those that take its place."""
        while True:
            yield self.env.timeout(delay_s)
            slowness = _SLOWNESS if self.chance.random() < self._slow else 1.0
            self.nodes[number] = _Node(self, slowness, partial(self._has_answered, number))
            for column in (self.known.token_s, self.known.answer_s, self.known.count):
                column[number] = 0
            self._call_next()
            if self._mean_life_s == math.inf:
                return
            yield self.env.timeout(self.chance.expovariate(1 / self._mean_life_s))
            self.known.count[number], self.known.num_pages[number] = _OUT, 0
            self._held.forget(number)
            self.nodes.pop(number).end()
            delay_s = _START_S


class Outcome(NamedTuple):
    """What clients saw. Shares are of requests, of prompts' tokens, of what nodes could have done.

    Shapes:  (answers,): seconds to the first token, and between two, the mean of an answer
    """

    first_s: np.ndarray
    between_s: np.ndarray
    refused: float
    cached: float
    busy: float


def simulate(fleet: Fleet, load: Load, num_requests: int) -> Outcome:
    """Have a fleet that is new answer so many requests; the first fifth is not counted."""
    asked = fleet.run(load.requests(num_requests, 0))[num_requests // 5 :]
    answered = [one for one in asked if one.ended_s]
    num_prompt = sum(one.num_prompt for one in answered)
    num_cached = sum(one.num_cached for one in answered)
    most = fleet.service.rates[-1] * fleet.service.num_parallel  # tokens of answers a second
    busy_s = (num_prompt - num_cached) * fleet.service.token_s
    busy_s += sum(one.num_answer for one in answered) / most
    between = ((r.ended_s - r.first_s, r.num_answer - 1) for r in answered if r.num_answer > 1)
    return Outcome(
        first_s=np.array([one.first_s - one.asked_s for one in answered]),
        between_s=np.array([time_s / num_gaps for time_s, num_gaps in between] or [0.0]),
        refused=1 - len(answered) / len(asked),
        cached=num_cached / num_prompt,
        busy=busy_s / (asked[-1].asked_s - asked[0].asked_s) / len(fleet.nodes),
    )
