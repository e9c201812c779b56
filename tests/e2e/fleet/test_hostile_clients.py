"""Hostile clients on real sockets, at one server and at a fleet's door: both answer others."""

from __future__ import annotations

import json
import re
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.requests import Request

from hotcold.ui import gate
from hotcold.ui.api.backend import ServerSettings
from tests.e2e.fleet.api_fuzz import fuzz, generation
from tests.e2e.server import LONG, WAIT_S, await_that
from tests.unit.test_connections import read_to_end, serving

pytest.importorskip("ray.serve")
from tests.e2e.fleet.doors import KEYS, of, two_replicas

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
LATE = HEAD + b"Content-Length: 9\r\n\r\n{"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
PIECES = (b"10000\r\n" + b"x" * 0x10000 + b"\r\n") * (ServerSettings.max_body_bytes >> 16)
ASKED: dict[str, tuple[bytes, str]] = {  # and the status of the answer, if there is to be one
    "a huge body": (HEAD + b"Content-Length: 99999999999\r\n\r\n", "413"),
    "a huge body in pieces": (CHUNKED + PIECES + b"1\r\nx\r\n", "413"),
    "no JSON": (HEAD + b"Content-Length: 3\r\n\r\n{]}", "400"),
    "a form": (HEAD + b"Content-Type: text/xml\r\nContent-Length: 4\r\n\r\n<a/>", "400"),
    "a compressed body": (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 0\r\n\r\n", "415"),
    "a piece of no length": (CHUNKED + b"zz\r\nx\r\n", "4..|"),
    "two lengths": (HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n{}  ", "4..|"),
    "many headers": (HEAD + b"X-A: b\r\n" * 50_000 + b"\r\n", "4..|"),
    "a long header": (HEAD + b"X-A: " + b"b" * (1 << 20) + b"\r\n\r\n", "4..|"),
    "another protocol": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "4..|"),
}


class Place:
    """A server or a door, which may ask for a key."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self.url, self.headers = url, headers
        self.expected = self.generation()

    def generation(self) -> str:
        return generation(self.url, self.headers)

    def connect(self, sent: bytes) -> socket.socket:
        """A client that has sent this, with the key behind a `HEAD`."""
        key = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items()).encode()
        made = socket.create_connection(
            ("127.0.0.1", urlsplit(self.url).port), gate.BODY_S + WAIT_S
        )
        with suppress(ConnectionError):  # it may end before all is sent
            made.sendall(sent.replace(HEAD, HEAD + key, 1))
        return made

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", headers=self.headers, timeout=WAIT_S).text

    def is_idle(self) -> bool:
        """Whether nothing runs, waits or holds a page of the KV cache."""
        name = "vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc)"
        return {*re.findall(rf"^{name}\{{[^\n]*\}} (\S+)$", self.metrics(), re.M)} == {"0.0"}


def asking(**fields: Any) -> bytes:
    body = json.dumps({**LONG, "extra_body": None, "ignore_eos": True, **fields}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.fixture(scope="module", params=["server", "fleet"])
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "server":
        return Place(request.getfixturevalue("server").url, {})
    return Place(request.getfixturevalue("deployed")(two_replicas), of(KEYS[0]))


@pytest.mark.parametrize("name", ASKED)
def test_a_request_that_is_none_is_refused(place: Place, name: str) -> None:
    sent, status = ASKED[name]
    with place.connect(sent) as client:
        line = read_to_end(client).partition(b"\r\n")[0].decode()
    assert re.fullmatch(status, line.removeprefix("HTTP/1.1 ")[:3]), line
    assert place.generation() == place.expected


def test_who_keeps_it_waiting_holds_up_nobody(place: Place) -> None:
    """Without a request, with half of a head, and with streams that nobody reads."""
    kinds = [b"", HEAD, asking(stream=True), asking(stream=True, n=2)]
    clients = [place.connect(sent) for sent in kinds for _ in range(2)]
    assert place.generation() == place.expected
    for client in clients:
        client.close()
    await_that(place.is_idle)


@pytest.mark.parametrize("is_stream", [True, False])
def test_who_leaves_takes_no_place(place: Place, is_stream: bool) -> None:
    """In the middle of answers that would take a quarter of an hour."""
    with place.connect(asking(stream=is_stream, prompt=["a"] * 16, n=128)):
        await_that(lambda: not place.is_idle())
    await_that(place.is_idle)
    assert 'finished_reason="abort"' in place.metrics()
    with place.connect(asking(stream=is_stream, max_tokens=2)) as client:
        client.shutdown(socket.SHUT_WR)
        read_to_end(client)
    assert place.generation() == place.expected


def test_malformed_requests_harm_nobody(place: Place) -> None:
    statuses, num_same = fuzz(place.url, place.headers, 100)
    assert statuses.total() >= 100 and num_same > 0
    assert {*statuses} <= {200, 400, 403, 404, 405, 413}


@pytest.mark.thorough  # it takes a minute each
def test_a_body_that_does_not_come_is_given_up(place: Place) -> None:
    with place.connect(LATE) as late:
        require_given_up(read_to_end(late))


def require_given_up(answer: bytes) -> None:
    assert answer.startswith(b"HTTP/1.1 408 ") and b"send it again" in answer


def test_a_body_is_not_waited_for_any_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same server over an application that reads, which has less time."""
    monkeypatch.setattr(gate, "BODY_S", 0.05)

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        await Request(scope, receive).body()

    with serving(reads) as connect:
        late = connect()
        late.sendall(LATE)
        require_given_up(read_to_end(late))
