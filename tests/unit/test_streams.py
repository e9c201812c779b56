"""Streams before their first token and while a call is withheld: a head at once, signs of life."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai._streaming import SSEDecoder

from hotcold.actors.protocol.messages import GenerateRequest, TokenEvent
from hotcold.ui.api import sse
from tests.unit.ollama_routes import HELLO, RESULT, TOOL, backend_of, server
from tests.unit.test_server_limits import Client, Deliver

_CHAT = {"messages": HELLO, "tools": [TOOL]}
_ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", _CHAT),
    ("/v1/completions", {"prompt": "Hello"}),
    ("/v1/responses", {"input": "Hello", "tools": [{"type": "function", **TOOL["function"]}]}),
    ("/api/chat", _CHAT),
    ("/api/generate", {"prompt": "Hello"}),
]
_CALL = '<tool_call>\n{"name": "look_up", "arguments": {"a": 1}}\n</tool_call>'
_WAIT_S = 60.0


class Slow(Client):
    """Delivers nothing by itself."""

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        self.deliver = deliver
        return "1"


class Connection:
    """One request of an ASGI server, and what has been sent of its answer."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.sent: list[Any] = []
        self._body = json.dumps({"model": "demo", "stream": True, **body}).encode()
        self._is_read = False
        self._scope = {
            "type": "http", "method": "POST", "path": path, "headers": [],
            "query_string": b"", "http_version": "1.1", "scheme": "http",
        }  # fmt: skip

    @property
    def pieces(self) -> list[bytes]:
        return [message["body"] for message in self.sent[1:]]

    async def answered(self) -> None:
        await server()[1](self._scope, self._receive, self._send)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(_WAIT_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def until_alive(self, sign: bytes) -> None:
        """Until two more signs of life have come."""
        before = self.pieces.count(sign)
        await self.until(lambda: self.pieces.count(sign) >= before + 2)

    async def _receive(self) -> Any:
        if self._is_read:
            await asyncio.Event().wait()
        self._is_read = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


def texts(path: str, pieces: list[bytes]) -> list[Any]:
    """The JSON of an answer, read as OpenAI's or Ollama's client reads it."""
    whole = b"".join(pieces)
    if path.startswith("/api/"):
        return [json.loads(line) for line in whole.splitlines()]
    events = SSEDecoder().iter_bytes(iter([whole]))
    return [json.loads(one.data) for one in events if one.data not in ("", "[DONE]")]


@pytest.mark.parametrize(("path", "body"), _ROUTES)
def test_a_stream_says_at_once_that_it_lives(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    client = Slow()
    backend = backend_of(client)
    sign = b" " if path.startswith("/api/") else b": still working\n\n"

    async def talk() -> Connection:
        connection = Connection(path, body)
        answering = asyncio.create_task(connection.answered())
        await connection.until(lambda: connection.sent)  # nothing has been read of the prompt
        assert connection.sent[0]["status"] == 200
        await connection.until_alive(sign)
        client.deliver(TokenEvent(_CALL[:20], None, 1))
        await connection.until_alive(sign)
        client.deliver(TokenEvent(_CALL[20:], RESULT, 1))
        await answering
        return connection

    connection = asyncio.run(talk())
    assert connection.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    found = texts(path, connection.pieces)
    assert "look_up" in json.dumps(found) and backend.num_active == 0


def test_a_client_that_leaves_before_the_first_token_ends_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    client = Slow()
    backend = backend_of(client)

    async def talk() -> None:
        connection = Connection("/v1/completions", {"prompt": "Hello"})
        leaves = asyncio.Event()

        async def receive() -> Any:
            if not connection._is_read:
                return await Connection._receive(connection)
            await leaves.wait()
            return {"type": "http.disconnect"}

        answering = asyncio.create_task(server()[1](connection._scope, receive, connection._send))
        await connection.until(lambda: len(connection.sent) > 2)
        leaves.set()
        await answering

    asyncio.run(talk())
    assert client.cancelled == ["1"] and backend.num_active == 0
