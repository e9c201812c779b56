"""Ray without processes: a driver's actor and those of its services, all in this one.

Services are real and so is everything around them. Only processes and calls are stand-ins, so that
a test can end, stop and restart a service at the very moment that it wants.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from hotcold.actors.exchange.doorbell_exchange import ArenaExchange, Exchange
from hotcold.actors.exchange.recovery import RecoveringExchange, Replace
from hotcold.actors.exchange.service import Service
from hotcold.actors.processes.driver_actor import DriverActor
from hotcold.actors.processes.service_actor import ServiceActor
from hotcold.actors.protocol.failures import ServiceLost
from hotcold.actors.protocol.messages import ServiceSpec, SystemConfig
from hotcold.actors.protocol.topology import Topology
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL
from hotcold.numba_kernels.serve.mailbox import (
    DONE,
    NO_DOORBELLS,
    OPERATION,
    REQUEST,
    STOP,
    cell,
    post_and_await,
)

_NODE = "this node"
_END_NS = 60 * 10**9
_NO_REQUEST_S = 0.5  # after which a driver is taken to send none
_LEFT_ALONE = {"hotcold.actors.exchange.service_process", "hotcold.actors.protocol.ray_memory"}


class Ref(Future[Any]):
    """An object ref. Two of them are never equal."""


class StandInActor:
    """One service's actor, with a process id; Ray's part is to restart it when it ends.

    `before[method]` is called in the place of a call, before it: it may stop or end the process.
    """

    def __init__(self, host: StandInRay, spec: ServiceSpec) -> None:
        self._host = host
        self._spec = spec
        self.name = spec.name
        self.before: dict[str, Callable[[], None]] = {}
        self.is_gone = False  # for good
        self._start()

    def _start(self) -> None:
        self.pid = next(self._host.pids)
        self.is_stopped = False
        self.service = self._host.new_service(self._spec)
        self._unanswered: list[Ref] = []

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *arguments: self._call(method, arguments))

    def _call(self, method: str, arguments: Sequence[Any]) -> Ref:
        """A call in a thread of its own; a stopped or dead process does not answer."""
        ref, service, pid = Ref(), self.service, self.pid
        if self.is_gone:
            ref.set_exception(ray.exceptions.RayActorError())
            return ref
        self._unanswered.append(ref)

        def run() -> None:
            try:
                self.before.get(method, lambda: None)()
                if self.is_stopped or self.pid != pid or self.is_gone:
                    return
                known = {"ping": lambda: pid, "where": lambda: (_NODE, pid)}
                if method == "ping":
                    service.ping()
                found = known.get(method, getattr(service, method))(*arguments)
            except Exception as error:
                found = ray.exceptions.RayTaskError(method, str(error), error)
            if not self.is_stopped and ref in self._unanswered:
                self._unanswered.remove(ref)
                (ref.set_exception if isinstance(found, Exception) else ref.set_result)(found)

        threading.Thread(target=run, daemon=True).start()
        return ref

    def stop(self) -> None:
        """As SIGSTOP does: it answers no call any more."""
        self.is_stopped = True

    def kill(self, restart: bool = True) -> None:
        """End the process. Ray puts an empty one in its place, unless `restart` is False."""
        service, pid = self.service._service, self.pid
        if service is not None and any(thread.is_alive() for thread in service._threads):
            self._host.between_requests(lambda: self._kill(pid, restart))
        else:
            self._kill(pid, restart)

    def _kill(self, pid: int, restart: bool) -> None:
        if restart and self.pid != pid:
            return  # somebody else was faster
        calls, self._unanswered = self._unanswered, []
        end_threads(self.service._service)
        if self.service._pages is not None:
            self.service._pages.close()
        if restart and not self.is_gone:
            self._start()
        else:
            self.is_gone, self.pid = True, -1
        for ref in calls:
            ref.set_exception(ray.exceptions.RayActorError())


def end_threads(service: Service | None) -> None:
    """End a service's threads as the end of its process would; its buffers stay as they are.

    No request may be written or sent meanwhile: STOP's words would be the request's, and its reply
    would pass for the request's own.
    """
    if service is None or not service._threads:
        return
    cells, words = service.buffers.cells, service.buffers.requests[service.index]
    bells = [cell(service.index, kind) * INTS_A_CELL for kind in (REQUEST, DONE)]
    before, rung = words.copy(), cells[bells].copy()
    # STOP is 0, as unwritten words are: it counts where it was rung.
    is_told = rung[0] != rung[1] or (rung[1] > 0 and service._ended.is_set())
    if words[OPERATION] == STOP and is_told:
        service.join(60)  # they are ending, and would not hear another request
    if any(thread.is_alive() for thread in service._threads):
        words[OPERATION] = STOP
        requested = np.array([service.index], np.int64)
        assert post_and_await(cells, requested, int(rung.max()) + 1, _END_NS) == 1
        assert service.join(60)
    words[:], cells[bells] = before, rung


class StandInProcess:
    """What `ServiceProcess` sees of a stand-in's process."""

    is_local = True

    def __init__(self, host: StandInRay, pid: int) -> None:
        self.pid = pid
        self._actor = next(actor for actor in host.actors if actor.pid == pid)

    def is_gone(self) -> bool:
        return self._actor.pid != self.pid

    def is_stopped(self) -> bool:
        return not self.is_gone() and self._actor.is_stopped

    def is_paging(self) -> bool:
        return False

    def note_kills(self) -> None:
        pass

    def how_it_ended(self) -> str:
        return "died"

    def kill(self) -> None:
        if not self.is_gone():
            self._actor.kill()


class StandInRay:
    """In the place of the module `ray`."""

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.actors: list[StandInActor] = []
        self.pids = itertools.count(1000)
        self.new_service: Callable[[ServiceSpec], ServiceActor] = ServiceActor
        # Called after each request of the engine's thread, with its services.
        self.on_request: Callable[[Sequence[int]], None] = lambda services: None
        self._requesting = threading.RLock()
        self._deaths: SimpleQueue[tuple[Future[None], Callable[[], None]]] = SimpleQueue()

    def between_requests(self, die: Callable[[], None]) -> None:
        """Call `die` while no request is written, sent or answered.

        The driver's thread does so before it sends the next one; this one if there is none.
        """
        if _is_driver():
            die()
            return
        death: Future[None] = Future()
        self._deaths.put((death, die))
        with suppress(TimeoutError):
            death.result(_NO_REQUEST_S)
        with self._requesting:
            if death.cancel():
                die()
        if not death.cancelled():
            death.result()

    def request(self, send: Callable[[], int]) -> int:
        """Send a request and return what that does, after what waits for `between_requests`."""
        with self._requesting:
            while _is_driver() and not self._deaths.empty():
                death, die = self._deaths.get()
                if death.set_running_or_notify_cancel():
                    _settle(death, die)
            return send()

    def spawn(self, spec: ServiceSpec, node_id: str | None) -> StandInActor:
        """Start a service's actor."""
        self.actors.append(StandInActor(self, spec))
        return self.actors[-1]

    def alive(self) -> list[StandInActor]:
        """The actors whose processes run."""
        return [actor for actor in self.actors if not actor.is_gone]

    def nodes(self) -> list[dict[str, Any]]:
        node = {"Alive": True, "NodeID": _NODE, "NodeManagerAddress": "127.0.0.1"}
        return [node | {"Resources": {"CPU": 64}}]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 64}

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: _NODE)

    def put(self, item: Any) -> Ref:
        ref = Ref()
        ref.set_result(item)
        return ref

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [self.get(ref, timeout) for ref in refs]
        if timeout == 0 and not refs.done():
            raise ray.exceptions.GetTimeoutError
        try:
            return refs.result(timeout)
        except TimeoutError:
            raise ray.exceptions.GetTimeoutError from None

    def wait(
        self, refs: Sequence[Ref], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Ref], list[Ref]]:
        """As soon as `num_returns` are there, or after `timeout` seconds."""
        arrived = threading.Condition()

        def notify(ref: Any) -> None:
            with arrived:
                arrived.notify_all()

        for ref in refs:
            ref.add_done_callback(notify)
        with arrived:
            arrived.wait_for(lambda: sum(ref.done() for ref in refs) >= num_returns, timeout)
        done = [ref for ref in refs if ref.done()][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def kill(self, actor: StandInActor, no_restart: bool = True) -> None:
        actor.kill(restart=not no_restart)


def _settle(future: Future[None], function: Callable[[], None]) -> None:
    try:
        function()
        future.set_result(None)
    except Exception as error:
        future.set_exception(error)


def _is_driver() -> bool:
    return threading.current_thread().name == "driver"


class StandInSystem:
    """A driver's actor that has loaded, and the services that it started."""

    def __init__(self, host: StandInRay, system: SystemConfig) -> None:
        self.host = host
        self.actor = DriverActor(system, host.spawn, _no_relay)

    def service(self, name: str) -> StandInActor:
        """The actor of that name that serves: the oldest one that has not ended."""
        return next(one for one in self.host.alive() if one.name == name)


def _no_relay(*arguments: Any) -> Any:
    raise AssertionError("a relay was started")


@contextmanager
def stand_in_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInRay]:
    """Put a stand-in in Ray's place in all modules of `actors`; end what was started with it.

    `monkeypatch` takes it away again, after what a test puts in its place by the same.
    """
    host = StandInRay()
    request, change = ArenaExchange.request, RecoveringExchange.change

    def requested(exchange: ArenaExchange, services: Sequence[int]) -> int:
        waited = host.request(lambda: request(exchange, services))
        if _is_driver():
            host.on_request(services)
        return waited

    def changed(
        recovering: RecoveringExchange, inner: Exchange, replace: Replace, topology: Topology
    ) -> None:
        # Compiled code would ring the services by itself, and `on_request` hear of nothing.
        change(recovering, inner, replace, topology)
        recovering.request_state = NO_DOORBELLS

    for name, module in list(sys.modules.items()):
        if not name.startswith("hotcold.actors."):
            continue
        for replaced, stand_in in (
            ("ray", host),
            ("placement_group", lambda *arguments, **options: None),
            ("remove_placement_group", lambda group: None),
            ("put_arena", lambda arena: (host.put(arena), arena)),
            ("require_object_store", lambda num_bytes: None),
            ("ServiceProcess", lambda pid, is_local: StandInProcess(host, pid)),
        ):
            if replaced in vars(module) and name not in _LEFT_ALONE:
                monkeypatch.setattr(module, replaced, stand_in)
    monkeypatch.setattr("hotcold.actors.exchange.watch._STOPPED_POLLS", 2)
    monkeypatch.setattr(ArenaExchange, "request", requested)
    monkeypatch.setattr(RecoveringExchange, "change", changed)
    yield host
    host.on_request = lambda services: None
    for actor in host.alive():
        actor.kill(restart=False)


@contextmanager
def stand_in_system(host: StandInRay, system: SystemConfig) -> Iterator[StandInSystem]:
    """A system that serves; it is stopped at the end."""
    found = StandInSystem(host, system)
    found.actor.load()
    try:
        yield found
    finally:
        host.on_request = lambda services: None
        found.actor.stop()


def lose_once(host: StandInRay, *lost: int) -> None:
    """Let services die at the next request of the first; a half-written answer is garbage."""

    def lose(services: Sequence[int]) -> None:
        if lost[0] in services:
            host.on_request = lambda services: None
            died = [ServiceLost(each, f"service {each} died; start again") for each in lost]
            raise ServiceLost.joined(died)

    host.on_request = lose
