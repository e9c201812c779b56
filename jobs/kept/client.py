"""The client of a running system that another process holds, over its Unix socket.

The socket answers HTTP: the whole API of `hotcold serve`, and the local control API below /own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hotcold.actors.protocol.messages import (
    GenerateRequest,
    Generation,
    SystemConfig,
    TokenEvent,
    TokenLogprob,
)
from hotcold.jobs.kept.registry import Record, socket_path
from hotcold.model.errors import HotcoldError, PromptError, ServiceError, UsageError

GONE = "it has just ended, so this command starts its own"  # said where one falls back
_ASK_S = 10.0
_POLL_S = 0.02
_LOADING = "loading"  # the error code of a system that still loads
_LOST = (OSError, http.client.HTTPException, json.JSONDecodeError, StopIteration)
_MOST_UNKNOWN = 1000


class GoneError(ServiceError):
    """The system has ended, before it began to answer."""


class LoadingError(ServiceError):
    """The system does not answer yet."""


class _Connection(http.client.HTTPConnection):
    """To the socket at a path; another thread may cut it off at any moment, also beforehand."""

    def __init__(self, path: Path, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = str(path)
        self._cut_off = threading.Event()
        # http.client drops `sock` where an answer ends the connection.
        self._socket: socket.socket | None = None

    @property
    def is_cut_off(self) -> bool:
        return self._cut_off.is_set()

    def connect(self) -> None:
        """See HTTPConnection; waits where the system has many to accept. Errors: OSError."""
        self.sock = self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        deadline = None if self.timeout is None else time.monotonic() + self.timeout
        self.sock.setblocking(False)
        while not self.is_cut_off:
            try:
                self.sock.connect(self._path)
                break
            except BlockingIOError:
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError from None
                self._cut_off.wait(_POLL_S)
        if self.is_cut_off:  # what is cut off from now on has a connection
            raise ConnectionAbortedError
        self.sock.settimeout(self.timeout)

    def cut_off(self) -> None:
        """Whoever reads an answer comes to its end, and no other one begins."""
        self._cut_off.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class KeptSystem:
    """Sends requests to one running system; may be used by several threads."""

    def __init__(self, folder: Path, record: Record, keep_s: float | None = None) -> None:
        """`keep_s`: how long it stays after each request of this client; None: unchanged."""
        self.record = record
        self._path = socket_path(folder, record.name)
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._running: dict[str, _Connection] = {}  # by request id
        # Ids that were cancelled while no request had them: it is to come, or has ended.
        self._cancelled_unknown: deque[str] = deque(maxlen=_MOST_UNKNOWN)

    def __reduce__(self) -> Any:
        return KeptSystem, (self._path.parent, self.record, self._keep_s)

    @property
    def model_path(self) -> Path:
        """The model's directory or file."""
        return Path(self.record.resolved["model_path"])

    @property
    def config(self) -> SystemConfig:
        """The system's config as far as its options tell; with --mode auto its mode may change."""
        names = {field.name for field in fields(SystemConfig)}
        known = {name: value for name, value in self.record.resolved.items() if name in names}
        return SystemConfig(**{"mode": self.state().get("mode", ""), **known})

    def generate(self, request: GenerateRequest) -> Iterator[TokenEvent]:
        """Stream a request; closing the iterator, or the end of this process, cancels it.

        Errors:  GoneError, LoadingError; PromptError; ServiceError if it failed
        """
        for event, _ in self.answer(request):
            yield event

    def answer(self, request: GenerateRequest) -> Iterator[tuple[TokenEvent, dict[str, Any]]]:
        """As `generate`, with facts about the system beside the last event."""
        has_begun = False
        with self._cancellable(request.request_id) as connection:
            try:
                body = {"request": asdict(request), "keep_s": self._keep_s}
                for line in _lines(connection, "POST", "/own/generate", body):
                    has_begun = True
                    yield _event(line), line.get("about", {})
                    if "result" in line:
                        return
            except _LOST:
                pass
            if not connection.is_cut_off:
                raise self._ended(ServiceError if has_begun else GoneError)

    @contextmanager
    def _cancellable(self, request_id: str) -> Iterator[_Connection]:
        """A connection that `cancel` of this request cuts off."""
        with closing(_Connection(self._path, None)) as connection:
            with self._lock:
                self._running[request_id] = connection
                if request_id in self._cancelled_unknown:
                    self._cancelled_unknown.remove(request_id)
                    connection.cut_off()
            try:
                yield connection
            finally:
                with self._lock:
                    self._running.pop(request_id, None)

    def cancel(self, request_id: str) -> None:
        """End a request that another thread reads, or is to; its events end without a result."""
        with self._lock:
            connection = self._running.get(request_id)
            if connection is None:
                self._cancelled_unknown.append(request_id)
        if connection is not None:
            connection.cut_off()

    def state(self) -> dict[str, Any]:
        """The system's state; while it loads, its progress.

        `status` is "ready", "loading", or "silent" where it has not answered for ten seconds.
        Errors:  GoneError
        """
        try:
            return self._get("/own/state")
        except TimeoutError:
            return {"status": "silent"}

    def telemetry(self) -> dict[str, Any]:
        """What the system does now, as `ui.telemetry` gives it. Services count while it is polled.

        Errors:  GoneError, LoadingError, ServiceError
        """
        try:
            return self._get("/own/telemetry")
        except TimeoutError:
            raise self._silent() from None

    def scale(self, num_cpu_actors: int) -> dict[str, int]:
        """Change the number of CPU services, which may take minutes.

        Returns num_cpu_actors, num_cpu_actors_before and num_threads.
        Errors:  GoneError, LoadingError; HotcoldError, and the system goes on
        """
        body = {"num_cpu_actors": num_cpu_actors}
        with closing(_Connection(self._path, None)) as connection:
            try:
                return next(_lines(connection, "POST", "/own/scale", body))
            except _LOST:
                raise self._ended() from None

    def _get(self, path: str) -> dict[str, Any]:
        """The object that a route answers. Errors: GoneError, TimeoutError; those of `_lines`."""
        with closing(_Connection(self._path, _ASK_S)) as connection:
            return self._first(connection, path)

    def _first(self, connection: _Connection, path: str) -> dict[str, Any]:
        """The first object of a route. Errors: those of `_get`."""
        try:
            return next(_lines(connection, "GET", path))
        except TimeoutError:
            raise
        except _LOST:
            raise self._ended() from None

    @contextmanager
    def attended(self) -> Iterator[dict[str, Any]]:
        """Within it the system does not end because it is idle; gives its state.

        Errors:  GoneError, LoadingError, ServiceError
        """
        with closing(_Connection(self._path, _ASK_S)) as connection:
            try:
                self._first(connection, "/own/attend")
                state = self._get("/own/state")
            except TimeoutError:
                raise self._silent() from None
            yield state

    def _ended(self, kind: type[ServiceError] = GoneError) -> ServiceError:
        return kind(f"the system {self.record.name!r} has ended")

    def _silent(self) -> ServiceError:
        name = self.record.name
        return ServiceError(
            f"the system {name!r} does not answer; end it with `hotcold stop {name}`"
        )


def _lines(
    connection: _Connection, method: str, path: str, body: dict[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """The JSON objects of an answer, as they come. Errors: HotcoldError; those of `_LOST`."""
    try:
        content = None if body is None else json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise PromptError(
            "the prompt, or an option, is no valid Unicode text; give it in UTF-8"
        ) from None
    connection.request(method, path, content)
    response = connection.getresponse()
    if response.status != 200:
        raise _error(json.loads(response.read()))
    while line := response.readline():
        found = json.loads(line)
        if "error" in found:
            raise _error(found)
        yield found


def _error(answer: dict[str, Any]) -> HotcoldError:
    error = answer.get("error", {})
    text = str(error.get("message", answer))
    if error.get("code") == _LOADING:
        return LoadingError(text)
    if error.get("param") == "prompt":
        return PromptError(text)
    if error.get("type") == "server_error":  # of this request; the system goes on
        return HotcoldError(text)
    return UsageError(text) if error.get("type") == "invalid_request_error" else ServiceError(text)


def _event(line: dict[str, Any]) -> TokenEvent:
    result = line.get("result")
    whole = None if result is None else Generation.of_values(result)
    logprobs, prompt_logprobs = (
        tuple(
            TokenLogprob(token_id, logprob, tuple((other, value) for other, value in top), *at)
            for token_id, logprob, top, *at in line.get(name, ())
        )
        for name in ("logprobs", "prompt_logprobs")
    )
    return TokenEvent(
        line["text"],
        whole,
        line["num_tokens"],
        logprobs,
        prompt_logprobs,
        tuple(line["token_ids"]),
        line.get("num_prompt_tokens", 0),
        line.get("thought", ""),
        line.get("said_at", 0),
    )
