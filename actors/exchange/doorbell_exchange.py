"""How the driver asks services, and the fast way to do it: doorbells in a shared arena.

The driver fills the request words and the input arrays of the wires, asks, and finds the answers in
the output arrays. `call_exchange` does the same over ordinary actor calls.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from actors.protocol.failures import AnswerFailed, ServiceLost
from numba_kernels.serve.mailbox import FAILED, LOOK_NS, OK, STATUS, Wires, ask_all, await_all

# Numbers of requests: the doorbells are 32-bit words. A fresh service is tried out with a number
# that it alone uses, so that its answer is not taken for another's, nor another's for its own.
OWN_NUMBER, _FIRST_NUMBER, _LAST_NUMBER = 1, 2, 2**31 - 1  # after the last comes the first


class Exchange(Protocol):
    """Asks services and waits for their answers."""

    @property
    def wires(self) -> Wires:
        """What is asked and answered stands here."""
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

    def try_replace(self, service: int, cause: str) -> bool:
        """Put a fresh process in a service's place; False where that is no remedy.

        Errors:  CacheLost after the GPU service was replaced, ServiceError where that failed
        """
        ...


class Watch(Protocol):
    """Looks after services while the driver waits for them."""

    def check(self, services: Sequence[int], num_looks: int) -> None:
        """Raise ServiceLost if one of `services` is dead or stuck.

        num_looks: how often this was called for the same request, or 0 where it may take for ever
        """
        ...

    def explain(self, service: int) -> str:
        """Why a service answered FAILED, in one line."""
        ...


class ArenaExchange:
    """Doorbells in shared memory: all services on this host."""

    def __init__(self, wires: Wires, watch: Watch, first_number: int = _FIRST_NUMBER) -> None:
        """`first_number` is that of the first request; services start having seen none."""
        self.wires = wires
        self._watch = watch
        self._number = first_number

    @property
    def next_number(self) -> int:
        """See `Exchange.next_number`."""
        return self._number

    def ask(self, services: Sequence[int]) -> int:
        """Ring all, wait for all; looks at liveness every 100 ms. See `Exchange.ask`."""
        started = time.monotonic_ns()
        wires, number = self.wires, self._number
        self._number = number + 1 if number < _LAST_NUMBER else _FIRST_NUMBER
        asked = np.asarray(services, np.int64)
        wires.replies[asked, STATUS] = OK
        answered, lost, num_looks = ask_all(wires.cells, asked, number, LOOK_NS), None, 0
        while answered < asked.size:
            num_looks += 1
            try:
                self._watch.check(asked[answered:].tolist(), num_looks)
            except ServiceLost as error:
                lost, asked = error, asked[asked != error.service]
            answered = await_all(wires.cells, asked, answered, number, LOOK_NS)
        if lost is not None:
            raise lost
        raise_failures(wires, self._watch, services)
        return time.monotonic_ns() - started

    def try_replace(self, service: int, cause: str) -> bool:
        """No remedy of its own: see `actors.exchange.recovering_exchange`."""
        return False


def raise_failures(wires: Wires, watch: Watch, services: Sequence[int]) -> None:
    """Raise AnswerFailed if one of `services` answered FAILED."""
    for service in services:
        if wires.replies[service, STATUS] == FAILED:
            raise AnswerFailed(service, watch.explain(service))
