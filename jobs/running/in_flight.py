"""Requests at a system: as many as it runs at once, and as many ahead; the others wait."""

from __future__ import annotations

import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from hotcold.actors.protocol.messages import (
    COMPILING_LONGER,
    GenerateRequest,
    SystemConfig,
    TokenEvent,
)
from hotcold.model.errors import HotcoldError, ServiceError, UsageError

# What a request has brought: an event, the last of which has a result, or the error that ended it.
Deliver = Callable[[TokenEvent | BaseException], None]
CLOSED = "this LLM is closed; make a new one"
_LOOK_S = 1.0  # between two looks at what a request waits for


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


def new_id() -> str:
    """A request's id, which no other has."""
    return os.urandom(16).hex()


class InFlight:
    """Hands requests to a system, as many as it runs at once and as many ahead; the others wait.

    May be used by several threads. A child that this process forks has none of its requests.
    """

    def __init__(self, connection: Connection) -> None:
        """`close` closes the connection, too."""
        self.is_parents = False  # and this process is a fork of it
        self.connection = connection
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
                raise UsageError(CLOSED)
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

        self.connection.submit(request, take)

    def _tell_compiling(self, name: str, begun: threading.Event) -> None:
        """Say at a terminal, once, that a request waits for kernels; until it has begun or left."""
        while not begun.wait(_LOOK_S) and name in self._running:
            with suppress(HotcoldError):
                if self.connection.is_compiling():
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
                    self.connection.cancel(name)

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
        """Take no more, end what has not ended with an error, and close the connection."""
        with self._changing:
            if self._is_closed:
                return
            self._is_closed = True
            waiting, self._waiting = self._waiting, {}
            running = list(self._running)
        for _, deliver in waiting.values():
            deliver(ServiceError("the LLM was closed"))
        for name in running:
            if (reader := self._leave(name)) is not None:
                with suppress(HotcoldError):
                    self.connection.cancel(name)
                reader(ServiceError("the LLM was closed"))
        self.connection.close()


_in_flight: weakref.WeakSet[InFlight] = weakref.WeakSet()


def _forget() -> None:
    for each in _in_flight:
        each.forget()


os.register_at_fork(after_in_child=_forget)
