"""The relay of another host: takes actor calls, and sends requests through an arena there."""

import os
from collections.abc import Sequence
from typing import Any

from hotcold.actors.exchange.call_exchange import ServiceReply, ServiceRequest
from hotcold.actors.exchange.doorbell_exchange import ArenaExchange
from hotcold.actors.exchange.service_process import KillNotes, ServiceProcess
from hotcold.actors.faults.replacement import withdraw_request
from hotcold.actors.faults.watch import ActorWatch
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.ray_memory import put_arena
from hotcold.model.errors import ServiceError


class RelayActor:
    """A Ray actor on the host whose services it sends requests to."""

    def __init__(self, names: Sequence[str], handles: Sequence[Any]) -> None:
        """`names[s]` and `handles[s]` are those of service s, on this host or not."""
        self._watch = ActorWatch(names, handles)
        self._exchange: ArenaExchange | None = None
        self._processes: dict[int, ServiceProcess] = {}

    def open_arena(self, layout: ArenaLayout) -> list[Any]:
        """Put an arena into this host's object store; its ref in a list, so that it stays a ref."""
        self._arena_ref, arena = put_arena(layout.new_arena())
        self._exchange = ArenaExchange(layout.buffers(arena), self._watch)
        return [self._arena_ref]

    def answer(self, requests: dict[int, ServiceRequest]) -> dict[int, ServiceReply]:
        """Send requests, by service index; return the replies. Errors: as `Exchange.request`."""
        exchange = self._require_exchange()
        buffers = exchange.buffers
        for service, request in requests.items():
            request.write(buffers, service)
        exchange.request(list(requests))
        return {service: ServiceReply.read(buffers, service) for service in requests}

    def expect(self, service: int, pid: int) -> None:
        """The service now runs in process `pid` of this host, which has had no request yet."""
        self._processes[service] = KillNotes.take(ServiceProcess(pid, is_local=True))
        self._watch.expect(service, self._processes[service])
        withdraw_request(self._require_exchange().buffers, service)

    def end(self, service: int) -> None:
        """Kill the service's process, stopped or not, and wait for its end."""
        self._processes[service].kill()

    def ready(self) -> None:
        """All kernels are compiled: from now on a timeout is a failure."""
        self._watch.has_started = True

    def ping(self) -> int:
        """The process id."""
        return os.getpid()

    def _require_exchange(self) -> ArenaExchange:
        if self._exchange is None:
            raise ServiceError("a relay got a request before it had an arena")
        return self._exchange
