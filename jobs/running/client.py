"""The client of a running system that another process holds: HTTP at its server's Unix socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import hotcold
from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig, TokenEvent
from hotcold.actors.protocol.wire import event_of
from hotcold.jobs.running.in_flight import Deliver
from hotcold.jobs.running.registry import Record, found_folder
from hotcold.model.errors import HotcoldError, PromptError, ServiceError, UsageError

SILENT = "silent"  # the status of a system that has not answered for ten seconds
_ASK_S = 10.0
_LOST = (OSError, http.client.HTTPException, ValueError, StopIteration)


class GoneError(ServiceError):
    """The system has ended, before it began to answer."""


class LoadingError(ServiceError):
    """The system does not answer yet."""


class _Connection(http.client.HTTPConnection):
    """To the socket at a path; another thread may cut it off at any moment, also beforehand."""

    def __init__(self, path: Path, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self.is_cut_off = False
        self._path = str(path)
        # http.client drops `sock` where an answer ends the connection.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)

    def connect(self) -> None:
        """See HTTPConnection. Errors: OSError."""
        self.sock = self._socket
        if not self.is_cut_off:
            self.sock.connect(self._path)
        if self.is_cut_off:  # what is cut off from now on has a connection
            raise ConnectionAbortedError

    def cut_off(self) -> None:
        """Whoever reads an answer comes to its end, and no other one begins."""
        self.is_cut_off = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See HTTPConnection."""
        super().close()
        self._socket.close()


class Client:
    """Sends requests to one running system; may be used by several threads."""

    def __init__(self, record: Record, keep_s: float | None = None) -> None:
        """`keep_s`: how long it stays after each request of this client; None: unchanged."""
        self.record = record
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._running: dict[str, _Connection] = {}  # by request id
        self.facts: dict[str, Any] = {}  # its last state that was "ready"
        self._attending = contextlib.ExitStack()

    def attend(self) -> Client:
        """This client, whose system does not end for want of requests until `close`.

        Errors:  GoneError, LoadingError, ServiceError
        """
        connection = self._connection(_ASK_S)
        self._attending.callback(connection.close)
        try:
            self.facts = self._first(connection, "state", {"attend": "true"})
        except TimeoutError:
            raise self.silent() from None
        return self

    def __reduce__(self) -> Any:
        return _attending, (self.record, self._keep_s)

    @property
    def model_path(self) -> Path:
        """The model's directory or file."""
        return Path(self.record.resolved["model_path"])

    @property
    def max_batch(self) -> int:
        """How many requests run at once."""
        return int(self.record.resolved["max_batch"])

    @property
    def config(self) -> SystemConfig:
        """What runs. Errors: those of `state`."""
        facts = self.facts or self.state()
        return SystemConfig.from_json(json.dumps(facts["system"]).encode())

    def generate(self, request: GenerateRequest) -> Iterator[TokenEvent]:
        """Stream a request; closing the iterator, or the end of this process, cancels it.

        From the call on `cancel` ends it.

        Errors:  GoneError, LoadingError; PromptError; ServiceError if it failed
        """
        connection = self._connection(None)
        with self._lock:
            self._running[request.request_id] = connection
        return self._events(connection, request)

    def _events(self, connection: _Connection, request: GenerateRequest) -> Iterator[TokenEvent]:
        has_begun = False
        try:
            body = {"request": asdict(request), "keep_s": self._keep_s}
            for line in self._lines(connection, "generate", body):
                has_begun = True
                event = event_of(line)
                yield event
                if event.result is not None:
                    return
        except _LOST:
            pass
        finally:
            with self._lock:
                self._running.pop(request.request_id, None)
            connection.close()
        if not connection.is_cut_off:
            raise self._ended(ServiceError if has_begun else GoneError)

    def cancel(self, request_id: str) -> None:
        """End a request that another thread reads, or is to; its events end without a result."""
        with self._lock:
            if (connection := self._running.get(request_id)) is not None:
                connection.cut_off()

    def submit(self, request: GenerateRequest, deliver: Deliver) -> None:
        """Queue a request, which has an id; all that goes wrong is delivered."""
        events = self.generate(request)

        def read() -> None:
            try:
                for event in events:
                    deliver(event)
            except Exception as error:
                deliver(error)

        threading.Thread(target=read, daemon=True).start()

    def state(self, **wanted: str) -> dict[str, Any]:
        """The system's state (ui/system_routes.py); while it loads, its progress.

        `status` is "ready", "loading", "not loaded", or SILENT.
        Errors:  GoneError, ServiceError
        """
        try:
            with closing(self._connection(_ASK_S)) as connection:
                found = self._first(connection, "state", wanted)
        except TimeoutError:
            return {"status": SILENT}
        if found["status"] == "ready":
            self.facts = found
        return found

    def telemetry(self) -> dict[str, Any]:
        """What the system does now, as `ui.telemetry` gives it. Services count while it is polled.

        Errors:  GoneError, LoadingError, ServiceError
        """
        try:
            with closing(self._connection(_ASK_S)) as connection:
                return self._first(connection, "telemetry", {})
        except TimeoutError:
            raise self.silent() from None

    def is_compiling(self) -> bool:
        """Whether requests wait for kernels that are being compiled. Errors: HotcoldError."""
        return bool(self.state().get("is_compiling"))

    def scale(self, num_cpu_actors: int) -> dict[str, int]:
        """Change the number of CPU services, which may take minutes.

        Returns num_cpu_actors, num_cpu_actors_before and num_threads.
        Errors:  GoneError, LoadingError; HotcoldError, and the system goes on
        """
        with closing(self._connection(None)) as connection:
            return self._first(connection, "scale", {}, {"num_cpu_actors": num_cpu_actors})

    def end_sharing(self) -> None:
        """Nothing: it is no system of this process's own."""

    def close(self) -> None:
        """Attend no more; may be repeated."""
        self._attending.close()

    def _connection(self, timeout_s: float | None) -> _Connection:
        return _Connection((found_folder() or Path("/")) / self.record.socket, timeout_s)

    def _first(
        self,
        connection: _Connection,
        name: str,
        wanted: dict[str, str],
        body: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The first object of a route's answer. Errors: TimeoutError; GoneError; HotcoldError."""
        try:
            return next(self._lines(connection, name, body, **wanted))
        except TimeoutError:
            raise
        except _LOST:
            raise self._ended() from None

    def _lines(
        self, connection: _Connection, name: str, body: dict[str, Any] | None, **wanted: str
    ) -> Iterator[dict[str, Any]]:
        """The JSON objects of a route's answer, as they come. Errors: HotcoldError; `_LOST`."""
        model, path = self.record.model, f"/v1/hotcold/{name}"
        if body is None:
            connection.request("GET", f"{path}?{urlencode({'model': model, **wanted})}")
        else:
            connection.request("POST", path, _encoded({"model": model, **body}))
        response = connection.getresponse()
        if response.status == 200 and response.getheader("hotcold-version") == hotcold.__version__:
            while line := response.readline():
                found = json.loads(line)
                if "error" in found:
                    raise _error(found["error"])
                yield found
            return
        found = json.loads(response.read())
        if name == "state" and found.get("status") == "loading":
            yield found
            return
        error = found.get("error")
        if not isinstance(error, dict) or (response.status == 404 and not error.get("code")):
            raise ServiceError(
                f"the system {self.record.name!r} is of another version of hotcold; end it with "
                f"`hotcold stop {self.record.name}`"
            )
        raise _error(error)

    def _ended(self, kind: type[ServiceError] = GoneError) -> ServiceError:
        return kind(f"the system {self.record.name!r} has ended")

    def silent(self) -> ServiceError:
        """The error of a system that has not answered in time."""
        name = self.record.name
        return ServiceError(
            f"the system {name!r} does not answer; end it with `hotcold stop {name}`"
        )


def _attending(record: Record, keep_s: float | None) -> Client:
    """A client that another process has sent. Errors: those of `attend`."""
    return Client(record, keep_s).attend()


def _encoded(body: dict[str, Any]) -> bytes:
    """A request's body. Errors: PromptError."""
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise PromptError(
            "the prompt, or an option, is no valid Unicode text; give it in UTF-8"
        ) from None


def _error(error: dict[str, Any]) -> HotcoldError:
    text, kind = str(error.get("message", error)), error.get("type")
    if error.get("code") == "loading":
        return LoadingError(text)
    if error.get("param") == "prompt":
        return PromptError(text)
    if kind == "server_error":  # of this request; the system goes on
        return HotcoldError(text)
    return UsageError(text) if kind == "invalid_request_error" else ServiceError(text)
