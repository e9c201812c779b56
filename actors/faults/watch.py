"""Services that died or are stuck are noticed, by pings while something waits for them."""

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from hotcold.actors.exchange.pulse import POLL_S, STARTING_POLLS, Pulse
from hotcold.actors.exchange.service_process import ServiceProcess
from hotcold.actors.protocol.failures import NotLoaded, ServiceLost, service_error
from hotcold.model.errors import HotcoldError, ServiceError

_LOADED_S = 2.0  # by then kernels that were compiled before are there
# Unanswered polls at which a service counts as stuck.
_STOPPED_POLLS = 15  # where the operating system says that the process is stopped
_TIMEOUT_POLLS = 50
_LONGEST_REQUEST_POLLS = 6000


class ActorWatch:
    """Pings the services that the driver waits for, and names one that died or is stuck."""

    def __init__(self, names: Sequence[str], handles: Sequence[Any]) -> None:
        """`names[s]` and `handles[s]` belong to service s."""
        self._names = names
        self._handles = handles
        self._pulses = [self._new_pulse(service) for service in range(len(handles))]
        self._processes: dict[int, ServiceProcess] = {}
        self.has_started = False  # until the driver says that all kernels are compiled
        self._num_preparing = 0  # who waits for services that may compile kernels
        self._preparing_since = math.inf
        self._counting = threading.Lock()

    @property
    def starting(self) -> bool:
        """Whether services may be compiling kernels, so that they answer late."""
        return not self.has_started or self._num_preparing > 0

    @property
    def is_compiling(self) -> bool:
        """Whether somebody waits for services for longer than it takes to load kernels."""
        return time.monotonic() - self._preparing_since > _LOADED_S

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Within it services may compile kernels; any number of threads may be within it."""
        with self._counting:
            self._num_preparing += 1
            self._preparing_since = min(self._preparing_since, time.monotonic())
        try:
            yield
        finally:
            with self._counting:
                self._num_preparing -= 1
                if not self._num_preparing:
                    self._preparing_since = math.inf

    def expect(self, service: int, process: ServiceProcess) -> None:
        """From now on the service is lost unless it runs in `process`."""
        self._processes[service] = process
        self._pulses[service] = self._new_pulse(service)

    def check(self, services: Sequence[int], num_polls: int) -> None:
        """Raise ServiceLost if any of `services` is dead, or leaves too many pings unanswered.

        Also if it answers pings, but not the request for which it was polled `num_polls` times.
        """
        lost = []
        for service in services:
            try:
                self._poll(service)
            except HotcoldError as error:
                lost.append(ServiceLost(service, str(error)))
        if lost:
            raise ServiceLost.joined(lost)
        if num_polls > _LONGEST_REQUEST_POLLS:
            name = self.name(services[0])
            what = f"the {name} has not answered for {num_polls * POLL_S:.0f} s; start again"
            raise ServiceLost(services[0], what)

    def apart(self) -> "ActorWatch":
        """A watch of the same services for another wait, maybe in another thread."""
        other = ActorWatch(self._names, self._handles)
        other._processes, other.has_started = self._processes, not self.starting
        return other

    def name(self, service: int) -> str:
        """What error texts call the service."""
        return f"{self._names[service]} service"

    def explain(self, service: int) -> str:
        """The service's last failure, in one line. Errors: ServiceLost if it died since."""
        try:
            return str(ray.get(self._handles[service].explain_failure.remote(), timeout=5))
        except ray.exceptions.RayError as error:
            cause = service_error(self.name(service), error)
            raise ServiceLost(service, str(cause)) from error

    def _poll(self, service: int) -> None:
        process, name = self._processes.get(service), self.name(service)
        max_polls = STARTING_POLLS if self.starting else _TIMEOUT_POLLS
        if process is not None:
            if process.is_gone():
                raise ServiceError(f"the {name} {process.how_it_ended()}; start again")
            if process.is_stopped():
                max_polls = _STOPPED_POLLS
        is_paging = process is not None and process.is_paging()
        pid = self._pulses[service].poll(max_polls, counts=not is_paging)
        if process is not None and pid not in (None, process.pid):
            raise ServiceError(f"the {name} {process.how_it_ended()}; start again")

    def _new_pulse(self, service: int) -> Pulse:
        return Pulse(self.name(service), self._handles[service].ping.remote)


def await_each(calls: Mapping[int, Any], watch: ActorWatch) -> list[Any]:
    """What calls of several services return, in order; `calls[s]` is of service s.

    Errors:  of the first that fails what it raised, as `service_error` has it; ServiceLost of one
             that died, is stopped or stuck
    """
    results: dict[int, Any] = {}
    own_watch = watch.apart()
    while len(results) < len(calls):
        waiting = {service: call for service, call in calls.items() if service not in results}
        done, _ = ray.wait(list(waiting.values()), num_returns=len(waiting), timeout=POLL_S)
        for service, call in waiting.items():
            if call in done:
                results[service] = _result(call, service, watch.name(service))
        if silent := [service for service in waiting if service not in results]:
            own_watch.check(silent, 0)
    return [results[service] for service in calls]


def _result(call: Any, service: int, name: str) -> Any:
    try:
        return ray.get(call, timeout=0)
    except ray.exceptions.RayError as error:
        cause = service_error(name, error)
        is_answer = isinstance(error, ray.exceptions.RayTaskError)
        if is_answer and not isinstance(cause, NotLoaded):
            raise cause from error
        raise ServiceLost(service, str(cause)) from error
