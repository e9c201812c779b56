"""The exchange over several hosts.

The driver sends requests to the services of its own host through their shared arena. A request to
another host is one actor call to its relay, however many services there are: what all of them read
travels once. Each partial output travels back on its own, so all are added in the services' order.
"""

import time
from collections.abc import Sequence
from typing import Any

import ray

from hotcold.actors.exchange.call_exchange import ServiceReply, ServiceRequest
from hotcold.actors.exchange.doorbell_exchange import ArenaExchange, Exchange
from hotcold.actors.exchange.pulse import POLL_S, RELAY_POLLS, STARTING_POLLS, Pulse
from hotcold.actors.exchange.service_process import ServiceProcess
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import RequestError, ServiceLost, service_error

_SHARED_INPUT = "ffn_input"  # what every service of a request reads


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


class HostsExchange(Exchange):
    """This host's services through the arena, the others through their relays."""

    def __init__(self, local: ArenaExchange, relays: Sequence[Relay]) -> None:
        """`local` reaches every service that has no relay; its buffers are the driver's."""
        self.buffers = local.buffers
        self._local = local
        self._relays = relays
        self._remote = {service for relay in relays for service in relay.services}

    @property
    def next_number(self) -> int:
        """Sequence number of the next request by this host's doorbells."""
        return self._local.next_number

    def request(self, services: Sequence[int]) -> int:
        """Send to all hosts at once.

        Errors:  `Exchange.request`; ServiceError too where a relay, which is not replaced, died or
                 is stuck
        """
        started = time.monotonic_ns()
        if self._remote.isdisjoint(services):
            return self._local.request(services)
        calls = self._call(services)
        own = [service for service in services if service not in self._remote]
        failure: RequestError | None = None  # raised once no service works on it
        lost: list[ServiceLost] = []
        try:
            if own:
                self._local.request(own)
        except RequestError as error:
            failure = error
        except ServiceLost as error:
            lost.append(error)
        for relay, call in calls:
            try:
                replies: dict[int, ServiceReply] = relay.result(call)
            except RequestError as error:
                failure = failure or error
            except ServiceLost as error:
                lost.append(error)
            else:
                for service, reply in replies.items():
                    reply.write(self.buffers, service)
        if lost:
            raise ServiceLost.joined(lost)
        if failure is not None:
            raise failure
        return time.monotonic_ns() - started

    def _call(self, services: Sequence[int]) -> list[tuple[Relay, Any]]:
        """Start the calls, each beside its relay."""
        calls = []
        for relay in self._relays:
            reached = [service for service in relay.services if service in services]
            requests = {service: ServiceRequest.read(self.buffers, service) for service in reached}
            for service in reached[1:]:
                requests[service].inputs.pop(_SHARED_INPUT, None)
            if requests:
                calls.append((relay, relay.begin("answer", requests)))
        return calls
