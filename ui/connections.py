"""Connections to the server: how many there may be, and how long one may keep it waiting."""

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

_POLL_S = 1.0


@dataclass(frozen=True)
class ConnectionLimits:
    """What a server allows its connections, whoever is at the other end."""

    most: int = 512
    head_s: float = 30.0  # until a request's head is there, from the start or the last answer
    body_s: float = 60.0  # from the head to the whole request
    send_s: float = 30.0  # with something to send, of which the client reads nothing


class Connections:
    """All connections of one server; uvicorn makes each by calling this as a protocol's class."""

    def __init__(self, limits: ConnectionLimits) -> None:
        """There is none yet."""
        self.limits = limits
        self.open: set[Connection] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> asyncio.Protocol:
        """See `uvicorn.Config(http=)`."""
        return Connection(self, *args, **kwargs)

    async def watch(self) -> None:
        """Cut off connections that are late, for as long as the server's loop runs."""
        while True:
            await asyncio.sleep(_POLL_S)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Cut off each connection that has kept the server waiting for too long at `now`."""
        for connection in list(self.open):
            if connection.look(now):
                connection.cut_off()

    def make_room(self) -> bool:
        """Whether there is room for one more; who has waited longest without asking makes some."""
        if len(self.open) < self.limits.most:
            return True
        idle = [one for one in self.open if one.waits_for == "head"]
        if not idle:
            return False
        min(idle, key=lambda one: one.since).cut_off()
        return True


class Connection(H11Protocol):
    """Uvicorn's connection, with an end to every wait for its client."""

    def __init__(self, connections: Connections, *args: Any, **kwargs: Any) -> None:
        """The arguments after `connections` are uvicorn's."""
        super().__init__(*args, **kwargs)
        self._all = connections
        self.waits_for = "head"  # or "body", "send", "" for nothing: it is the server's turn
        self.since = time.monotonic()
        self._mark = 0  # of what it waits for: requests begun, or bytes that are not sent
        self._num_requests = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        has_room = self._all.make_room()
        self._all.open.add(self)
        if not has_room:
            transport.write(_refusal())
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._all.open.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._note(time.monotonic())

    def on_response_complete(self) -> None:
        """An answer has been handed over to be sent; the next request may come."""
        self._num_requests += 1
        super().on_response_complete()
        self._note(time.monotonic())

    def look(self, now: float) -> bool:
        """Whether the client has kept the server waiting for too long."""
        self._note(now)
        limits = self._all.limits
        allowed = {"head": limits.head_s, "body": limits.body_s, "send": limits.send_s}
        return self.waits_for in allowed and now - self.since >= allowed[self.waits_for]

    def cut_off(self) -> None:
        """End it at once, whatever is still to be sent."""
        self._all.open.discard(self)
        if self.waits_for == "send":  # else the kernel would go on offering it what is unsent
            own = self.transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _note(self, now: float) -> None:
        """Look what it waits for; a wait begins anew where the client has done something."""
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
    """A whole answer to whatever would have been asked."""
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
