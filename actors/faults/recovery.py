"""An exchange whose services are replaced when they fail, and are then sent the request again.

Requests change nothing that they read, so the same request goes to all services once more. What the
attention service has lost, its KV cache, is for the caller to recompute.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hotcold.actors.exchange.doorbell_exchange import Exchange
from hotcold.actors.protocol.failures import (
    AnswerFailed,
    CacheLost,
    ServiceLost,
    is_killed_for_memory,
    is_lost_device,
    is_out_of_memory,
)
from hotcold.actors.protocol.topology import Topology
from hotcold.model.errors import ServiceError
from hotcold.numba_kernels.loops.mailbox import OPERATION, WEIGHTS

MAX_FAILURES = 10
MAX_DEVICE_FAILURES = 3  # of a GPU: what was asked of it was replayed twice then
WINDOW_S = 60.0

# Returns when new processes serve in the places of services, each of which failed for some cause.
# Errors: ServiceError where it gives up
Replace = Callable[[Mapping[int, str]], None]


class RecoveryPolicy:
    """How often a service is replaced, and when to give up; counts all services together.

    Its clock stands still while a service is being replaced, which takes minutes where weights are
    large. Otherwise the same failure would come "later" each time, for ever.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._replacing_s = 0.0  # what replacements have taken
        self._replacing_since: float | None = None
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)
        self._device_failures: deque[float] = deque(maxlen=MAX_DEVICE_FAILURES)
        self._num_in_a_row = 0
        self._blamed_s: dict[int, float] = {}
        self._is_out_of_memory = False  # the failure under repair was for lack of memory
        self._repaired_s = -math.inf  # when the last of those was repaired

    def count(self, causes: Mapping[str, str]) -> None:
        """Count a failure: of services, by name, that failed together and must be replaced.

        Errors:  ServiceError at the tenth failure within a minute, of a GPU at the third; at the
                 tenth replacement in a row that failed itself, however long each took; and where
                 a process is killed for lack of memory within a minute of the replacement of one
                 killed for the same
        """
        now = self._now()
        self._replacing_since = now + self._replacing_s
        name, cause = next(iter(causes.items()))
        if killed := next(filter(is_killed_for_memory, causes.values()), None):
            if self._is_out_of_memory or now - self._repaired_s <= WINDOW_S:
                raise ServiceError(
                    f"{killed}, again within a minute; free memory, or start again with a smaller "
                    "model, --dtype or --context"
                )
            self._is_out_of_memory = True
        if failed := next(filter(is_lost_device, causes.values()), None):
            self._device_failures.append(now)
            if _within_window(self._device_failures):
                raise ServiceError(
                    f"{failed}, {MAX_DEVICE_FAILURES} times in a minute; start again, or with "
                    "--device cpu"
                )
        self._failures.append(now)
        self._num_in_a_row += 1
        in_a_row = self._num_in_a_row >= MAX_FAILURES
        in_a_minute = _within_window(self._failures)
        if in_a_row or in_a_minute:
            when = "in a row" if in_a_row else "in a minute"
            raise ServiceError(
                f"{MAX_FAILURES} failures {when}, the last one of the {name} service: {cause}; "
                "start again"
            )

    def recovered(self) -> None:
        """A failed service was replaced by one that answers."""
        if self._replacing_since is not None:
            self._replacing_s += self._clock() - self._replacing_since
            self._replacing_since = None
        self._num_in_a_row = 0
        if self._is_out_of_memory:
            self._is_out_of_memory, self._repaired_s = False, self._now()

    def blames(self, service: int) -> bool:
        """Whether the process of `service` is to blame for a failed request or a NaN.

        A process is blamed once a minute. When a new one replies the same, the weights or the
        prompt are the cause, and replacing it again would only keep other requests waiting.
        """
        now = self._now()
        last = self._blamed_s.get(service)
        if last is not None and now - last <= WINDOW_S:
            return False
        self._blamed_s[service] = now
        return True

    def _now(self) -> float:
        """Seconds without those of replacements."""
        now = self._clock() if self._replacing_since is None else self._replacing_since
        return now - self._replacing_s


def _within_window(times: deque[float]) -> bool:
    """Whether as many as are kept lie within WINDOW_S."""
    return len(times) == times.maxlen and times[-1] - times[0] <= WINDOW_S


class RecoveringExchange(Exchange):
    """Adds recovery to another exchange."""

    def __init__(
        self,
        inner: Exchange,
        replace: Replace,
        topology: Topology,
        policy: RecoveryPolicy | None = None,
    ) -> None:
        """Nothing is replaced before `start`: a failure while a system loads is raised at once."""
        self.change(inner, replace, topology)
        self._policy = policy or RecoveryPolicy()
        self._is_ready = False

    @property
    def next_number(self) -> int:
        """Sequence number of the inner exchange's next request by doorbell."""
        return self.inner.next_number

    def start(self) -> None:
        """From now on failed services are replaced."""
        self._is_ready = True

    def change(self, inner: Exchange, replace: Replace, topology: Topology) -> None:
        """Use other services from now on."""
        self.inner, self._replace, self._topology = inner, replace, topology
        self.buffers, self.request_state = inner.buffers, inner.request_state

    def request(self, services: Sequence[int]) -> int:
        """Send requests, again where a service had to be replaced.

        Errors:  CacheLost when a service with a KV cache was replaced: the request has no reply;
                 AnswerFailed; ServiceError when a service is given up
        """
        return self._recovering(self.inner.request, services)

    def await_replies(self, services: Sequence[int]) -> int:
        """Wait for replies to compiled code's last request. Errors: `request`."""
        return self._recovering(self.inner.await_replies, services)

    def try_replace(self, service: int, cause: str) -> bool:
        """Replace a service that replied NaN; False where that was done within a minute."""
        if not (self._is_ready and self._policy.blames(service)):
            return False
        self.renew({service: cause})
        return True

    def renew(self, causes: Mapping[int, str]) -> None:
        """Start new processes for services. Errors: CacheLost for one with a KV cache."""
        pinged = np.s_[:, [OPERATION, WEIGHTS]]  # the words of `Service.try_out`
        words = self.buffers.requests[pinged].copy()
        self._replace(causes)
        self.buffers.requests[pinged] = words
        for service in self._topology.cache_services:
            if service in causes:
                raise CacheLost(f"the KV cache was lost: {causes[service]}; start again")

    def _recovering(self, request: Callable[[Sequence[int]], int], services: Sequence[int]) -> int:
        started = time.monotonic_ns()
        while True:
            try:
                request(services)
                return time.monotonic_ns() - started
            except (ServiceLost, AnswerFailed) as error:
                if not (self._is_ready and self._may_help(error)):
                    raise
                self.renew(error.causes)
            request = self.inner.request

    def _may_help(self, error: ServiceLost | AnswerFailed) -> bool:
        """Whether a new process may do what this one could not."""
        if isinstance(error, ServiceLost) or is_lost_device(error.text):
            return True
        return is_out_of_memory(error.text) and self._policy.blames(error.service)
