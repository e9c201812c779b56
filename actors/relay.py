"""CPU services on other hosts: a relay on each, asked by actor calls, fans out over an arena there.

The driver asks the services of its own host through the arena that it shares with them. A question
to another host is one actor call, whatever the number of services there: what they all read travels
once, and each partial output comes back by itself, to be added in the services' order as always.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from actors.arena import ArenaLayout
from actors.call_exchange import Answer, Question
from actors.exchange import ArenaExchange
from actors.failures import RequestError, service_error
from actors.watch import LOOK_S, ActorWatch
from model.errors import ServiceError
from numba_kernels.mailbox import Wires

_OF_ALL = "ffn_input"  # what every service of a request reads


class RelayHost:
    """The relay's process; a Ray actor on the host whose services it asks."""

    def __init__(self, names: Sequence[str], handles: Sequence[Any]) -> None:
        """`names[s]` and `handles[s]` are of service s, on this host or not."""
        self._watch = ActorWatch(names, handles)
        self._exchange: ArenaExchange | None = None

    def open_arena(self, layout: ArenaLayout) -> list[Any]:
        """Put an arena into this host's object store; its ref in a list, so that it stays a ref."""
        self._arena_ref = ray.put(layout.new_arena())
        wires = layout.wires(ray.get(self._arena_ref))
        self._exchange = ArenaExchange(wires, self._watch)
        return [self._arena_ref]

    def answer(self, questions: dict[int, Question]) -> dict[int, Answer]:
        """Ask the services that have a question, by their numbers. Errors: as of `Exchange.ask`."""
        if self._exchange is None:
            raise ServiceError("a relay was asked before it had an arena")
        wires = self._exchange.wires
        for service, question in questions.items():
            question.write(wires, service)
        self._exchange.ask(list(questions))
        return {service: Answer.read(wires, service) for service in questions}

    def ready(self) -> None:
        """The services have compiled their kernels: from now on silence is a fault."""
        self._watch.starting = False

    def ping(self) -> int:
        """The process id; an answer says that the process lives."""
        return os.getpid()


@dataclass(frozen=True)
class Relay:
    """What the driver knows of a relay: its host's address, its actor, the services it asks."""

    host: str
    handle: Any
    services: tuple[int, ...]


class HostsExchange:
    """The own host's services through the arena, the others' through their relays."""

    def __init__(self, local: ArenaExchange, relays: Sequence[Relay]) -> None:
        """`local` reaches every service that has no relay; its wires are the driver's."""
        self.wires: Wires = local.wires
        self._local = local
        self._relays = relays
        names = [f"relay on {relay.host}" for relay in relays]
        self._watch = ActorWatch(names, [relay.handle for relay in relays])
        self._remote = {service for relay in relays for service in relay.services}

    @property
    def next_number(self) -> int:
        """See `Exchange.next_number`; of the own host's doorbells."""
        return self._local.next_number

    def replace(self, service: int, cause: str) -> bool:
        """See `Exchange.replace`: nothing is replaced where there are several hosts."""
        return False

    def ask(self, services: Sequence[int]) -> int:
        """Ask all hosts at once. See `Exchange.ask`."""
        started = time.monotonic_ns()
        if self._remote.isdisjoint(services):
            return self._local.ask(services)
        calls = self._call(services)
        failure: RequestError | None = None
        own = [service for service in services if service not in self._remote]
        try:
            if own:
                self._local.ask(own)
        except RequestError as error:  # told when no service works on the request any more
            failure = error
        for index, call in calls.items():
            try:
                self._collect(index, call, started)
            except RequestError as error:
                failure = error
        if failure is not None:
            raise failure
        return time.monotonic_ns() - started

    def ready(self) -> None:
        """All kernels are compiled: from now on silence is a fault."""
        self._watch.starting = False
        for relay in self._relays:
            relay.handle.ready.remote()

    def _call(self, services: Sequence[int]) -> dict[int, Any]:
        """Start the calls; object refs by the relays' indices."""
        calls = {}
        for index, relay in enumerate(self._relays):
            asked = [service for service in relay.services if service in services]
            questions = {service: Question.read(self.wires, service) for service in asked}
            for service in asked[1:]:
                questions[service].inputs.pop(_OF_ALL, None)
            if asked:
                calls[index] = relay.handle.answer.remote(questions)
        return calls

    def _collect(self, index: int, call: Any, started_ns: int) -> None:
        while not ray.wait([call], timeout=LOOK_S)[0]:
            self._watch.check([index], (time.monotonic_ns() - started_ns) * 1e-9)
        try:
            answers: dict[int, Answer] = ray.get(call)
        except ray.exceptions.RayError as error:
            raise service_error(f"relay on {self._relays[index].host}", error) from error
        for service, answer in answers.items():
            answer.write(self.wires, service)
