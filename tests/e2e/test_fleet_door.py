"""Hostile clients on real sockets, at one server and at a fleet's door: both answer others."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from hotcold.ui.api.backend import ServerSettings
from hotcold.ui.gate import BODY_S
from tests.e2e.api_fuzz import fuzz, generation
from tests.e2e.server import LONG, WAIT_S, await_that
from tests.e2e.test_fleet import served
from tests.unit.test_connections import read_to_end

pytest.importorskip("ray.serve")
from hotcold.ui.fleet.application import FleetArgs, application

pytestmark = pytest.mark.timeout(300)
ARGS = FleetArgs(options={"threads": 1, "context": 512, "kv-tokens": 2048, "parallel": 2})
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
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
    """A server or a door. `late`: a request of which not all comes."""

    def __init__(self, url: str) -> None:
        self.url, self.expected = url, generation(url)
        self.late = self.connect(HEAD + b"Content-Length: 9\r\n\r\n{")

    def connect(self, sent: bytes) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", urlsplit(self.url).port), BODY_S + WAIT_S)
        with suppress(ConnectionError):  # it may end before all is sent
            made.sendall(sent)
        return made

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=WAIT_S).text

    def is_idle(self) -> bool:
        """Whether nothing runs, waits or holds a page of the KV cache."""
        name = "vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc)"
        return {*re.findall(rf"^{name}\{{[^\n]*\}} (\S+)$", self.metrics(), re.M)} == {"0.0"}


def asking(**fields: Any) -> bytes:
    body = json.dumps({**LONG, "extra_body": None, "ignore_eos": True, **fields}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.fixture(scope="module", params=["server", "fleet"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "server":
        yield Place(request.getfixturevalue("server").url)
    else:
        with served(lambda: application(ARGS)) as url:
            yield Place(url)


@pytest.mark.parametrize("name", ASKED)
def test_a_request_that_is_none_is_refused(place: Place, name: str) -> None:
    sent, status = ASKED[name]
    with place.connect(sent) as client:
        line = read_to_end(client).partition(b"\r\n")[0].decode()
    assert re.fullmatch(status, line.removeprefix("HTTP/1.1 ")[:3]), line
    assert generation(place.url) == place.expected


def test_who_keeps_it_waiting_holds_up_nobody(place: Place) -> None:
    """Without a request, with half of a head, and with streams that nobody reads."""
    kinds = [b"", HEAD, asking(stream=True), asking(stream=True, n=2)]
    clients = [place.connect(sent) for sent in kinds for _ in range(2)]
    assert generation(place.url) == place.expected
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
    assert generation(place.url) == place.expected


def test_malformed_requests_harm_nobody(place: Place) -> None:
    statuses, num_same = fuzz(place.url, 100)
    assert statuses.total() >= 100 and num_same > 0
    assert {*statuses} <= {200, 400, 403, 404, 405, 413}


@pytest.mark.sweep(place=["server"])
def test_a_body_that_does_not_come_is_given_up(place: Place) -> None:
    answer = read_to_end(place.late)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"send it again" in answer
