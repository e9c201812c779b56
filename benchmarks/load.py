"""Requests that run again and again, and whether their answers are right."""

import itertools
import threading
import time
from collections import deque

import numpy as np

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.actors.system import System
from hotcold.model.errors import HotcoldError
from hotcold.model.sampling import SamplingParams

_PROMPT_TOKENS = (1, 7, 31, 40, 100, 200, 300, 400)


class Load:
    """Requests that start again as soon as they have ended, until told to stop."""

    def __init__(self, system: System, requests: list[GenerateRequest]) -> None:
        """Run each request alone first, for the tokens that it must give."""
        self._system, self._requests = system, requests
        self._expected = [system.complete(request).ids for request in requests]
        self._stopping, self._lock = threading.Event(), threading.Lock()
        self._moments: deque[float] = deque(maxlen=100_000)  # of tokens, of all requests
        self.num_right, self.wrong = 0, list[str]()
        numbers = range(len(requests))
        self._threads = [
            threading.Thread(target=self._run, args=(n,), daemon=True) for n in numbers
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

    def first_after(self, at_s: float) -> float | None:
        """When the first token after a moment came; None before there is one."""
        with self._lock:
            later = list(itertools.takewhile(lambda at: at > at_s, reversed(self._moments)))
        return later[-1] if later else None

    def _run(self, number: int) -> None:
        problem = ""
        while not (problem or self._stopping.is_set()):
            try:
                ids = list[int]()
                for event in self._system.generate(self._requests[number]):
                    ids += event.token_ids
                    with self._lock:
                        self._moments.append(time.monotonic())
                problem = "" if ids == self._expected[number] else "other tokens"
            except HotcoldError as error:
                problem = str(error)
            with self._lock:
                self.num_right += not problem
                self.wrong += [f"request {number}: {problem}"] * bool(problem)


def requests_of(count: int, context: int, vocab: int) -> list[GenerateRequest]:
    """`count` requests: one that fills the context, or a batch of shorter ones."""
    chance, found = np.random.default_rng(count), []
    for n in range(count):
        ids = chance.integers(10, vocab, _PROMPT_TOKENS[n] if count > 1 else 50).tolist()
        most = min(context - len(ids) - 8, context if count == 1 else 200 + 100 * n)
        temperature = 0.9 if n % 2 else 0.0
        sampling = SamplingParams(max_tokens=most, temperature=temperature, seed=n, ignore_eos=True)
        found.append(GenerateRequest(sampling, prompt_ids=ids))
    return found


def leaks(system: System) -> str:
    """What nobody uses and is still lent; "" for nothing. Of an ended system, why it has ended."""
    for _ in range(60):
        try:
            load = system.call("driver_load")
        except HotcoldError as error:
            return str(error)
        if not (load.num_running or load.num_waiting or load.kv_cache_usage):
            return ""
        time.sleep(0.1)
    return f"{load.num_running + load.num_waiting} requests, {load.kv_cache_usage:.1%} of the pages"
