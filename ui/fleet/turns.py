"""Whose request is next where the fleet has no room for all: that of the client with fewest."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from hotcold.ui.api.errors import ApiError
from hotcold.ui.fair_share import first_to_leave

# Requests that running replicas of each deployment take, as this process's routers know; and of
# these those that need not wait there.
places: dict[str, int] = {}
at_once: dict[str, int] = {}

_POLL_S = 0.5  # between two looks for more room
_NEWEST = 0.2  # the weight of the last answer's time among those measured


class Turns:
    """Lets as many requests run as there is room for; others wait, or are refused.

    Those of batches wait without a limit and come last. Beside others they run only as far as none
    of these waits at its replica: the newest of them are interrupted.
    """

    def __init__(
        self, room: Callable[[], int], most_waiting: int, at_once: Callable[[], int] | None = None
    ) -> None:
        """`room`: requests that may run now; `at_once`: of these those that need not wait."""
        self._room = room
        self._at_once = at_once or room
        self._most_waiting = most_waiting
        self._running: Counter[str] = Counter()  # by client
        self._waiting: dict[asyncio.Future[None], str] = {}  # clients, in order
        self._running_batches: Counter[str] = Counter()
        self._waiting_batches: dict[asyncio.Future[None], str] = {}
        self._interruptible: dict[asyncio.Timeout, None] = {}  # of batches, in order
        self._answer_s = 0.0

    @asynccontextmanager
    async def turn(self, client: str, is_batch: bool = False) -> AsyncIterator[None]:
        """Within it a client's request runs.

        Errors:  ApiError 429, where too many wait; TimeoutError where a batch's is interrupted
        """
        running = self._running_batches if is_batch else self._running
        waiting = self._waiting_batches if is_batch else self._waiting
        async with asyncio.timeout(None) as interruption:
            await self._take(client, waiting, running)
            began = time.monotonic()
            if is_batch:
                self._interruptible[interruption] = None
            try:
                yield
                took_s = time.monotonic() - began
                self._answer_s += _NEWEST * (took_s - self._answer_s) if self._answer_s else took_s
            finally:
                self._interruptible.pop(interruption, None)
                self._end(client, running)

    async def _take(
        self, client: str, waiting: dict[asyncio.Future[None], str], running: Counter[str]
    ) -> None:
        mine = asyncio.get_running_loop().create_future()
        waiting[mine] = client
        self._call_next()
        if len(self._waiting) > self._most_waiting + self._running_batches.total():
            newest_first = dict(reversed(self._waiting.items()))
            leaves = first_to_leave(newest_first)
            del self._waiting[leaves]
            leaves.set_exception(self._full())
        try:
            while not mine.done():
                await asyncio.wait({mine}, timeout=_POLL_S)
                self._call_next()
            mine.result()
        except asyncio.CancelledError:
            if waiting.pop(mine, None) is None and mine.exception() is None:
                self._end(client, running)
            raise

    def _end(self, client: str, running: Counter[str]) -> None:
        running[client] -= 1
        running += Counter()  # without those that have none
        self._call_next()

    def _call_next(self) -> None:
        batches, others = self._running_batches, self._running
        while self._waiting and others.total() + batches.total() < self._room():
            _begin_next(self._waiting, others)
        num_others = others.total() + len(self._waiting)
        most = (self._at_once() if num_others else self._room()) - num_others
        while self._waiting_batches and batches.total() < most:
            _begin_next(self._waiting_batches, batches)
        while len(self._interruptible) > max(0, most):
            self._interruptible.popitem()[0].reschedule(0)

    def _full(self) -> ApiError:
        """429: when there will be room, by how long answers take."""
        rounds = (len(self._waiting) + 1) / max(self._room(), 1)
        seconds = max(1, math.ceil(rounds * self._answer_s))
        return ApiError(
            429, f"all systems are busy, and enough requests wait; try again in {seconds} s",
            "rate_limit_error", code="queue_full", headers={"Retry-After": str(seconds)},
        )  # fmt: skip


def _begin_next(waiting: dict[asyncio.Future[None], str], running: Counter[str]) -> None:
    mine = min(waiting, key=lambda one: running[waiting[one]])
    running[waiting.pop(mine)] += 1
    mine.set_result(None)
