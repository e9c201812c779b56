"""Limits of the server's connections: how many, and how long the server waits for a client."""

import asyncio
import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from hotcold.ui.api.errors import unavailable
from hotcold.ui.fair_share import first_to_leave
from hotcold.ui.gate import BODY_S
from hotcold.ui.keys import network_of

# Set in `state` of a page's request for events, which may last as long as the page is open.
IS_STREAM = "is_stream"
_POLL_S = 1.0


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits for every client."""

    most: int = 512
    head_s: float = 30.0  # from the start or the last answer to a request's head
    body_s: float = 1.25 * BODY_S  # from the head to the whole request, where nobody reads that
    send_s: float = 30.0  # in which the client reads nothing of an answer


class Connections:
    """All connections of one server; uvicorn makes each by calling this as a protocol's class."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.open: set[Connection] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> asyncio.Protocol:
        """A connection for `uvicorn.Config(http=)`."""
        return Connection(self, *args, **kwargs)

    async def watch(self) -> None:
        """Poll for late connections for as long as the server's loop runs."""
        while True:
            await asyncio.sleep(_POLL_S)
            self.poll(time.monotonic())

    def poll(self, now: float) -> None:
        """Abort each connection whose client is late at `now`."""
        for connection in list(self.open):
            if connection.is_late(now):
                connection.abort()

    def make_room(self) -> bool:
        """Whether one more may open; where too many are, one that is idle is aborted.

        That is the longest idle one of those that wait for a request, else the oldest of the pages'
        streams of events, of the client that has most of these: browsers open such again.
        """
        if len(self.open) < self.limits.most:
            return True
        by_age = sorted(self.open, key=lambda one: one.since)
        if idle := [one for one in by_age if one.waits_for == "head"]:
            idle[0].abort()
        elif streams := {one: one.network for one in by_age if one.is_stream}:
            first_to_leave(streams).abort()
        return len(self.open) < self.limits.most


class Connection(H11Protocol):
    """Uvicorn's connection, with a timeout for every wait for its client."""

    def __init__(self, connections: Connections, *args: Any, **kwargs: Any) -> None:
        """The arguments after `connections` are uvicorn's."""
        super().__init__(*args, **kwargs)
        self._all = connections
        self.waits_for = "head"  # or "body", "send"; "" while the server works
        self.since = time.monotonic()
        self._mark = 0  # the wait's progress: requests answered, or bytes not sent yet
        self._num_requests = 0

    @property
    def network(self) -> str:
        """The client's network."""
        return network_of(self.client[0] if self.client else "")

    @property
    def is_stream(self) -> bool:
        """Whether it has a page's stream of events, and its client reads it."""
        return self.waits_for == "" and IS_STREAM in self.scope["state"]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse it where there are too many."""
        super().connection_made(transport)
        has_room = self._all.make_room()
        self._all.open.add(self)
        if not has_room:
            transport.write(_refusal())
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._all.open.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a piece of a request."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._note(time.monotonic())

    def on_response_complete(self) -> None:
        """Count an answer that is written; the next request may come."""
        self._num_requests += 1
        super().on_response_complete()
        self._note(time.monotonic())

    def is_late(self, now: float) -> bool:
        """Whether the server has waited for the client for too long."""
        self._note(now)
        limits = self._all.limits
        allowed = {"head": limits.head_s, "body": limits.body_s, "send": limits.send_s}
        return self.waits_for in allowed and now - self.since >= allowed[self.waits_for]

    def abort(self) -> None:
        """Close it at once, without sending the rest."""
        self._all.open.discard(self)
        if self.waits_for == "send":  # else the kernel would go on sending
            own = self.transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _note(self, now: float) -> None:
        """Update what it waits for; a wait starts again where the client made progress."""
        waits_for, mark = self._wait()
        is_same = waits_for == self.waits_for
        if not is_same or (mark < self._mark if waits_for == "send" else mark != self._mark):
            self.since = now
        self.waits_for, self._mark = waits_for, mark

    def _wait(self) -> tuple[str, int]:
        if unsent := self.transport.get_write_buffer_size():
            return "send", unsent
        state = self.conn.their_state
        if self.transport.is_closing() or state is h11.IDLE:
            return "head", self._num_requests
        return ("body" if state is h11.SEND_BODY else ""), self._num_requests


def _refusal() -> bytes:
    """A whole answer, for a connection that is refused."""
    error = unavailable("the server has too many connections; try again later", "connections")
    body = json.dumps(error.body).encode()
    lines = [
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in error.headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
