"""Hosts, origins, keys and sizes, and events as clients read them; without a system."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from hotcold.model.errors import UsageError
from hotcold.ui import gate as gates
from hotcold.ui.api import sse
from hotcold.ui.gate import Gate, origin_of


async def _length(scope: Any, receive: Any, send: Any) -> None:
    body = await Request(scope, receive).body()
    await Response(str(len(body)))(scope, receive, send)


def ask(
    gate: Gate, method: str = "GET", path: str = "/v1/models", url: str = "http://localhost:8000",
    **options: Any,
) -> httpx.Response:  # fmt: skip
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(gate)
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def gate(keys: list[str] | None = None, local: bool = True) -> Gate:
    return Gate(_length, keys=keys or [], local=local, max_body_bytes=100)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("localhost:1", True), ("127.0.0.1:8000", True), ("[::1]:8000", True),
        ("evil.example", False), ("127.0.0.1.evil.example", False), ("", False), ("[::1", False),
        ("a@b", False),
    ],
)  # fmt: skip
def test_local_names_alone_are_answered(host: str, is_local: bool) -> None:
    assert ask(gate(), headers={"Host": host}).status_code == (200 if is_local else 403)
    assert ask(gate(["k"], local=False), headers={"Host": host}).status_code == 401


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
def test_refusals_have_the_form_of_the_api_that_is_asked(path: str) -> None:
    for answer in (
        ask(gate(["k"], local=False), "POST", path, json={}),
        ask(gate(), "POST", path, content=b"a" * 101),
        ask(gate(), "POST", path, headers={"Host": "evil.example"}),
    ):
        assert answer.status_code in (401, 403, 413)
        told = answer.json()["error"]
        assert isinstance(told, str) == path.startswith("/api/")
        assert told if isinstance(told, str) else told["message"]


NAVIGATION = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
PICTURE = {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
FRAME = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {"Origin": "http://localhost:8000"}, 200),
        ("GET", {"Origin": "http://localhost:9000"}, 403),
        ("GET", {"Origin": "https://evil.example"}, 403),
        ("GET", {"Origin": "null"}, 403),
        ("GET", {"Sec-Fetch-Site": "same-origin", **PICTURE}, 200),
        ("GET", {"Sec-Fetch-Site": "cross-site", **NAVIGATION}, 200),
        ("GET", {"Sec-Fetch-Site": "cross-site", **PICTURE}, 403),
        ("GET", {"Sec-Fetch-Site": "same-site", **PICTURE}, 403),
        ("GET", {"Sec-Fetch-Site": "cross-site", **FRAME}, 403),
        ("POST", {"Sec-Fetch-Site": "cross-site", **NAVIGATION}, 403),
        ("GET", {"Sec-Fetch-Site": "news", **PICTURE}, 403),
    ],
)
def test_pages_of_others_are_refused(method: str, headers: dict[str, str], status: int) -> None:
    """A browser sends no Origin with a picture's address; a link from elsewhere may lead here."""
    assert ask(gate(), method, headers=headers).status_code == status
    # A browser adds a password by itself, but no bearer's key.
    elsewhere = gate(["k"], local=False)
    assert ask(elsewhere, method, headers=headers, auth=("", "k")).status_code == status
    assert ask(elsewhere, method, headers={**headers, "Authorization": "Bearer k"}).is_success


@pytest.mark.parametrize("host", ["localhost", "evil.example"])
def test_every_answer_tells_browsers_where_they_may_go(host: str) -> None:
    async def careless(scope: Any, receive: Any, send: Any) -> None:
        await Response("a", headers={"Content-Security-Policy": "default-src *"})(
            scope, receive, send
        )

    app = Gate(careless, keys=[], local=True, max_body_bytes=100)
    headers = ask(app, headers={"Host": host}).headers
    rules = headers["content-security-policy"].split("; ")
    assert {"base-uri 'self'", "frame-ancestors 'none'", "form-action 'self'"} <= set(rules)
    (sources,) = (rule for rule in rules if rule.startswith("default-src "))
    assert set(sources.split()[1:]) <= {
        "'self'", "data:", "blob:", "'unsafe-inline'", "'unsafe-eval'",
    }  # fmt: skip
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_a_proxy_on_this_machine_passes_on_the_name_that_was_asked_for() -> None:
    behind, host = gate(["k"], local=True), {"Host": "chat.example.org"}
    assert ask(behind, headers=host).status_code == 401
    assert ask(behind, headers=host, auth=("", "k")).status_code == 200
    for origin, status in (("https://chat.example.org", 200), ("https://evil.example", 403)):
        answer = ask(behind, headers=host | {"Origin": origin}, auth=("", "k"))
        assert answer.status_code == status


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer one", 200),
        ("bearer two", 200),
        ("Basic " + base64.b64encode(b"name:two").decode(), 200),
        ("Basic " + base64.b64encode(b"two:name").decode(), 401),
        ("Bearer one two", 401),
        ("", 401),
    ],
)
def test_keys(authorization: str, status: int) -> None:
    answer = ask(gate(["one", "two"]), headers={"Authorization": authorization})
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"].startswith("Basic")
    assert ask(gate(["one"]), path="/health").status_code == 200
    assert ask(gate(["one"]), path="/health/").status_code == 401


def test_bodies_are_limited_with_and_without_a_length() -> None:
    async def pieces(count: int) -> AsyncGenerator[bytes, None]:
        for _ in range(count):
            yield b"x" * 10

    assert ask(gate(), "POST", content=b"x" * 100).text == "100"
    assert ask(gate(), "POST", content=b"x" * 101).status_code == 413
    assert ask(gate(), "POST", content=pieces(10)).text == "100"
    refused = ask(gate(), "POST", content=pieces(11))
    assert refused.status_code == 413 and refused.json()["error"]["type"]
    assert ask(gate(), "POST", headers={"Content-Length": "-1"}).status_code == 413


def test_a_body_that_does_not_come_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is there is read however late; an answer may take as long as it takes."""
    monkeypatch.setattr(gates, "BODY_S", 0.02)

    async def stuck() -> AsyncGenerator[bytes, None]:
        yield b"x"
        await asyncio.sleep(3600)

    async def late(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.05)
        await _length(scope, receive, send)
        assert (await receive())["type"] == "http.disconnect"

    answer = ask(gate(), content=stuck())
    assert answer.status_code == 408 and answer.headers["connection"] == "close"
    assert ask(Gate(late, keys=[], local=True, max_body_bytes=100), content=b"abc").text == "3"


def test_an_event_is_one_line_whatever_it_holds() -> None:
    ends = "".join(char for char in map(chr, range(0x3000)) if len(f"a{char}b".splitlines()) > 1)
    assert len(ends) > 9
    content = {f"text{ends}": f"a\r\n\n{ends}data: b\x00ü"}
    framed = sse.event(content)
    assert framed.startswith(b"data: ") and framed.endswith(b"\n\n")
    line = framed[len(b"data: ") : -2]
    assert line.decode().splitlines() == [line.decode()]
    assert json.loads(line) == content
    assert "ü".encode() in line
    assert sse.line(content).decode().splitlines() == [sse.line(content).decode()[:-1]]


PAGE = "app://obsidian.md"
GZIP = {"Content-Encoding": "gzip"}
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


def open_gate(keys: list[str], app: Any = _length) -> Gate:
    """One that lets the page ask."""
    return Gate(app, keys=keys, local=True, max_body_bytes=100, origins=[origin_of(PAGE + "/")])


@pytest.mark.parametrize("keys", [[], ["k"]])
def test_an_allowed_page_may_ask_and_read(keys: list[str]) -> None:
    """A preflight has no key; the request has, and each answer may be read, refusals too."""
    told = ask(open_gate(keys), "OPTIONS", headers=PREFLIGHT)
    assert (told.status_code, told.content) == (204, b"")
    assert told.headers["access-control-allow-origin"] == PAGE
    names = told.headers["access-control-allow-headers"].split(", ")
    assert names == ["authorization", "content-type", "x-stainless-os"]
    assert "POST" in told.headers["access-control-allow-methods"].split(", ")
    assert "access-control-allow-private-network" not in told.headers
    asked = {**PREFLIGHT, "Access-Control-Request-Private-Network": "true"}
    asked.pop("Access-Control-Request-Headers")
    told = ask(open_gate(keys), "OPTIONS", headers=asked)
    assert told.headers["access-control-allow-private-network"] == "true"
    assert told.headers["access-control-allow-headers"] == "authorization"
    sent = {"Origin": PAGE, "Authorization": "Bearer k"}
    for status, size, more in ((200, 1, {}), (413, 101, {}), (415, 1, GZIP)):
        answer = ask(open_gate(keys), "POST", headers=sent | more, content=b"a" * size)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["vary"] == "Origin"
    if keys:
        refused = ask(open_gate(keys), "POST", headers={"Origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize("keys", [[], ["k"]])
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "app://obsidian.md.evil", ""])
def test_other_pages_may_not_even_ask_whether_they_may(keys: list[str], origin: str) -> None:
    for one in (open_gate(keys), gate(keys)):
        told = ask(one, "OPTIONS", headers={**PREFLIGHT, "Origin": origin})
        assert told.status_code == 403 and "access-control-allow-origin" not in told.headers
        if not keys:
            assert ask(one, "POST", headers={"Origin": origin}).status_code == 403
    assert ask(gate(keys), "OPTIONS", headers=PREFLIGHT).status_code == 403


@pytest.mark.parametrize(
    ("address", "origin"),
    [("https://Chat.Example.org/", "https://chat.example.org"),
("https://chat.example.org:443", "https://chat.example.org"),
("chrome-extension://abc", "chrome-extension://abc"),
("*", None),
("chat.example.org", None),
("https://*.example.org", None),
("https://a.example/page", None),],
)  # fmt: skip
def test_an_origin_is_a_scheme_and_a_host(address: str, origin: str | None) -> None:
    if origin is not None:
        assert origin_of(address) == origin
    else:
        with pytest.raises(UsageError, match="is no origin: give a scheme and a host"):
            origin_of(address)
