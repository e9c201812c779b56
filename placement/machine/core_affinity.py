"""Keeps a service's threads on a core each, for as long as nobody else wants those cores.

A system has more threads than the machine has cores: those of one service work while those of
another wait. Left to itself, the scheduler often wakes two threads that are to work side by side on
one core, and leaves the other one idle for a third of a millisecond. But a thread that may not move
waits for whoever else is on its core. So the keeper looks at how much its threads lose to one that
is late, and lets them go for a while when that is much (docs/lab_log.md has the figures).
"""

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hotcold.placement.machine.pinning import pin_thread

_POLL_S = 0.5  # between two looks while there is work
_MAX_DELAYED_US = 200  # in the mean of requests, and
_MAX_DELAYED = 0.35  # of their time; 0.1 to 0.25 where nobody else wants the cores
_MIN_REQUESTS = 100  # of fewer nothing is concluded
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 128.0  # for which threads are let go; doubled each time


class Delays(NamedTuple):
    """Sums over a service's requests so far, and their number; see `mailbox.finish_request`."""

    delayed_us: int
    taken_us: int
    num_requests: int


class CoreAffinity:
    """The threads of one service: on their cores while that is good for them, else anywhere."""

    def __init__(
        self, thread_cores: Sequence[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Thread t belongs on core thread_cores[t]."""
        self._thread_cores = thread_cores
        self._anywhere = sorted(os.sched_getaffinity(0))
        self._clock = clock
        self._lock = threading.Lock()
        self._thread_ids: dict[int, int] = {}
        self._seen = Delays(0, 0, 0)
        self._pause_s = _FIRST_PAUSE_S
        self._changed_s = -math.inf
        self.is_keeping = True

    def stay(self, thread: int) -> None:
        """The caller is thread number `thread`, and works in step with the others from now on."""
        with self._lock:
            self._thread_ids[thread] = threading.get_native_id()
            if self.is_keeping:
                pin_thread([self._thread_cores[thread]])

    def roam(self, thread: int) -> None:
        """The caller, thread number `thread`, may use all cores until it stays again."""
        with self._lock:
            self._thread_ids.pop(thread, None)
            pin_thread(self._anywhere)

    def watch(self, await_work: Callable[[], bool], delays: Callable[[], Delays]) -> None:
        """Look at `delays` twice a second until `await_work`, which waits for work, says False."""
        while await_work():
            time.sleep(_POLL_S)
            self.look(delays())

    def look(self, delays: Delays) -> None:
        """Decide again where threads belong."""
        with self._lock:
            delayed_us, taken_us, num_requests = (
                now - before for now, before in zip(delays, self._seen, strict=True)
            )
            if num_requests < 0:  # another arena, whose counters began again
                self._seen = delays
            if num_requests < _MIN_REQUESTS:
                return
            self._seen, now = delays, self._clock()
            if not self.is_keeping:
                if now - self._changed_s >= self._pause_s:
                    self._change(now)
            elif delayed_us > max(_MAX_DELAYED_US * num_requests, _MAX_DELAYED * taken_us):
                # Soon after the last time: whoever wants these cores is still there.
                soon = now - self._changed_s < self._pause_s
                longer = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                self._pause_s = longer if soon else _FIRST_PAUSE_S
                self._change(now)

    def _change(self, now: float) -> None:
        self.is_keeping, self._changed_s = not self.is_keeping, now
        for thread, thread_id in self._thread_ids.items():
            own = [self._thread_cores[thread]]
            pin_thread(own if self.is_keeping else self._anywhere, thread_id)
