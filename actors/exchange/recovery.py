"""What to do about services that fail: how often one is replaced, and when it is enough."""

import math
import time
from collections import deque
from collections.abc import Callable

from hotcold.actors.protocol.failures import is_killed_for_memory
from hotcold.model.errors import ServiceError

MAX_FAILURES = 10
WINDOW_S = 60.0


class RecoveryPolicy:
    """Counts failures of all services together.

    Its time is that in which services serve: while one is being replaced, which takes minutes where
    weights are large, none passes. Else the same failure would come "later" each time, for ever.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._mended_s = 0.0  # what replacements have taken
        self._mending_since: float | None = None
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)
        self._num_in_a_row = 0
        self._distrusted_s: dict[int, float] = {}
        self._is_starved = False  # the failure that is being mended was for want of memory
        self._fed_s = -math.inf  # when the last of those was mended

    def count(self, name: str, cause: str) -> None:
        """A service failed and must be replaced.

        Errors:  ServiceError at the tenth failure within a minute, or the tenth replacement in a
                 row that failed itself, however long each took; or where a process was killed for
                 want of memory and soon after it had been replaced one was killed so again
        """
        now = self._now()
        self._mending_since = now + self._mended_s
        if is_killed_for_memory(cause):
            if self._is_starved or now - self._fed_s <= WINDOW_S:
                raise ServiceError(
                    f"{cause}, again within a minute; free memory, or start again with a smaller "
                    "model, --dtype or --context"
                )
            self._is_starved = True
        self._failures.append(now)
        self._num_in_a_row += 1
        in_a_row = self._num_in_a_row >= MAX_FAILURES
        in_a_minute = len(self._failures) == MAX_FAILURES and now - self._failures[0] <= WINDOW_S
        if in_a_row or in_a_minute:
            when = "in a row" if in_a_row else "in a minute"
            raise ServiceError(
                f"{MAX_FAILURES} failures {when}, the last one of the {name} service: {cause}; "
                "start again"
            )

    def recovered(self) -> None:
        """A failed service was replaced by one that answers."""
        if self._mending_since is not None:
            self._mended_s += self._clock() - self._mending_since
            self._mending_since = None
        self._num_in_a_row = 0
        if self._is_starved:
            self._is_starved, self._fed_s = False, self._now()

    def doubts(self, service: int) -> bool:
        """Whether the process of `service` is to blame for what it cannot do, or for a NaN.

        A process is blamed once a minute. When a fresh one answers the same, the weights or the
        prompt are the cause, and replacing it again would only keep the others waiting.
        """
        now = self._now()
        last = self._distrusted_s.get(service)
        if last is not None and now - last <= WINDOW_S:
            return False
        self._distrusted_s[service] = now
        return True

    def _now(self) -> float:
        """Seconds without those of replacements."""
        now = self._clock() if self._mending_since is None else self._mending_since
        return now - self._mended_s
