"""A relay: what passes requests on to the services of another host."""

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from hotcold.actors.exchange.call_exchange import ServiceRequest
from hotcold.actors.exchange.pulse import POLL_S, RELAY_POLLS, STARTING_POLLS, Pulse
from hotcold.actors.exchange.service_process import ServiceProcess
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import service_error


class Relay:
    """A relay as the driver sees it; the `Place` of its host's services."""

    is_drivers = False

    def __init__(self, host: str, handle: Any, services: Sequence[int]) -> None:
        """`host` is of --hosts, `handle` a `RelayActor` that reaches `services`."""
        self.services = tuple(services)
        self.arena_refs: Sequence[Any] = ()
        self._name = f"relay on {host}"
        self._handle = handle
        self._pulse = Pulse(self._name, handle.ping.remote)
        self._max_polls = STARTING_POLLS

    def begin(self, method: str, *arguments: Any) -> Any:
        """Start a call; returns its object ref."""
        return getattr(self._handle, method).remote(*arguments)

    def ask(self, requests: Mapping[int, ServiceRequest]) -> Any:
        """Start to answer requests, by service; returns an object ref, of `result`."""
        return self.begin("answer", requests)

    def result(self, call: Any) -> Any:
        """What a call returns.

        Errors:  those of `Exchange.request`, which name a service; ServiceError where the relay
                 died or is stuck
        """
        while not ray.wait([call], timeout=POLL_S)[0]:
            self._pulse.poll(self._max_polls)
        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            raise service_error(self._name, error) from error

    def open_arena(self, layout: ArenaLayout) -> None:
        """Give the relay an arena, to which services can then be attached."""
        self.arena_refs = self.result(self.begin("open_arena", layout))

    def ready(self) -> None:
        """All kernels are compiled: from now on silence is a fault."""
        self._max_polls = RELAY_POLLS
        self.result(self.begin("ready"))

    def end(self, service: int, process: ServiceProcess) -> bool:
        """Let the relay kill the process that it knows; True."""
        self.result(self.begin("end", service))
        return True

    def expect(self, service: int, process: ServiceProcess) -> None:
        """Tell the relay that a new process serves."""
        self.result(self.begin("expect", service, process.pid))

    def kill(self) -> None:
        """End the relay's process."""
        ray.kill(self._handle, no_restart=True)
