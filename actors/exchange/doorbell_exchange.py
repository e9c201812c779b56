"""How the driver sends requests to services, and the fast way to do it: doorbells in an arena.

The driver fills the request words and the input arrays of the buffers, sends the requests, and
finds the replies in the output arrays. `call_exchange` does the same over actor calls.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hotcold.actors.protocol.failures import AnswerFailed, ServiceLost
from hotcold.numba_kernels.loops.mailbox import (
    FAILED,
    FIRST_NUMBER,
    NEXT_NUMBER,
    NO_DOORBELLS,
    NUM_DONE,
    NUMBER,
    POLL_NS,
    STATUS,
    TIMEOUT_NS,
    SharedBuffers,
    await_all,
    new_request_state,
    ring_following,
    send_requests,
    stop_layers,
)


class Exchange(ABC):
    """Sends requests to services and waits for their replies, both of which are in `buffers`.

    Compiled code may send requests itself (`send_requests`) with the exchange's `request_state`,
    unless that is NO_DOORBELLS.
    """

    buffers: SharedBuffers
    request_state: np.ndarray = NO_DOORBELLS

    @property
    def next_number(self) -> int:
        """Sequence number of the next request by doorbell; 0 where there are no doorbells."""
        return int(self.request_state[NEXT_NUMBER]) if self.request_state.size else 0

    @abstractmethod
    def request(self, services: Sequence[int]) -> int:
        """Send all `services` their request words; returns nanoseconds waited for the replies.

        When it ends, none of them works on the request any more, except those that are lost.
        Errors:  ServiceLost naming the services that died or hang, AnswerFailed naming one that
                 failed at this request and lives on
        """

    def await_replies(self, services: Sequence[int]) -> int:
        """Wait for replies to compiled code's last request; otherwise as `request`."""
        raise NotImplementedError

    def try_replace(self, service: int, cause: str) -> bool:
        """Start a new process for a service; False where that cannot help.

        Errors:  CacheLost after one with a KV cache was replaced, ServiceError where that failed
        """
        return False


class Watch(Protocol):
    """Polls the health of services while the driver waits for them."""

    def check(self, services: Sequence[int], num_polls: int) -> None:
        """Raise ServiceLost if any of `services` is dead or stuck.

        num_polls: how often this was called for the same request, 0 where it may take any time
        """
        ...

    def explain(self, service: int) -> str:
        """Why a service replied FAILED, in one line."""
        ...


class ArenaExchange(Exchange):
    """Doorbells in shared memory: all services on this host."""

    def __init__(
        self, buffers: SharedBuffers, watch: Watch, first_number: int = FIRST_NUMBER
    ) -> None:
        """`first_number` is the first request's; services start having seen none."""
        self.buffers = buffers
        self.request_state = new_request_state(first_number, POLL_NS)
        self._watch = watch

    def request(self, services: Sequence[int]) -> int:
        """Ring all, wait for all, polling their health every 100 ms. Errors: `Exchange.request`."""
        started = time.monotonic_ns()
        buffers, requested = self.buffers, np.asarray(services, np.int64)
        if not send_requests(
            self.request_state, buffers.cells, buffers.requests, buffers.replies, requested
        ):
            self.await_replies(services)
        return time.monotonic_ns() - started

    def await_replies(self, services: Sequence[int]) -> int:
        """Wait for those of `services` that have not replied. Errors: `Exchange.request`."""
        started = time.monotonic_ns()
        number, timeout_ns = self.request_state[NUMBER], self.request_state[TIMEOUT_NS]
        requested, num_done = np.asarray(services, np.int64), int(self.request_state[NUM_DONE])
        lost: list[ServiceLost] = []
        num_polls = 0
        while num_done < requested.size:
            num_polls += 1
            try:
                self._watch.check(requested[num_done:].tolist(), num_polls)
            except ServiceLost as error:
                lost.append(error)
                stop_layers(self.buffers.cells, np.asarray(services), np.int32(number))
                requested = requested[~np.isin(requested, list(error.causes))]
                # Services that it was to ring would wait for ever, and the next request with them.
                for service in error.causes:
                    request = self.buffers.requests[service]
                    ring_following(self.buffers.cells, request, np.int32(number))
            num_done = await_all(self.buffers.cells, requested, num_done, number, timeout_ns)
        if lost:
            raise ServiceLost.joined(lost)
        for service in services:
            if self.buffers.replies[service, STATUS] == FAILED:
                raise AnswerFailed(service, self._watch.explain(service))
        return time.monotonic_ns() - started
