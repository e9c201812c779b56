"""Pins each thread of a service to a core, as long as no other program wants those cores.

A system has more threads than the machine has cores: those of one service work while those of
another wait. Unpinned, two threads that should run in parallel often wake on one core, and another
core stays idle for a third of a millisecond. But a pinned thread waits for any other program on its
core, and the others for it. So the time that threads lose to the latest one is measured. When it is
long they are unpinned for a while, and one of them is left out: the others find the cores that are
free, and nobody waits for a thread that shares its core (figures in docs/decisions.md).
"""

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hotcold.placement.machine.pinning import pin_thread

_POLL_S = 0.5  # while there is work
_MAX_DELAYED_US = 200  # in the mean of requests, and
_MAX_DELAYED = 0.35  # of their time; 0.1 to 0.25 where nobody else wants the cores
_MIN_REQUESTS = 100  # for a decision
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 128.0  # for which threads are unpinned; doubles each time


class Delays(NamedTuple):
    """Totals over a service's requests so far; see `mailbox.finish_request`."""

    delayed_us: int
    taken_us: int
    num_requests: int


class CoreAffinity:
    """Core affinity of one service's threads: a core each while that pays, else all cores."""

    def __init__(
        self, thread_cores: Sequence[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Thread t is pinned to core thread_cores[t]."""
        self._thread_cores = thread_cores
        self._all_cores = sorted(os.sched_getaffinity(0))
        self._clock = clock
        self._lock = threading.Lock()
        self._thread_ids: dict[int, int] = {}
        self._seen = Delays(0, 0, 0)
        self._pause_s = _FIRST_PAUSE_S
        self._changed_s = -math.inf
        self.is_pinned = True
        self.leave_out: Callable[[int], None] = lambda count: None  # so many threads, from now on

    def pin(self, thread: int) -> None:
        """Pin the calling thread, number `thread`, while it serves in step with the others."""
        with self._lock:
            self._thread_ids[thread] = threading.get_native_id()
            if self.is_pinned:
                pin_thread([self._thread_cores[thread]])

    def unpin(self, thread: int) -> None:
        """Let the calling thread, number `thread`, use all cores again."""
        with self._lock:
            self._thread_ids.pop(thread, None)
            pin_thread(self._all_cores)

    def watch(self, await_work: Callable[[], bool], delays: Callable[[], Delays]) -> None:
        """Poll `delays` twice a second until `await_work`, which waits for work, returns False."""
        while await_work():
            time.sleep(_POLL_S)
            self.poll(delays())

    def poll(self, delays: Delays) -> None:
        """Decide anew whether threads are pinned."""
        with self._lock:
            delayed_us, taken_us, num_requests = (
                now - before for now, before in zip(delays, self._seen, strict=True)
            )
            if num_requests < 0:  # another arena, with new counters
                self._seen = delays
            if num_requests < _MIN_REQUESTS:
                return
            self._seen, now = delays, self._clock()
            if not self.is_pinned:
                if now - self._changed_s >= self._pause_s:
                    self._change(now)
            elif delayed_us > max(_MAX_DELAYED_US * num_requests, _MAX_DELAYED * taken_us):
                # Soon after the last time: the other program is still there.
                soon = now - self._changed_s < self._pause_s
                longer = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                self._pause_s = longer if soon else _FIRST_PAUSE_S
                self._change(now)

    def _change(self, now: float) -> None:
        self.is_pinned, self._changed_s = not self.is_pinned, now
        self.leave_out(0 if self.is_pinned else 1)
        for thread, thread_id in self._thread_ids.items():
            own = [self._thread_cores[thread]]
            pin_thread(own if self.is_pinned else self._all_cores, thread_id)
