"""What a GPU has no room for: attention of the first layers, or the head, on the host's CPU.

It is the GPU service on device="cpu" within the one on a GPU: the same arrays of the arena, but
doorbells of its own.
"""

from __future__ import annotations

import numpy as np

from hotcold.actors.attention.attention_service import AttentionService
from hotcold.actors.exchange.doorbell_exchange import ArenaExchange
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import AnswerFailed
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL
from hotcold.numba_kernels.serve.mailbox import (
    CELLS_A_SERVICE,
    NUM_COMPUTED,
    NUM_UP,
    OPERATION,
    STOP,
    SharedBuffers,
)

_JOIN_S = 10.0


class HostPart:
    """Passes requests of a service on to `inner`, whose index is the service's."""

    def __init__(self, inner: AttentionService) -> None:
        """`inner` holds only the layers and the head that it is asked for."""
        self._inner = inner

    def attach(self, layout: ArenaLayout, arena: np.ndarray, buffers: SharedBuffers) -> None:
        """Start its threads; `buffers` are the service's."""
        self._outer = buffers
        own = buffers._replace(
            cells=np.zeros((self._inner.index + 1) * CELLS_A_SERVICE * INTS_A_CELL, np.int32),
            requests=np.zeros_like(buffers.requests),
            replies=np.zeros_like(buffers.replies),
        )
        self._inner.attach(layout, arena, own)
        self._exchange = ArenaExchange(own, self._inner)

    def prepare_prompts(self) -> None:
        """See `Service.prepare_prompts`."""
        self._inner.prepare_prompts()

    def ask(self) -> None:
        """Answer the service's request. Errors: RuntimeError with what went wrong, in one line."""
        index, own = self._inner.index, self._exchange.buffers
        own.requests[index] = self._outer.requests[index]
        try:
            self._exchange.ask([index])
        except AnswerFailed as error:
            raise RuntimeError(str(error)) from error
        counts = [NUM_COMPUTED, NUM_UP]
        self._outer.replies[index, counts] = own.replies[index, counts]

    def stop(self) -> None:
        """End its threads."""
        self._exchange.buffers.requests[self._inner.index, OPERATION] = STOP
        self._exchange.ask([self._inner.index])
        self._inner.join(_JOIN_S)
