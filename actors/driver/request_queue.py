"""The engine's thread, and the queue of requests and jobs that wait for it.

Requests run side by side as the scheduler says. A job uses the engine in another way: it waits in
the same queue until nothing runs, and requests behind it wait for it.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.scheduler import Scheduler
from hotcold.actors.protocol.failures import CacheLost, NotFiniteError, SystemLost, first_line
from hotcold.model.errors import ServiceError

_Result = TypeVar("_Result")
_SAVE_S = 0.005  # between two looks at what has been written of the KV cache


class _Job:
    def __init__(self, function: Callable[[], object], waits: bool) -> None:
        """`waits`: until nothing runs; else only for the step in progress."""
        self._function = function
        self.waits = waits
        self.future: Future[object] = Future()

    def run(self, try_replace: Callable[[int, str], bool]) -> None:
        """Call the function, again from its beginning where a service was replaced meanwhile."""
        while not self.future.done():
            try:
                self._call(try_replace)
            except CacheLost:
                continue
            except BaseException as error:
                self.future.set_exception(error)

    def _call(self, try_replace: Callable[[int, str], bool]) -> None:
        try:
            self.future.set_result(self._function())
        except NotFiniteError as error:
            if error.service is None or not try_replace(error.service, str(error)):
                raise

    def fail(self, error: BaseException) -> None:
        self.future.set_exception(error)


class RequestQueue:
    """First come, first served. All but `_serve` and what it calls is for other threads."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Start the thread."""
        self._scheduler = scheduler
        self._incoming: queue.SimpleQueue[ActiveRequest | _Job | None] = queue.SimpleQueue()
        self._waiting: deque[ActiveRequest | _Job] = deque()
        self._ended_by: ServiceError | None = None
        self._is_closing = False
        self._submitting = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="driver", daemon=True)
        self._thread.start()

    def submit(self, item: ActiveRequest | _Job) -> None:
        """Put a request in the queue. Errors: ServiceError where the system has ended."""
        with self._submitting:
            self.require_running()
            self._incoming.put(item)

    def between_requests(self, function: Callable[[], _Result]) -> _Result:
        """Call `function` in the engine's thread while nothing runs. Errors: its own.

        It is called again where the KV cache is lost, or a service replaced for a NaN.
        """
        return self._run(function, waits=True)

    def between_steps(self, function: Callable[[], _Result]) -> _Result:
        """Call `function` in the engine's thread, whatever runs.

        Errors:  its own; SystemLost ends the system
        """
        return self._run(function, waits=False)

    def _run(self, function: Callable[[], _Result], waits: bool) -> _Result:
        job = _Job(function, waits)
        self.submit(job)
        result: _Result = job.future.result()  # type: ignore[assignment]
        return result

    def require_running(self) -> None:
        """Raise the ServiceError that ended the system, if one did."""
        if self._ended_by is not None:
            raise self._ended_by

    def require_thread(self) -> None:
        """Raise the ServiceError with which the thread ended, if it did without `close`."""
        if not (self._thread.is_alive() or self._is_closing):
            raise self._ended_by or ServiceError("the driver failed; start again")

    @property
    def num_waiting(self) -> int:
        """How many wait in the queue, or to run again."""
        return self._incoming.qsize() + len(self._waiting) + self._scheduler.num_preempted

    def close(self, cancel_all: Callable[[], None]) -> None:
        """End the thread within a token; `cancel_all` marks the requests that run as cancelled."""
        self._is_closing = True
        with self._submitting:  # nothing is submitted later
            self._ended_by = self._ended_by or ServiceError("the system is being stopped")
        cancel_all()
        self._incoming.put(None)
        self._thread.join()

    def _serve(self) -> None:
        """Serve until the end, or until a failure that is not one request's own."""
        try:
            while self._collect():
                self._start_waiting()
                self._scheduler.advance()
            self._scheduler.end_cancelled()
        except BaseException as error:
            self._end_all(error)
        finally:
            self._end_waiting()

    def _end_all(self, error: BaseException) -> None:
        """End all that runs, and let nothing into the queue from now on."""
        if not isinstance(error, ServiceError):
            error = ServiceError(f"the driver failed: {first_line(error)}; start again")
        with self._submitting:
            self._ended_by = self._ended_by or error
        self._scheduler.end_all(error)

    def _end_waiting(self) -> None:
        """Fail all that still wait; the queue is closed by now."""
        error = self._ended_by or ServiceError("the system is being stopped")
        while not self._incoming.empty():
            item = self._incoming.get()
            if item is not None:
                self._waiting.append(item)
        while self._waiting:
            self._waiting.popleft().fail(error)

    def _collect(self) -> bool:
        """Move what has come into the queue, waiting for it when idle; False at the end."""
        idle = self._scheduler.is_idle and not self._waiting
        if not idle and not self._scheduler.num_running:
            self._await_room()
        while idle or not self._incoming.empty():
            item = self._next()
            if item is None:
                return False
            if isinstance(item, _Job) and not item.waits:
                item.run(self._scheduler.try_replace)
                if isinstance(error := item.future.exception(), SystemLost):
                    raise error
                continue
            self._waiting.append(item)
            idle = False
        return True

    def _await_room(self) -> None:
        """Wait a little while what waits may have no pages, as they are being written."""
        until_s = time.monotonic() + _SAVE_S
        while self._scheduler.is_saving and self._incoming.empty() and time.monotonic() < until_s:
            time.sleep(_SAVE_S / 5)

    def _next(self) -> ActiveRequest | _Job | None:
        """What comes next; pages of the KV cache are written meanwhile."""
        while self._scheduler.is_saving:
            with suppress(queue.Empty):
                return self._incoming.get(timeout=_SAVE_S)
            self._scheduler.save_pages()
        return self._incoming.get()

    def _start_waiting(self) -> None:
        """End cancelled requests, and start those at the head while there is room."""
        for item in list(self._waiting):
            if isinstance(item, ActiveRequest) and item.is_cancelled:
                item.end("cancelled")
                self._waiting.remove(item)
        while self._waiting and self._start(self._waiting[0]):
            pass

    def _start(self, item: ActiveRequest | _Job) -> bool:
        """Whether the first that waits could be started; it waits no longer then."""
        if isinstance(item, ActiveRequest):
            if not self._scheduler.admit(item):
                return False
            self._waiting.popleft()
            return True
        if not self._scheduler.is_idle:
            return False
        self._waiting.popleft()  # before it is done, and who asked for it looks how many wait
        item.run(self._scheduler.try_replace)
        return True
