"""Requests that run again and again while faults come, and whether their answers are right."""

import threading
import time
from collections import deque

import numpy as np

from hotcold.actors.protocol.messages import GenerateRequest, Generation
from hotcold.actors.system import System
from hotcold.model.errors import HotcoldError
from hotcold.model.sampling import SamplingParams

_TICK_S, _LONGEST_TICK_S = 0.02, 0.2
_SETTLED_S = 6.0  # until what has ended has given everything back
_PROMPT_TOKENS = (1, 7, 31, 40, 100, 200, 300, 400)


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


def leaks(system: System) -> str:
    """What nobody uses and is still lent: requests, pages of the KV cache; "" for nothing.

    Of a system that has ended, why it has.
    """
    end_s = time.monotonic() + _SETTLED_S
    while time.monotonic() < end_s:
        try:
            load = system.call("driver_load")
        except HotcoldError as error:
            return str(error)
        if not (load.num_running or load.num_waiting or load.kv_cache_usage):
            return ""
        time.sleep(0.1)
    allocated = f"{load.kv_cache_usage:.1%} of the KV cache"
    return f"{load.num_running} requests that run, {load.num_waiting} that wait, {allocated}"


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

    def first_after(self, at_s: float) -> float | None:
        """When the first token after a moment came; None before there is one."""
        found = None
        with self._lock:
            for moment in reversed(self._moments):
                if moment <= at_s:
                    break
                found = moment
        return found

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


def requests_of(count: int, context: int) -> list[GenerateRequest]:
    """`count` requests: one that fills the context, or a batch of shorter ones."""
    random = np.random.default_rng(count)
    found = []
    for n in range(count):
        ids = random.integers(10, 4000, _PROMPT_TOKENS[n] if count > 1 else 50).tolist()
        sampling = SamplingParams(
            max_tokens=min(context - len(ids) - 8, context if count == 1 else 200 + 100 * n),
            temperature=0.9 if n % 2 else 0.0,
            seed=n,
            ignore_eos=True,
        )
        found.append(GenerateRequest(sampling, prompt_ids=ids))
    return found
