"""The routes of all APIs over a system that answers as a test says, and their own clients."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import ollama
import openai
from fastapi import FastAPI

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app
from tests.unit.test_server_limits import Client, Deliver, give_client, make_backend

RESULT = Generation("ab", [7, 8], "stop", 3, prefill_s=0.5, decode_s=0.25, queued_s=0.125)
ANSWER = (TokenEvent("a", None, 1), TokenEvent("b", RESULT, 1))
CONTEXT = 512
HELLO = [{"role": "user", "content": "Hello"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALLED = (
    'Well.<tool_call>\n{"name": "look_up", "arguments": {"a": 1}}\n</tool_call>'
    '<tool_call>\n{"name": "look_up", "arguments": {"a": 2}}\n</tool_call>'
)


class Recording(Client):
    """Keeps what was asked."""

    def __init__(self, *events: TokenEvent | BaseException) -> None:
        super().__init__(*(events or ANSWER))
        self.requests: list[GenerateRequest] = []

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        self.requests.append(request)
        return await super().submit(request, deliver)


class Embedding(Recording):
    """Answers each prompt with a vector along its length."""

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        self.requests.append(request)
        vector = [3.0, 4.0 * len(request.prompt_ids or ())]
        deliver(TokenEvent("", Generation("", [], "stop", 1, 0.1, 0.0, embedding=vector)))
        return str(len(self.requests))


@functools.cache
def server() -> tuple[Backend, FastAPI]:
    """One for all tests: it takes long to make."""
    backend = make_backend(Client())
    backend.prompts.context_length = CONTEXT
    return backend, create_app(ServedModels([backend]))


def backend_of(client: Client, num_active: int = 0) -> Backend:
    """The server's, asking this client."""
    backend, _ = server()
    give_client(backend, client)
    backend.num_active = num_active
    return backend


def send(
    client: Client, method: str, path: str, body: Any = None, num_active: int = 0
) -> tuple[httpx.Response, Backend]:
    """What a request is answered; what is taken for a defect is raised."""
    backend = backend_of(client, num_active)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(server()[1])
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.request(method, path, json=body)

    return asyncio.run(ask()), backend


def post(client: Client, path: str, **body: Any) -> httpx.Response:
    return send(client, "POST", path, {"model": "demo", **body})[0]


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def with_client(
    client: Client, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]
) -> Any:
    """What a client of HTTP makes of the routes."""
    backend_of(client)

    async def ask() -> Any:
        transport = httpx.ASGITransport(server()[1])
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await work(http)

    return asyncio.run(ask())


def with_ollama(
    client: Client, work: Callable[[ollama.AsyncClient], Coroutine[Any, Any, Any]]
) -> Any:
    """What Ollama's client makes of the routes."""
    backend_of(client)
    transport = httpx.ASGITransport(server()[1])
    return asyncio.run(work(ollama.AsyncClient("http://localhost", transport=transport)))


def with_openai(
    client: Client, work: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, Any]]
) -> Any:
    """What OpenAI's client makes of the routes."""

    async def ask(http: httpx.AsyncClient) -> Any:
        return await work(
            openai.AsyncOpenAI(
                base_url="http://localhost/v1", api_key="any", http_client=http, max_retries=0
            )
        )

    return with_client(client, ask)


def create(client: Client, **fields: Any) -> Any:
    """A response, as OpenAI's client reads it."""
    return with_openai(client, lambda one: one.responses.create(model="demo", **fields))


def prompt_of(request: GenerateRequest) -> str:
    """The text that the model is given."""
    tokenizer = server()[0].prompts.tokenizer
    assert tokenizer is not None
    return tokenizer.decode(request.prompt_ids or [])


def refused(path: str, body: Any) -> dict[str, Any]:
    """OpenAI's error object of a request that is answered 400, in one line."""
    answer, backend = send(Recording(), "POST", path, {"model": "demo", **body})
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert len(error["message"].splitlines()) == 1 and backend.num_active == 0
    return error
