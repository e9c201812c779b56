"""A system of this process's own: an actor of its Ray, started here or handed to it."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hotcold.actors.protocol.messages import DriverLoad, GenerateRequest, SystemConfig
from hotcold.jobs.running.find import say_on_stderr
from hotcold.jobs.running.in_flight import CLOSED, Deliver
from hotcold.model.errors import HotcoldError, UsageError

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from hotcold.actors.protocol.options import SystemOptions
    from hotcold.actors.system import System

_has_own_ray = False  # which one system takes for itself
_started: dict[tuple[Path, SystemOptions], OwnSystem] = {}  # by this process, and not closed
_sharing = threading.RLock()  # held for a moment: while users are counted
_starting = threading.Lock()  # held while a system starts: this process starts one at a time
_ENDING_S = 5.0


class OwnSystem:
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
    def of_driver(cls, driver: Any, config: SystemConfig) -> OwnSystem:
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
        return OwnSystem.of_driver, (self.system.driver, self.config)

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
            raise UsageError(CLOSED)

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


def start(path: Path, options: SystemOptions) -> OwnSystem:
    """Start a system of this process's own, in its Ray where it has one; shows how far it is.

    One of the same model and options that it has started already is shared: a notebook's cell may
    run again.
    Errors:  HotcoldError of what cannot be loaded
    """
    import ray

    from hotcold.actors.launch import prepare_in_cluster
    from hotcold.actors.processes.cluster import connect, in_cluster

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


def _shared(key: tuple[Path, SystemOptions]) -> OwnSystem | None:
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


def start_prepared(system: SystemConfig) -> OwnSystem:
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
        return OwnSystem(running, running.call("describe"), stack.pop_all())


def _forget() -> None:
    global _sharing, _starting
    _sharing, _starting = threading.RLock(), threading.Lock()  # others of the parent may have them


os.register_at_fork(after_in_child=_forget)
