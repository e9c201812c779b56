"""Whose request is next where the fleet has no room for all: that of the client with fewest."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from hotcold.ui.api.errors import ApiError
from hotcold.ui.fleet.policy import FairQueue

# Requests that running replicas of each deployment take, as this process's routers know; and of
# these those that need not wait there.
places: dict[str, int] = {}
at_once: dict[str, int] = {}

_POLL_S = 0.5  # between two looks for more room
_NEWEST = 0.2  # the weight of the last answer's time among those measured


class Turns:
    """Lets as many requests run as there is room for; others wait, or are refused.

    Where batches have to make room, the newest of their requests are interrupted.
    """

    def __init__(
        self, room: Callable[[], int], most_waiting: int, at_once: Callable[[], int] | None = None
    ) -> None:
        """`room`: requests that may run now; `at_once`: of these those that need not wait."""
        self._room = room
        self._at_once = at_once or room
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(most_waiting)
        self._interruptible: dict[asyncio.Timeout, None] = {}  # of batches, in order
        self._answer_s = 0.0

    @asynccontextmanager
    async def turn(self, client: str, is_batch: bool = False) -> AsyncIterator[None]:
        """Within it a client's request runs.

        Errors:  ApiError 429, where too many wait; TimeoutError where a batch's is interrupted
        """
        async with asyncio.timeout(None) as interruption:
            await self._take(client, is_batch)
            began = time.monotonic()
            if is_batch:
                self._interruptible[interruption] = None
            try:
                yield
                took_s = time.monotonic() - began
                self._answer_s += _NEWEST * (took_s - self._answer_s) if self._answer_s else took_s
            finally:
                self._interruptible.pop(interruption, None)
                self._end(client, is_batch)

    async def _take(self, client: str, is_batch: bool) -> None:
        mine = asyncio.get_running_loop().create_future()
        self._queue.join(mine, client, is_batch)
        self._call_next()
        if (leaves := self._queue.refuse()) is not None:
            leaves.set_exception(self._full())
        try:
            while not mine.done():
                await asyncio.wait({mine}, timeout=_POLL_S)
                self._call_next()
            mine.result()
        except asyncio.CancelledError:
            if not self._queue.give_up(mine, is_batch) and mine.exception() is None:
                self._end(client, is_batch)
            raise

    def _end(self, client: str, is_batch: bool) -> None:
        self._queue.end(client, is_batch)
        self._call_next()

    def _call_next(self) -> None:
        begun, most_batches = self._queue.begin(self._room(), self._at_once())
        for one in begun:
            one.set_result(None)
        while len(self._interruptible) > most_batches:
            self._interruptible.popitem()[0].reschedule(0)

    def _full(self) -> ApiError:
        """429: when there will be room, by how long answers take."""
        rounds = (self._queue.num_waiting + 1) / max(self._room(), 1)
        seconds = max(1, math.ceil(rounds * self._answer_s))
        return ApiError(
            429, f"all systems are busy, and enough requests wait; try again in {seconds} s",
            "rate_limit_error", code="queue_full", headers={"Retry-After": str(seconds)},
        )  # fmt: skip
