"""Where a service answers: who can end its process there, and which arena a fresh one gets."""

from collections.abc import Sequence
from typing import Any, Protocol

from hotcold.actors.exchange.service_process import ServiceProcess
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL
from hotcold.numba_kernels.serve.mailbox import DONE, REQUEST, SharedBuffers, cell


class Place(Protocol):
    """The arena that services are attached to, and whoever asks them through it."""

    @property
    def arena_refs(self) -> Sequence[Any]:
        """The arena's ref, for `ServiceActor.attach`; none where each service has its own."""
        ...

    @property
    def is_drivers(self) -> bool:
        """Whether the driver sees that arena."""
        ...

    def end(self, service: int, process: ServiceProcess) -> bool:
        """End a service's process and wait; False where Ray alone can. Errors: ServiceError."""
        ...

    def expect(self, service: int, process: ServiceProcess) -> None:
        """A fresh process serves from now on: nothing has been asked of it. Errors: ServiceError"""
        ...


class OwnPlace:
    """The driver's own arena, or none: services that it asks itself."""

    is_drivers = True

    def __init__(self, arena_refs: Sequence[Any], buffers: SharedBuffers | None) -> None:
        """`buffers` are those of the arena."""
        self.arena_refs = arena_refs
        self._buffers = buffers

    def end(self, service: int, process: ServiceProcess) -> bool:
        """See `Place.end`."""
        process.kill()
        return process.is_local

    def expect(self, service: int, process: ServiceProcess) -> None:
        """See `Place.expect`."""
        if self._buffers is not None:
            withdraw_request(self._buffers, service)


def withdraw_request(buffers: SharedBuffers, service: int) -> None:
    """Let a service that will be attached to these buffers find them as new, with nothing asked.

    The answer of another process before it, under the same number, would pass for its own.
    """
    for kind in (REQUEST, DONE):
        buffers.cells[cell(service, kind) * INTS_A_CELL] = 0
