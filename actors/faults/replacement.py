"""A new process in a service's place: Ray restarts it, the driver loads and connects it."""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from hotcold.actors.exchange.pulse import POLL_S
from hotcold.actors.exchange.relay import Relay
from hotcold.actors.exchange.service_process import KillNotes, ServiceProcess
from hotcold.actors.faults.recovery import RecoveryPolicy
from hotcold.actors.faults.watch import ActorWatch
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.actors.protocol.failures import ServiceLost, service_error
from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.model.errors import ServiceError
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL
from hotcold.numba_kernels.loops.mailbox import DONE, REQUEST, SharedBuffers, cell_index

# Unanswered polls at which a process that starts, loads or compiles counts as stuck.
_TIMEOUT_POLLS = 100
_NEW_PROCESS_S = 120.0


class OwnPlace:
    """The driver's own arena, or none: services that the driver sends requests to itself.

    arena_refs: for `ServiceActor.attach`; () where each service has an arena of its own
    is_drivers: whether the driver sees the arena
    """

    is_drivers = True

    def __init__(self, arena_refs: Sequence[Any], buffers: SharedBuffers | None) -> None:
        """`buffers` are those of the arena."""
        self.arena_refs = arena_refs
        self._buffers = buffers

    def end(self, service: int, process: ServiceProcess) -> bool:
        """Kill the process, if it is on this host; returns whether it is."""
        process.kill()
        return process.is_local

    def expect(self, service: int, process: ServiceProcess) -> None:
        """Withdraw the old process's request."""
        if self._buffers is not None:
            withdraw_request(self._buffers, service)


def withdraw_request(buffers: SharedBuffers, service: int) -> None:
    """Make the service's doorbells look new to the next process that is attached to them.

    Otherwise a reply of the process before it, with the same number, would pass for its own.
    """
    for kind in (REQUEST, DONE):
        buffers.cells[cell_index(service, kind) * INTS_A_CELL] = 0


# Where a service runs: which arena a new process is attached to, and who can kill the old one.
Place = OwnPlace | Relay


class ServiceReplacer:
    """Knows how to load and connect each service again."""

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        handles: Sequence[Any],
        watch: ActorWatch,
        policy: RecoveryPolicy,
    ) -> None:
        """`handles` are of actors that Ray restarts when they die."""
        self._specs = specs
        self._handles = handles
        self._watch = watch
        self._policy = policy
        self._layout: ArenaLayout | None = None
        self._places: Sequence[Place] = ()
        self._processes: dict[int, ServiceProcess] = {}
        self._closing = threading.Event()
        self.stage = ""  # what is being done, for progress bars
        self.num_replaced = 0
        self.last_replaced = ""  # the service and why, for logs
        self.prepares_prompts = False  # fresh processes prepare for long prompts at once

    def find(self, services: Sequence[int]) -> None:
        """Learn the processes of `services`, which are expected there now. Errors: ServiceLost."""
        for service in services:
            self._expect(service, self._find(service))

    def connected(self, layout: ArenaLayout, places: Sequence[Place]) -> None:
        """All services were found and idle; `places[s]` is of service s. Errors: ServiceError."""
        self._layout, self._places = layout, places
        for service, process in self._processes.items():
            self._expect(service, process)

    def process_ids(self) -> list[int]:
        """Process ids of the services that were found, in order."""
        return [process.pid for _, process in sorted(self._processes.items())]

    def take_over(self, service: int, other: "ServiceReplacer") -> None:
        """Expect the service in the process that `other` knows."""
        self._expect(service, other._processes[service])

    def close(self) -> None:
        """Make a replacement under way raise ServiceError."""
        self._closing.set()

    def replace(self, causes: Mapping[int, str]) -> None:
        """Return when new processes serve for those that failed, at the same time.

        Where one fails meanwhile, all are replaced anew.
        Errors:  ServiceError after too many failures
        """
        causes = new = dict(causes)
        services = "service" if len(causes) == 1 else "services"
        names = " and ".join(self._specs[service].name for service in causes)
        try:
            while new:
                self._policy.count({self._specs[s].name: cause for s, cause in new.items()})
                self.stage = f"restarting the {names} {services}"
                new = self._replace_once(causes)
                causes |= new
            verb = "was" if len(causes) == 1 else "were"
            self.last_replaced = f"{', '.join(causes.values())}, and {verb} replaced"
            self.num_replaced += len(causes)
            self._policy.recovered()
        finally:
            self.stage = ""

    def _replace_once(self, services: Iterable[int]) -> dict[int, str]:
        """Replace all; returns what went wrong with one, {} for nothing."""
        try:
            is_killed = {s: self._places[s].end(s, self._processes[s]) for s in services}
            for service in services:
                # Known before it is loaded, so that the next attempt ends it if it fails.
                self._expect(service, self._await_new(service, is_killed[service]))
            self._each("load", {s: (self._specs[s],) for s in services})
            held = self._each("held_neurons", dict.fromkeys(services, ()))
            for service in services:
                self._require_neurons(service, held[service])
            places = {s: self._places[s] for s in services}
            arenas = {s: (self._layout, p.arena_refs, p.is_drivers) for s, p in places.items()}
            self._each("attach", arenas)
            if self.prepares_prompts:
                for service in services:
                    self._handles[service].begin_prompts.remote()
            self._each("try_out", dict.fromkeys(services, ()))
        except ServiceLost as error:
            return error.causes
        return {}

    def _each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> dict[int, Any]:
        """Call a method of services at once; what each returns.

        Errors:  ServiceLost as soon as one dies, is stuck or fails
        """
        calls = {s: getattr(self._handles[s], method).remote(*a) for s, a in arguments.items()}
        results: dict[int, Any] = {}
        while waiting := [service for service in calls if service not in results]:
            pending = [calls[service] for service in waiting]
            done, _ = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
            self._require_open()
            results |= {s: self._result(s, calls[s]) for s in waiting if calls[s] in done}
            self._watch.check([service for service in waiting if service not in results], 0)
        return results

    def _require_neurons(self, service: int, held: Sequence[np.ndarray] | None) -> None:
        """Raise ServiceError unless the new process holds the neurons that were lost."""
        lost = self._specs[service].neuron_ids or []
        if len(held or []) != len(lost) or not all(map(np.array_equal, held or [], lost)):
            name = self._specs[service].name
            raise ServiceError(f"the {name} service came back with other neurons; start again")

    def _await_new(self, service: int, is_killed: bool) -> ServiceProcess:
        """The process that Ray starts in the place of one that ends, or was killed already.

        Errors:  ServiceError where Ray starts none
        """
        old, handle = self._processes[service], self._handles[service]
        deadline = time.monotonic() + _NEW_PROCESS_S
        while time.monotonic() < deadline and not self._closing.wait(POLL_S):
            found: ServiceProcess | None = None
            try:
                found = self._find(service)
                lives_on = found.pid == old.pid
            except ServiceLost as error:  # it is being restarted, or stuck
                lives_on = isinstance(error.__cause__, ray.exceptions.GetTimeoutError)
            if found is not None and not lives_on:
                return found
            if lives_on and not is_killed:
                ray.kill(handle, no_restart=False)
                is_killed = True
        self._require_open()
        name = self._specs[service].name
        raise ServiceError(
            f"Ray has not restarted the {name} service in {_NEW_PROCESS_S:.0f} s; start again"
        )

    def _find(self, service: int) -> ServiceProcess:
        """The process that runs now. Errors: ServiceLost where none answers."""
        call = self._handles[service].where.remote()
        for _ in range(_TIMEOUT_POLLS):
            if ray.wait([call], timeout=POLL_S)[0]:
                break
            self._require_open()
        node_id, pid = self._result(service, call)
        is_local = node_id == ray.get_runtime_context().get_node_id()
        return KillNotes.take(ServiceProcess(pid, is_local))

    def _expect(self, service: int, process: ServiceProcess) -> None:
        self._processes[service] = process
        self._watch.expect(service, process)
        if self._places:
            self._places[service].expect(service, process)

    def _result(self, service: int, call: Any) -> Any:
        """What a call has returned. Errors: ServiceLost where it failed, or has not ended."""
        try:
            return ray.get(call, timeout=0)
        except ray.exceptions.RayError as error:
            cause = service_error(f"{self._specs[service].name} service", error)
            raise ServiceLost(service, str(cause)) from error

    def _require_open(self) -> None:
        if self._closing.is_set():
            raise ServiceError("the system is being stopped")
