"""The part that does not fit on the GPU, attention of the first layers or the head, on the CPU.

It is an `AttentionService` within the service on the GPU, with the same arrays of the arena but its
own doorbells.
"""

from __future__ import annotations

import numpy as np

from hotcold.actors.attention.attention_service import AttentionService
from hotcold.actors.exchange.doorbell_exchange import ArenaExchange
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import AnswerFailed
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import (
    CELLS_A_SERVICE,
    NUM_COMPUTED,
    NUM_UP,
    OPERATION,
    STOP,
    THEN,
    SharedBuffers,
)

_JOIN_S = 10.0


class HostPart:
    """Passes a service's requests on to `inner`, which has the same index."""

    def __init__(self, inner: AttentionService) -> None:
        """`inner` holds only the layers and the head that the GPU lacks."""
        self._inner = inner

    def attach(self, layout: ArenaLayout, arena: np.ndarray, buffers: SharedBuffers) -> None:
        """Start the threads of `inner`; `buffers` are the service's."""
        self._outer = buffers
        own = buffers._replace(
            cells=np.zeros((self._inner.index + 1) * CELLS_A_SERVICE * INTS_A_CELL, np.int32),
            requests=np.zeros_like(buffers.requests),
            replies=np.zeros_like(buffers.replies),
        )
        self._inner.attach(layout, arena, own)
        self._exchange = ArenaExchange(own, self._inner)

    def prepare_prompts(self) -> None:
        """Prepare `inner` for long prompts."""
        self._inner.prepare_prompts()

    def request(self) -> None:
        """Answer the service's current request. Errors: RuntimeError, in one line."""
        index, own = self._inner.index, self._exchange.buffers
        own.requests[index] = self._outer.requests[index]
        own.requests[index, THEN] = 0  # the service rings them; here they have no bells
        try:
            self._exchange.request([index])
        except AnswerFailed as error:
            raise RuntimeError(str(error)) from error
        counts = [NUM_COMPUTED, NUM_UP]
        self._outer.replies[index, counts] = own.replies[index, counts]

    def stop(self) -> None:
        """End the threads of `inner`."""
        self._exchange.buffers.requests[self._inner.index, OPERATION] = STOP
        self._exchange.request([self._inner.index])
        self._inner.join(_JOIN_S)
