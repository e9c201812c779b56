"""Clients that keep a server waiting, on real sockets, without a system."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from hotcold.ui import connections
from hotcold.ui.connections import IS_STREAM, ConnectionLimits
from hotcold.ui.server_thread import LoadingGate, ServerThread

_TIMEOUT_S = 30.0
_LONG_S = 3600.0
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n"


@contextmanager
def serving(
    app: Callable[..., Any], asked: bytes = b"", **limits: float
) -> Iterator[Callable[..., socket.socket]]:
    """connect() to a server of `app` whose clients may keep it waiting as long as `limits` say.

    It may be given an address to connect from. The first has sent `asked` before the server begins:
    in time, however busy the machine is.
    """
    patient = {"head_s": _LONG_S, "body_s": _LONG_S, "send_s": _LONG_S}
    listener = socket.create_server(("127.0.0.1", 0))
    gate = LoadingGate("demo")
    gate.use(app)
    allowed = ConnectionLimits(**{**patient, **limits})  # type: ignore[arg-type]
    made: list[socket.socket] = []

    def connect(address: str = "127.0.0.1") -> socket.socket:
        where, source = listener.getsockname(), (address, 0)
        made.append(socket.create_connection(where, _TIMEOUT_S, source))
        return made[-1]

    early = [connect()] if asked else []
    for client in early:
        client.sendall(asked)
    server = ServerThread(listener, gate, [], True, 1 << 20, allowed)
    try:
        yield lambda *address: early.pop() if early else connect(*address)
    finally:
        for one in made:
            one.close()
        server.stop()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_POLL_S", 0.01)


def read_to_end(client: socket.socket) -> bytes:
    """All that comes until the server ends the connection. Errors: TimeoutError if it does not."""
    found = b""
    try:
        while piece := client.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


async def address(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the Host and the path that it is asked for."""
    request = Request(scope)
    text = f"{request.headers['host']} {scope['path']}?{scope['query_string'].decode()}"
    await PlainTextResponse(text)(scope, receive, send)


@pytest.mark.parametrize(
    ("target", "status", "told"),
    [
        ("/a%20b?c", 200, "localhost /a b?c"),
        ("http://localhost/a%20b?c", 200, "localhost /a b?c"),
        ("HTTP://127.0.0.1:80?c", 200, "127.0.0.1:80 /?c"),
        ("http://evil.example/a", 403, "host_refused"),
    ],
)
def test_a_target_may_be_a_whole_address(target: str, status: int, told: str) -> None:
    with serving(address) as connect:
        client = connect()
        client.sendall(
            f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        answer = read_to_end(client).decode()
    assert answer.startswith(f"HTTP/1.1 {status}") and told in answer


def until_answered(client: socket.socket) -> bytes:
    """What comes up to the body that `echo` returns."""
    found = b""
    while not found.endswith(b"\r\n\r\nabc") and (piece := client.recv(1 << 16)):
        found += piece
    return found


def answered(client: socket.socket) -> bool:
    """Whether a request is answered; its connection stays."""
    client.sendall(HEAD + b"\r\nabc")
    return until_answered(client).startswith(b"HTTP/1.1 200 ")


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = (await receive()).get("body", b"")
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize(
    ("asked", "answer"),
    [(b"", b""), (b"POST / HTT", b""), (HEAD, b""), (HEAD + b"\r\nabc", b"\r\n\r\nabc")],
)
def test_a_connection_that_does_not_ask_is_cut_off(asked: bytes, answer: bytes) -> None:
    """After its last answer, too."""
    with serving(echo, asked, head_s=0.2) as connect:
        found = read_to_end(connect())
        assert found.endswith(answer) and bool(found) == bool(answer)


def test_a_body_that_does_not_come_is_cut_off() -> None:
    with serving(echo, body_s=0.05) as connect:
        client = connect()
        client.sendall(HEAD + b"\r\na")
        assert b"abc" not in read_to_end(client)


def test_a_head_that_drips_has_no_longer() -> None:
    with serving(echo, head_s=0.05) as connect:
        client, ended = connect(), threading.Event()

        def drip() -> None:
            while not ended.wait(0.005):
                try:
                    client.sendall(b"G")
                except OSError:
                    return

        threading.Thread(target=drip, daemon=True).start()
        assert read_to_end(client) == b""
        ended.set()


def test_an_answer_may_take_as_long_as_it_takes() -> None:
    """The connection that waits for an answer outlives one that began later and asked nothing."""
    may_answer = threading.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.to_thread(may_answer.wait, _TIMEOUT_S)
        await echo(scope, receive, send)

    asked = HEAD + b"\r\nabc"
    with serving(slow, asked, head_s=0.05, body_s=0.05, send_s=0.05) as connect:
        request_state = connect()
        assert read_to_end(connect()) == b""
        may_answer.set()
        assert b"abc" in read_to_end(request_state)


def test_a_client_that_does_not_read_is_cut_off() -> None:
    """What it holds of the application ends with it."""
    ended = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.ensure_future(receive())
        while not gone.done():
            piece = {"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True}
            await send(piece)
            await asyncio.sleep(0)
        assert gone.result() == {"type": "http.disconnect"}
        ended.set()

    with serving(endless, send_s=0.05) as connect:
        client = connect()
        client.sendall(HEAD + b"\r\nabc")
        assert ended.wait(_TIMEOUT_S)


def test_an_answer_that_nobody_reads_is_not_kept() -> None:
    """The application is done with it, so nobody else would notice."""
    sizes: list[int] = []

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-length", b"50000000"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * 50_000_000})
        sizes.append(50_000_000)

    with serving(large, send_s=0.05) as connect:
        client = connect()
        client.sendall(HEAD + b"\r\nabc")
        select.select([client], [], [], _TIMEOUT_S)
        hang_up = select.poll()
        hang_up.register(client, select.POLLERR)  # of a connection that was cut off
        assert hang_up.poll(_TIMEOUT_S * 1000)
        assert sizes == [50_000_000]


def test_who_waits_longest_without_asking_makes_room() -> None:
    with serving(echo, most=2) as connect:
        first, second = connect(), connect()
        for client in (first, second):
            assert answered(client)
        third = connect()
        assert read_to_end(first) == b""
        for client in (third, second):
            assert answered(client)


def test_who_has_most_streams_of_events_makes_room() -> None:
    """Not who has one for longer."""

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] != "GET":
            await echo(scope, receive, send)
            return
        scope["state"][IS_STREAM] = True
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"began", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    with serving(stream, most=4) as connect:
        streams = [connect(f"127.0.0.{host}") for host in (1, 2, 2, 2)]
        for client in streams:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            found = b""
            while b"began" not in found:
                found += client.recv(1 << 16)
        assert answered(connect())
        read_to_end(streams[1])
        going_on, _, _ = select.select(streams[:1] + streams[2:], [], [], 0)
        assert not going_on  # none of these has ended


def test_where_nobody_can_make_room_a_connection_is_refused() -> None:
    asking_began, may_answer = threading.Event(), threading.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        asking_began.set()
        await asyncio.to_thread(may_answer.wait, _TIMEOUT_S)
        await echo(scope, receive, send)

    with serving(slow, most=1) as connect:
        request_state = connect()
        request_state.sendall(HEAD + b"\r\nabc")
        assert asking_began.wait(_TIMEOUT_S)
        answer = read_to_end(connect())
        assert answer.startswith(b"HTTP/1.1 503 ") and b"too many connections" in answer
        may_answer.set()
        assert b"abc" in until_answered(request_state)


def test_a_client_that_leaves_while_its_answer_is_written_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked, left, written = threading.Event(), threading.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        asked.set()
        left.wait(_TIMEOUT_S)  # the loop notices nothing meanwhile
        for _ in range(20):
            await send({"type": "http.response.body", "body": b"piece", "more_body": True})
        written.set()

    with serving(app) as connect:
        client = connect()
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert asked.wait(_TIMEOUT_S)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        left.set()
        assert written.wait(_TIMEOUT_S)
    assert caplog.records == []
