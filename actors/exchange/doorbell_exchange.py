"""How the driver asks services, and the fast way to do it: doorbells in a shared arena.

The driver fills the request words and the input arrays of the buffers, asks, and finds the answers
in the output arrays. `call_exchange` does the same over ordinary actor calls.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hotcold.actors.protocol.failures import AnswerFailed, ServiceLost
from hotcold.numba_kernels.serve.mailbox import (
    FAILED,
    FIRST_NUMBER,
    NEXT_NUMBER,
    NUM_DONE,
    NUMBER,
    POLL_NS,
    STATUS,
    TIMEOUT_NS,
    SharedBuffers,
    await_all,
    new_request_state,
    send_requests,
)


class Exchange(Protocol):
    """Asks services and waits for their answers."""

    @property
    def buffers(self) -> SharedBuffers:
        """What is asked and answered stands here."""
        ...

    @property
    def request_state(self) -> np.ndarray:
        """For `send_requests` of compiled code, which may ask so too; else NO_DOORBELLS."""
        ...

    @property
    def next_number(self) -> int:
        """What the doorbells of the next services asked will show; 0 where there are none."""
        ...

    def ask(self, services: Sequence[int]) -> int:
        """Ask all `services` what is in their request words; returns nanoseconds waited.

        When it ends, none of them works on the request any more, except those that are lost.
        Errors:  ServiceLost naming a service that died or hangs, AnswerFailed naming one that
                 failed at this request and goes on
        """
        ...

    def resume(self, services: Sequence[int]) -> int:
        """Go on with a question of compiled code that has not gone well; else as `ask`."""
        ...

    def try_replace(self, service: int, cause: str) -> bool:
        """Put a fresh process in a service's place; False where that is no remedy.

        Errors:  CacheLost after the GPU service was replaced, ServiceError where that failed
        """
        ...


class Watch(Protocol):
    """Looks after services while the driver waits for them."""

    def check(self, services: Sequence[int], num_polls: int) -> None:
        """Raise ServiceLost if one of `services` is dead or stuck.

        num_looks: how often this was called for the same request, or 0 where it may take for ever
        """
        ...

    def explain(self, service: int) -> str:
        """Why a service answered FAILED, in one line."""
        ...


class ArenaExchange:
    """Doorbells in shared memory: all services on this host."""

    def __init__(
        self, buffers: SharedBuffers, watch: Watch, first_number: int = FIRST_NUMBER
    ) -> None:
        """`first_number` is that of the first request; services start having seen none."""
        self.buffers = buffers
        self.request_state = new_request_state(first_number, POLL_NS)
        self._watch = watch

    @property
    def next_number(self) -> int:
        """See `Exchange.next_number`."""
        return int(self.request_state[NEXT_NUMBER])

    def ask(self, services: Sequence[int]) -> int:
        """Ring all, wait for all; looks at liveness every 100 ms. See `Exchange.ask`."""
        started = time.monotonic_ns()
        buffers, asked = self.buffers, np.asarray(services, np.int64)
        if not send_requests(self.request_state, buffers.cells, buffers.replies, asked):
            self.resume(services)
        return time.monotonic_ns() - started

    def resume(self, services: Sequence[int]) -> int:
        """See `Exchange.resume`."""
        started = time.monotonic_ns()
        cells, number, timeout_ns = (
            self.buffers.cells,
            self.request_state[NUMBER],
            self.request_state[TIMEOUT_NS],
        )
        asked, answered = np.asarray(services, np.int64), int(self.request_state[NUM_DONE])
        lost, num_polls = None, 0
        while answered < asked.size:
            num_polls += 1
            try:
                self._watch.check(asked[answered:].tolist(), num_polls)
            except ServiceLost as error:
                lost, asked = error, asked[asked != error.service]
            answered = await_all(cells, asked, answered, number, timeout_ns)
        if lost is not None:
            raise lost
        raise_failures(self.buffers, self._watch, services)
        return time.monotonic_ns() - started

    def try_replace(self, service: int, cause: str) -> bool:
        """No remedy of its own: see `actors.exchange.recovering_exchange`."""
        return False


def raise_failures(buffers: SharedBuffers, watch: Watch, services: Sequence[int]) -> None:
    """Raise AnswerFailed if one of `services` answered FAILED."""
    for service in services:
        if buffers.replies[service, STATUS] == FAILED:
            raise AnswerFailed(service, watch.explain(service))
