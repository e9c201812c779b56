"""A running system as the API uses it: one that others hold, or an actor of this process's Ray.

Both take a request and deliver its events by calls from a thread of their own. `InFlight` keeps as
many at the system as it runs at once, and some ahead.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from hotcold.actors.protocol.messages import (
    COMPILING_LONGER,
    DriverLoad,
    GenerateRequest,
    SystemConfig,
    TokenEvent,
)
from hotcold.model.errors import HotcoldError, ServiceError, UsageError

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from hotcold.actors.protocol.options import SystemOptions
    from hotcold.actors.system import System
    from hotcold.jobs.kept.client import KeptSystem

# What a request has brought: an event, the last of which has a result, or the error that ended it.
Deliver = Callable[[TokenEvent | BaseException], None]
_has_own_ray = False  # which one system takes for itself
_started: dict[tuple[Path, SystemOptions], RayConnection] = {}  # by this process, and not closed
_sharing = threading.RLock()  # held for a moment: while users are counted
_starting = threading.Lock()  # held while a system starts: this process starts one at a time
_ENDING_S = 5.0
_LOOK_S = 1.0  # between two looks at what a request waits for
_CLOSED = "this LLM is closed; make a new one"


class Connection(Protocol):
    """What answers requests."""

    @property
    def max_batch(self) -> int:
        """How many requests run at once."""

    @property
    def config(self) -> SystemConfig:
        """What runs. Errors: HotcoldError."""

    def submit(self, request: GenerateRequest, deliver: Deliver) -> None:
        """Queue a request, which has an id; all that goes wrong is delivered."""

    def cancel(self, request_id: str) -> None:
        """End a request within a token; nothing more of it is delivered."""

    def telemetry(self) -> dict[str, Any]:
        """What the system does now, as the page's panel shows it. Errors: HotcoldError."""

    def is_compiling(self) -> bool:
        """Whether requests wait for kernels that are being compiled. Errors: HotcoldError."""

    def end_sharing(self) -> None:
        """Have the next `close` end the system of this process's own, whoever else uses it."""

    def close(self) -> None:
        """Use the system no more, and end it if it is this process's own; may be repeated."""


class RayConnection:
    """A system whose driver is an actor of this process's Ray; pickled it is a handle on it."""

    def __init__(
        self, system: System, config: SystemConfig, stack: ExitStack | None = None
    ) -> None:
        """`stack` ends what `close` is to end: nothing, of a system that others started."""
        self.system = system
        self.config = config
        self.max_batch = config.max_batch
        self.num_users = 1
        self.is_closed = False
        self._stack = stack or ExitStack()
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: Any = None

    @classmethod
    def of_driver(cls, driver: Any, config: SystemConfig) -> RayConnection:
        """A handle on a system that others started."""
        from hotcold.actors.system import System

        return cls(System(driver, owned=False), config)

    def __reduce__(self) -> Any:
        from ray._private.worker import global_worker

        if not global_worker.get_serialization_context().is_in_band_serialization():
            raise UsageError(
                "an LLM of this process's Ray can be handed to Ray's tasks and actors alone; for "
                "other processes give keep='10m', there too"
            )
        return RayConnection.of_driver, (self.system.driver, self.config)

    def submit(self, request: GenerateRequest, deliver: Deliver) -> None:
        """See `Connection`."""
        import asyncio

        try:
            self._require_running()
        except UsageError as error:
            deliver(error)
            return
        asyncio.run_coroutine_threadsafe(self._submit(request, deliver), self._running_loop())

    async def _submit(self, request: GenerateRequest, deliver: Deliver) -> None:
        try:
            await self._client.submit(request, deliver)
        except Exception as error:
            deliver(error)

    def cancel(self, request_id: str) -> None:
        """See `Connection`."""
        import asyncio

        # A task, as `submit` is: they begin in the order in which they were made.
        asyncio.run_coroutine_threadsafe(self._cancel(request_id), self._running_loop())

    async def _cancel(self, request_id: str) -> None:
        self._client.cancel(request_id)

    def telemetry(self) -> dict[str, Any]:
        """See `Connection`."""
        from hotcold.ui.telemetry import telemetry_json

        self._require_running()
        return telemetry_json(self.system.call("telemetry"))

    def is_compiling(self) -> bool:
        """See `Connection`."""
        load: DriverLoad = self.system.call("driver_load")
        return load.is_compiling

    def _require_running(self) -> None:
        from hotcold.actors.processes.forked import require_own_ray

        require_own_ray()
        if self.is_closed:
            raise UsageError(_CLOSED)

    def end_sharing(self) -> None:
        """Have one user, whose `close` ends it for all."""
        with _sharing:
            self.num_users = min(self.num_users, 1)

    def close(self) -> None:
        """See `Connection`; the last user's ends it."""
        global _has_own_ray
        with _sharing:
            self.num_users -= 1
            if self.num_users > 0 or self.is_closed:
                return
            self.is_closed = True
            for key in [key for key, each in _started.items() if each is self]:
                del _started[key]
        with self._starting:
            loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            import asyncio

            asyncio.run_coroutine_threadsafe(_stop(), loop)
            self._thread.join(_ENDING_S)
        self._stack.close()
        if self.system.owns_ray:
            _has_own_ray = False

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """The loop of a thread that takes the events of all requests together."""
        with self._starting:
            if self._loop is None:
                import asyncio

                from hotcold.actors.client import AsyncClient

                self._loop = asyncio.new_event_loop()
                self._client = AsyncClient(self.system)
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name="hotcold", daemon=True
                )
                self._thread.start()
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    import asyncio

    loop.run_forever()
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.wait(tasks))
    loop.close()


async def _stop() -> None:
    """Stop the loop once earlier tasks have begun: they tell the driver what is cancelled."""
    import asyncio

    await asyncio.sleep(0)
    asyncio.get_running_loop().stop()


class KeptConnection:
    """A system of another process of this machine, kept or of `hotcold serve`."""

    def __init__(self, system: KeptSystem, attends: bool = True) -> None:
        """`attends`: the system does not end for want of requests until `close`.

        Errors:  GoneError, ServiceError
        """
        self.system = system
        self.max_batch: int = system.record.resolved["max_batch"]
        self.about: dict[str, Any] = {}  # what is said of the system beside its last answer
        self._stack = ExitStack()
        if attends:
            self._stack.enter_context(system.attended())

    @property
    def config(self) -> SystemConfig:
        """See `Connection`."""
        return self.system.config

    def __reduce__(self) -> Any:
        return KeptConnection, (self.system,)

    def submit(self, request: GenerateRequest, deliver: Deliver) -> None:
        """See `Connection`."""
        threading.Thread(target=self._read, args=(request, deliver), daemon=True).start()

    def _read(self, request: GenerateRequest, deliver: Deliver) -> None:
        try:
            for event, about in self.system.answer(request):
                self.about = about or self.about
                deliver(event)
        except Exception as error:
            deliver(error)

    def cancel(self, request_id: str) -> None:
        """See `Connection`."""
        self.system.cancel(request_id)

    def telemetry(self) -> dict[str, Any]:
        """See `Connection`."""
        return self.system.telemetry()

    def is_compiling(self) -> bool:
        """See `Connection`."""
        return bool(self.system.state().get("is_compiling"))

    def end_sharing(self) -> None:
        """See `Connection`: it is no system of this process's own."""

    def close(self) -> None:
        """See `Connection`."""
        self._stack.close()


def find(
    model: str | None,
    options: SystemOptions,
    keep_s: float,
    own: bool,
    say: Callable[[str], object] | None = None,
    attends: bool = True,
) -> KeptConnection | None:
    """The system of this model and these options that runs already, or is to stay; else None.

    `say` is told in a line which one it is; without it standard error is. `attends`: as of
    `KeptConnection`.
    Errors:  HotcoldError of what cannot be started
    """
    from hotcold.jobs.kept.client import GoneError
    from hotcold.jobs.kept.find import find_system, say_on_stderr

    found = find_system(model, options, keep_s, own, say or say_on_stderr)
    with suppress(GoneError):
        return None if found is None else KeptConnection(found, attends)
    return None


def start(path: Path, options: SystemOptions) -> RayConnection:
    """Start a system of this process's own, in its Ray where it has one; shows how far it is.

    One of the same model and options that it has started already is shared: a notebook's cell may
    run again.
    Errors:  HotcoldError of what cannot be loaded
    """
    import ray

    from hotcold.actors.launch import prepare_in_cluster
    from hotcold.actors.processes.cluster import connect, in_cluster
    from hotcold.jobs.kept.find import say_on_stderr

    if in_cluster() and not ray.is_initialized():
        connect()
    key = path.resolve(), options
    if (running := _shared(key)) is not None:
        return running
    with _starting:
        if (running := _shared(key)) is not None:  # that another thread has started meanwhile
            return running
        made = start_prepared(prepare_in_cluster(path, options, say_on_stderr))
        with _sharing:
            _started[key] = made
        return made


def _shared(key: tuple[Path, SystemOptions]) -> RayConnection | None:
    """The system that runs already, if it answers, with one user more."""
    with _sharing:
        running = _started.get(key)
        if running is None or running.is_closed:
            return None
        running.num_users += 1  # so nobody ends it meanwhile
    try:
        running.system.call("ping")
    except HotcoldError:
        running.close()
        return None
    return running


def start_prepared(system: SystemConfig) -> RayConnection:
    """The same of what `prepare_system` returned."""
    from hotcold.actors.processes.forked import require_own_ray
    from hotcold.jobs.support.loading import running_system

    global _has_own_ray
    require_own_ray()
    if _has_own_ray:
        raise UsageError(
            "this process runs a model already; close that LLM first, or call ray.init() before "
            "both, or give keep='10m' for systems of other processes"
        )
    with ExitStack() as stack:
        running = stack.enter_context(running_system(system))
        _has_own_ray = running.owns_ray
        # With --mode auto, the mode that was chosen.
        return RayConnection(running, running.call("describe"), stack.pop_all())


def new_id() -> str:
    """A request's id, which no other has."""
    return os.urandom(16).hex()


class InFlight:
    """Hands requests to a system, as many as it runs at once and as many ahead; the others wait.

    May be used by several threads. A child that this process forks has none of its requests.
    """

    def __init__(self, connection: Connection) -> None:
        self.is_parents = False  # and this process is a fork of it
        self._connection = connection
        self._limit = 2 * connection.max_batch
        self._changing = threading.Lock()
        self._waiting: dict[str, tuple[GenerateRequest, Deliver]] = {}  # first come, first served
        self._running: dict[str, Deliver] = {}
        self._is_closed = False
        self._may_tell = True  # what the first request waits for, once
        _in_flight.add(self)

    def forget(self) -> None:
        """Have no requests, in a child: their readers are the parent's threads."""
        self.is_parents = True
        self._changing, self._waiting, self._running = threading.Lock(), {}, {}

    def start(self, request: GenerateRequest, deliver: Deliver) -> str:
        """Queue a request; returns its id. `deliver` is called in another thread.

        Errors:  UsageError once it is closed
        """
        name = request.request_id or new_id()
        request = replace(request, request_id=name)
        with self._changing:
            if self._is_closed:
                raise UsageError(_CLOSED)
            if len(self._running) >= self._limit:
                self._waiting[name] = request, deliver
                return name
            self._running[name] = deliver
        self._submit(request)
        return name

    def _submit(self, request: GenerateRequest) -> None:
        name, begun = request.request_id, threading.Event()
        if self._may_tell and sys.stderr is not None and sys.stderr.isatty():
            self._may_tell = False
            threading.Thread(
                target=self._tell_compiling, args=(name, begun), name="compiling", daemon=True
            ).start()

        def take(event: TokenEvent | BaseException) -> None:
            begun.set()
            is_last = isinstance(event, BaseException) or event.result is not None
            deliver = self._leave(name) if is_last else self._running.get(name)
            if deliver is not None:
                with suppress(RuntimeError):  # an event loop that has ended reads nothing
                    deliver(event)

        self._connection.submit(request, take)

    def _tell_compiling(self, name: str, begun: threading.Event) -> None:
        """Say at a terminal, once, that a request waits for kernels; until it has begun or left."""
        while not begun.wait(_LOOK_S) and name in self._running:
            with suppress(HotcoldError):
                if self._connection.is_compiling():
                    print(COMPILING_LONGER, file=sys.stderr)
                    return
        self._may_tell = True

    def _leave(self, request_id: str) -> Deliver | None:
        """A request has ended; the next takes its place. Returns who read it."""
        with self._changing:
            deliver = self._running.pop(request_id, None)
            request = None
            if deliver is not None and self._waiting:
                name = next(iter(self._waiting))
                request, self._running[name] = self._waiting.pop(name)
        if request is not None:
            self._submit(request)
        return deliver

    def cancel(self, *request_ids: str) -> None:
        """End those requests that have not ended; nothing more of them is delivered."""
        with self._changing:  # first those that would take the others' places
            for name in request_ids:
                self._waiting.pop(name, None)
        for name in request_ids:
            if self._leave(name) is not None:
                with suppress(HotcoldError):
                    self._connection.cancel(name)

    def events(self, request: GenerateRequest) -> Iterator[TokenEvent]:
        """Stream a request; closing the iterator cancels it. Errors: HotcoldError."""
        arrived: queue.SimpleQueue[TokenEvent | BaseException] = queue.SimpleQueue()
        name = self.start(request, arrived.put)
        try:
            while True:
                event = arrived.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if event.result is not None:
                    return
        finally:
            self.cancel(name)

    async def async_events(self, request: GenerateRequest) -> Any:
        """As `events`, for an event loop."""
        import asyncio

        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[TokenEvent | BaseException]()

        def put(event: TokenEvent | BaseException) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, event)

        name = self.start(request, put)
        try:
            while True:
                event = await arrived.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if event.result is not None:
                    return
        finally:
            self.cancel(name)

    def close(self) -> None:
        """Take no more, and end what has not ended with an error."""
        with self._changing:
            self._is_closed = True
            waiting, self._waiting = self._waiting, {}
            running = list(self._running)
        for _, deliver in waiting.values():
            deliver(ServiceError("the LLM was closed"))
        for name in running:
            if (reader := self._leave(name)) is not None:
                with suppress(HotcoldError):
                    self._connection.cancel(name)
                reader(ServiceError("the LLM was closed"))


_in_flight: weakref.WeakSet[InFlight] = weakref.WeakSet()


def _forget() -> None:
    global _sharing, _starting
    _sharing, _starting = threading.RLock(), threading.Lock()  # others of the parent may have them
    for each in _in_flight:
        each.forget()


os.register_at_fork(after_in_child=_forget)
