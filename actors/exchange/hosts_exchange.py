"""The exchange over several hosts.

The driver asks the services of its own host through the arena that it shares with them. A question
to another host is one actor call to its relay, whatever the number of services there: what they all
read travels once, and each partial output comes back by itself, to be added in the services' order
as always.
"""

import time
from collections.abc import Sequence
from typing import Any

import ray

from hotcold.actors.exchange.call_exchange import ServiceReply, ServiceRequest
from hotcold.actors.exchange.doorbell_exchange import ArenaExchange
from hotcold.actors.exchange.service_process import ServiceProcess
from hotcold.actors.exchange.watch import POLL_S, RELAY_POLLS, STARTING_POLLS, Pulse
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import RequestError, ServiceLost, service_error
from hotcold.numba_kernels.serve.mailbox import NO_DOORBELLS, SharedBuffers

_OF_ALL = "ffn_input"  # what every service of a request reads


class Relay:
    """A relay as the driver sees it; the `Place` of its host's services."""

    is_drivers = False

    def __init__(self, host: str, handle: Any, services: Sequence[int]) -> None:
        """`host` is an address, `handle` a `RelayActor` that asks `services`."""
        self.services = tuple(services)
        self.arena_refs: Sequence[Any] = ()
        self._name = f"relay on {host}"
        self._handle = handle
        self._pulse = Pulse(self._name, handle.ping.remote)
        self._polls = STARTING_POLLS

    def begin(self, method: str, *arguments: Any) -> Any:
        """Start a call; returns its object ref."""
        return getattr(self._handle, method).remote(*arguments)

    def result(self, call: Any) -> Any:
        """What a call returns.

        Errors:  those of `Exchange.ask`, which name a service; ServiceError where the relay died
                 or is stuck
        """
        while not ray.wait([call], timeout=POLL_S)[0]:
            self._pulse.look(self._polls)
        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            raise service_error(self._name, error) from error

    def open_arena(self, layout: ArenaLayout) -> None:
        """Give the relay an arena, to which services can be attached then."""
        self.arena_refs = self.result(self.begin("open_arena", layout))

    def ready(self) -> None:
        """All kernels are compiled: from now on silence is a fault."""
        self._polls = RELAY_POLLS
        self.result(self.begin("ready"))

    def end(self, service: int, process: ServiceProcess) -> bool:
        """See `Place.end`: the relay ends the process that it knows."""
        self.result(self.begin("end", service))
        return True

    def expect(self, service: int, process: ServiceProcess) -> None:
        """See `Place.expect`."""
        self.result(self.begin("expect", service, process.pid))

    def kill(self) -> None:
        """End the relay's process."""
        ray.kill(self._handle, no_restart=True)


class HostsExchange:
    """The own host's services through the arena, the others' through their relays."""

    def __init__(self, local: ArenaExchange, relays: Sequence[Relay]) -> None:
        """`local` reaches every service that has no relay; its buffers are the driver's."""
        self.buffers: SharedBuffers = local.buffers
        self._local = local
        self._relays = relays
        self.request_state = NO_DOORBELLS  # of all services
        self._remote = {service for relay in relays for service in relay.services}

    @property
    def next_number(self) -> int:
        """See `Exchange.next_number`; of the own host's doorbells."""
        return self._local.next_number

    def resume(self, services: Sequence[int]) -> int:
        """See `Exchange.resume`; compiled code rings no doorbell here."""
        return self._local.resume(services)

    def try_replace(self, service: int, cause: str) -> bool:
        """No remedy of its own: see `actors.exchange.recovering_exchange`."""
        return False

    def ask(self, services: Sequence[int]) -> int:
        """Ask all hosts at once. See `Exchange.ask`.

        Errors:  ServiceError too where a relay died or is stuck: it is not replaced
        """
        started = time.monotonic_ns()
        if self._remote.isdisjoint(services):
            return self._local.ask(services)
        calls = self._call(services)
        own = [service for service in services if service not in self._remote]
        failure: RequestError | ServiceLost | None = None  # told when nobody works on it any more
        try:
            if own:
                self._local.ask(own)
        except (RequestError, ServiceLost) as error:
            failure = error
        for relay, call in calls:
            try:
                answers: dict[int, ServiceReply] = relay.result(call)
            except RequestError as error:
                failure = failure or error
            except ServiceLost as error:
                failure = error
            else:
                for service, answer in answers.items():
                    answer.write(self.buffers, service)
        if failure is not None:
            raise failure
        return time.monotonic_ns() - started

    def _call(self, services: Sequence[int]) -> list[tuple[Relay, Any]]:
        """Start the calls; each with the relay that is asked."""
        calls = []
        for relay in self._relays:
            asked = [service for service in relay.services if service in services]
            questions = {service: ServiceRequest.read(self.buffers, service) for service in asked}
            for service in asked[1:]:
                questions[service].inputs.pop(_OF_ALL, None)
            if asked:
                calls.append((relay, relay.begin("answer", questions)))
        return calls
