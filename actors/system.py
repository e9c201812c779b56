"""A running system as its user sees it: start or attach, generate, stop."""

import math
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray

from hotcold.actors.exchange.pulse import DRIVER_POLLS, POLL_S, STARTING_POLLS, Pulse
from hotcold.actors.launch import CONTROL, find_driver, spawn_driver, start_local_ray
from hotcold.actors.protocol.failures import service_error
from hotcold.actors.protocol.messages import (
    GenerateRequest,
    Generation,
    LoadProgress,
    ReaderEpoch,
    SystemConfig,
    TokenEvent,
)
from hotcold.actors.setup.shards import arena_layout
from hotcold.model.config.build import read_config
from hotcold.model.errors import HotcoldError, ServiceError, UsageError

_STOP_POLLS = 300
_ATTEND_S = 1.0  # between two messages to the driver that a stream is still read
# Methods that return within a second, whatever else is called: they have threads of their own. All
# others may take as long as what runs.
_QUICK = {"ping", "progress", "describe", "processes", "driver_load", "telemetry", "cpu_seconds"}
_QUICK |= {"take_events", "attend", "cancel", "stop"}


class System:
    """A handle on a driver actor; a context manager that stops what it started."""

    def __init__(
        self, driver: Any, *, owned: bool, owns_ray: bool = False, writes_last: bool = False
    ) -> None:
        """`owned`: stop the system at the end; `owns_ray`: Ray too.

        `writes_last`: it has something to write when it is stopped.
        """
        self._driver = driver
        self._owned = owned
        self._owns_ray = owns_ray
        self._writes_last = writes_last

    @property
    def driver(self) -> Any:
        """The driver's actor handle."""
        return self._driver

    @property
    def owns_ray(self) -> bool:
        """Whether Ray was started for this system, and ends with it."""
        return self._owns_ray

    @classmethod
    def start(
        cls,
        system: SystemConfig,
        *,
        on_progress: Callable[[LoadProgress], None] = lambda progress: None,
        name: str | None = None,
        detached: bool = False,
        others: Sequence[SystemConfig] = (),
    ) -> "System":
        """Start a system, in the Ray that this process is connected to, else in one of its own.

        That Ray has room for `others`, which this process may start beside it, and ends with this
        system. Where another process has taken the name meanwhile, returns a handle on its system.
        Errors:  HotcoldError of what could not be loaded; nothing is left running then
        """
        owns_ray = not ray.is_initialized()
        if owns_ray and system.hosts:
            raise UsageError("--hosts are nodes of a Ray cluster; start this with `ray job submit`")
        if owns_ray:
            start_ray([system, *others])
        try:
            driver = spawn_driver(system, name, detached)
        except ValueError:
            found = cls.attach(name or "", on_progress=on_progress)
            if found is None:
                raise ServiceError(f"the system {name!r} has just ended; start again") from None
            return found
        writes_last = bool(system.prefix_cache_bytes)
        handle = cls(driver, owned=not detached, owns_ray=owns_ray, writes_last=writes_last)
        try:
            handle._await_load(on_progress)
        except BaseException:
            handle._owned = True
            handle.stop()
            raise
        return handle

    @classmethod
    def attach(
        cls, name: str, *, on_progress: Callable[[LoadProgress], None] | None = None
    ) -> "System | None":
        """A handle on the running system of that name, or None.

        With `on_progress` it waits until a system that is still loading is ready.
        Errors:  HotcoldError of what could not be loaded
        """
        driver = find_driver(name)
        if driver is None:
            return None
        handle = cls(driver, owned=False)
        if on_progress is not None:
            handle._await_load(on_progress)
        return handle

    def _await_load(self, on_progress: Callable[[LoadProgress], None]) -> None:
        loading = self._driver.load.remote()
        reports = Pulse("driver", lambda: self.begin("progress"))
        while not ray.wait([loading], timeout=POLL_S)[0]:
            progress = reports.poll(STARTING_POLLS)
            if progress is not None:
                on_progress(progress)
        self._get(loading)
        on_progress(self.call("progress"))

    def generate(self, request: GenerateRequest) -> Iterator[TokenEvent]:
        """Stream a request; closing the iterator cancels it.

        Errors:  PromptError; RequestError if it failed and the system goes on; ServiceError
        """
        request = replace(request, request_id=request.request_id or uuid.uuid4().hex)
        finished = False
        with self._attending(request.request_id):
            try:
                stream = self._driver.generate.options(num_returns="streaming").remote(request)
                while not finished:
                    self._await(stream)
                    ref = next(stream, None)
                    if ref is None:
                        return
                    event: TokenEvent = self._get(ref)
                    finished = event.result is not None
                    yield event
            except ray.exceptions.RayError as error:
                finished = True
                raise service_error("driver", error) from error
            finally:
                if not finished:
                    self.cancel(request.request_id)

    @contextmanager
    def _attending(self, request_id: str) -> Iterator[None]:
        """Within it the driver is told that the request is read; else it cancels the request."""
        done, epoch = threading.Event(), ReaderEpoch(request_id)

        def attend() -> None:
            while not done.wait(_ATTEND_S):
                with suppress(Exception):  # the stream raises it
                    self.begin("attend", epoch)

        threading.Thread(target=attend, name="attend", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def cancel(self, request_id: str) -> None:
        """End a request within a token, or before it starts."""
        self.begin("cancel", request_id)

    def complete(self, request: GenerateRequest) -> Generation:
        """Run a request to its end."""
        for event in self.generate(request):
            if event.result is not None:
                return event.result
        raise ServiceError("the driver ended the stream without a result")

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the driver by name, and wait for what it returns."""
        return self._get(self.begin(method, *args))

    def begin(self, method: str, *args: Any) -> Any:
        """Start a call of a driver's method by name; returns its object ref, which can be awaited.

        Calls that take long never delay those that do not.
        """
        called = getattr(self._driver, method)
        if method in _QUICK:
            called = called.options(concurrency_group=CONTROL)
        return called.remote(*args)

    def stop(self) -> None:
        """End the system if it is this handle's; no process, thread or shared memory stays."""
        if self._owns_ray:  # all of them are Ray's
            if self._writes_last:
                with suppress(HotcoldError):
                    self._await(self.begin("stop"), _STOP_POLLS)
            ray.shutdown()
        elif self._owned:
            self.end()

    def end(self) -> None:
        """End the system, even if another process started it."""
        with suppress(HotcoldError):
            self._await(self.begin("stop"), _STOP_POLLS)
        ray.kill(self._driver, no_restart=True)

    def __enter__(self) -> "System":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _await(self, coming: Any, max_polls: float = math.inf) -> None:
        """Wait for an object or for a stream's next one.

        Errors:  ServiceError if the driver is dead or stuck, or after `max_polls`
        """
        pulse, num_polls = Pulse("driver", lambda: self.begin("ping")), 0
        while not ray.wait([coming], timeout=POLL_S)[0]:
            pulse.poll(DRIVER_POLLS)
            num_polls += 1
            if num_polls >= max_polls:
                raise service_error("driver", ray.exceptions.GetTimeoutError())

    def _get(self, ref: Any) -> Any:
        self._await(ref)
        try:
            return ray.get(ref)
        except ray.exceptions.RayError as error:
            raise service_error("driver", error) from error


def start_ray(systems: Sequence[SystemConfig]) -> None:
    """Start a Ray of this process's own, with room for all of these. Errors: HotcoldError."""
    configs = [read_config(system.model_path) for system in systems]
    try:
        num_threads = sum(system.num_threads for system in systems)
        arenas = [arena_layout(*one) for one in zip(systems, configs, strict=True)]
        bits_bytes = sum(arena.predictor_bytes for arena in arenas)
        num_gpus = int(any(system.device != "cpu" for system in systems))
        arena_bytes = sum(arena.num_bytes for arena in arenas) - bits_bytes
        first = systems[0]
        compiled = first if first.device == "cpu" and first.storage is None else None
        start_local_ray(num_threads, arena_bytes, num_gpus, bits_bytes, compiled)
    except HotcoldError:
        ray.shutdown()  # of what had started
        raise
    except Exception as error:  # Ray raises many kinds, none of them its own
        raise ServiceError(f"Ray could not be started: {error}") from error
