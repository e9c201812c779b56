"""An exchange whose services are replaced when they fail, and then asked again.

Requests change nothing that they read, so the same request goes to all services once more. What the
GPU service has lost, its KV cache, is for the caller to bring back.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from hotcold.actors.exchange.doorbell_exchange import Exchange
from hotcold.actors.exchange.recovery import RecoveryPolicy
from hotcold.actors.protocol.failures import (
    AnswerFailed,
    CacheLost,
    ServiceLost,
    cause_of,
    is_lost_device,
    is_want_of_memory,
)
from hotcold.numba_kernels.serve.mailbox import OPERATION, SharedBuffers

_GPU = 0


class Replacer(Protocol):
    """Puts a fresh process in a service's place."""

    def replace(self, service: int, cause: str) -> None:
        """Return when a fresh process serves. Errors: ServiceError when it is given up."""
        ...


class RecoveringExchange:
    """Adds recovery to another exchange; see `Exchange`."""

    def __init__(
        self, inner: Exchange, replacer: Replacer, policy: RecoveryPolicy | None = None
    ) -> None:
        """Nothing is replaced before `start`: what fails while a system loads is told at once."""
        self.inner = inner
        self._replacer = replacer
        self._policy = policy or RecoveryPolicy()
        self._is_ready = False

    @property
    def buffers(self) -> SharedBuffers:
        """The buffers of the exchange within."""
        return self.inner.buffers

    @property
    def request_state(self) -> np.ndarray:
        """See `Exchange.request_state`."""
        return self.inner.request_state

    @property
    def next_number(self) -> int:
        """See `Exchange.next_number`."""
        return self.inner.next_number

    def start(self) -> None:
        """From now on failed services are replaced."""
        self._is_ready = True

    def change(self, inner: Exchange, replacer: Replacer) -> None:
        """Ask other services from now on."""
        self.inner, self._replacer = inner, replacer

    def ask(self, services: Sequence[int]) -> int:
        """See `Exchange.ask`.

        Errors:  CacheLost when the GPU service was replaced: what was asked has not been answered;
                 AnswerFailed; ServiceError when a service is given up
        """
        return self._mended(self.inner.ask, services)

    def resume(self, services: Sequence[int]) -> int:
        """See `Exchange.resume`. Errors: those of `ask`."""
        return self._mended(self.inner.resume, services)

    def try_replace(self, service: int, cause: str) -> bool:
        """Replace a service that answers what is not finite; False where that was done lately."""
        if not (self._is_ready and self._policy.doubts(service)):
            return False
        self.renew(service, cause)
        return True

    def renew(self, service: int, cause: str) -> None:
        """Put a fresh process in a service's place. Errors: CacheLost for the GPU service."""
        operations = self.buffers.requests[:, OPERATION].copy()
        self._replacer.replace(service, cause)
        self.buffers.requests[:, OPERATION] = operations  # a fresh service was tried out
        if service == _GPU:
            raise CacheLost(f"the KV cache was lost: {cause}; start again")

    def _mended(self, ask: Callable[[Sequence[int]], int], services: Sequence[int]) -> int:
        try:
            return ask(services)
        except (ServiceLost, AnswerFailed) as error:
            if not self._is_ready:
                raise
            return self._ask_again(services, error)

    def _ask_again(self, services: Sequence[int], error: ServiceLost | AnswerFailed) -> int:
        started = time.monotonic_ns()
        while True:
            if isinstance(error, AnswerFailed):
                # What a fresh process cannot do either is the request's own fault.
                text = str(error)
                is_its_fault = is_want_of_memory(text) and self._policy.doubts(error.service)
                if not (is_lost_device(text) or is_its_fault):
                    raise error
            self.renew(error.service, cause_of(error))
            try:
                self.inner.ask(services)
                return time.monotonic_ns() - started
            except (ServiceLost, AnswerFailed) as again:
                error = again
