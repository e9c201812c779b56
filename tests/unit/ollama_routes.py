"""The routes of all APIs over a system that answers as a test says, and their own clients."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import httpx
import ollama
import openai
from fastapi import FastAPI

from hotcold.actors.protocol.messages import (
    DriverLoad,
    GenerateRequest,
    Generation,
    SystemConfig,
    TokenEvent,
)
from hotcold.model.errors import ServiceError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.ui.api.backend import Backend, ServerSettings
from hotcold.ui.api.metrics import Metrics
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app

RESULT = Generation("ab", [7, 8], "stop", 3, prefill_s=0.5, decode_s=0.25, queued_s=0.125)
ANSWER = (TokenEvent("a", None, 1), TokenEvent("b", RESULT, 1))
END = TokenEvent("", RESULT, 1)
CONTEXT = 512
TIMEOUT_S = 60.0
SETTINGS = ServerSettings("demo", max_queue=1, max_tokens=100, request_timeout_s=TIMEOUT_S)
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
Deliver = Callable[[TokenEvent | BaseException], None]


class Client:
    """Delivers `events` to each request as soon as it is queued, and keeps what was asked."""

    def __init__(self, *events: TokenEvent | BaseException, last: int = 0) -> None:
        """With the request of number `last` the time of all is up."""
        self.events = events
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[str] = []
        self.backend: Backend
        self._last = last

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        self.requests.append(request)
        for event in self.answer(request):
            deliver(event)
        if len(self.requests) == self._last:
            self.backend.settings = replace(SETTINGS, request_timeout_s=0.0)
        return str(len(self.requests))

    def answer(self, request: GenerateRequest) -> Sequence[TokenEvent | BaseException]:
        return self.events

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def load(self, with_experts: bool = False) -> DriverLoad:
        if self.events and isinstance(self.events[0], ServiceError):
            raise self.events[0]
        return DriverLoad(1, 2, 0.25)


class Recording(Client):
    """Answers "ab", unless a test says something else."""

    def __init__(self, *events: TokenEvent | BaseException) -> None:
        super().__init__(*(events or ANSWER))


class Embedding(Client):
    """Answers each prompt with a vector, made of its token ids."""

    def __init__(self, vector: Callable[[list[int]], list[float]]) -> None:
        super().__init__()
        self._vector = vector

    def answer(self, request: GenerateRequest) -> Sequence[TokenEvent | BaseException]:
        assert request.wants_embedding and request.sampling.max_tokens == 1
        vector = self._vector(request.prompt_ids or [])
        return [TokenEvent("", Generation("", [], "stop", 1, 0.1, 0.0, embedding=vector))]


def make_backend(client: Client) -> Backend:
    config = SystemConfig(str(DEMO_DIRECTORY), context_length=CONTEXT, max_batch=2)
    backend = Backend(config, SETTINGS)
    give_client(backend, client)
    return backend


def give_client(backend: Backend, client: Any) -> None:
    """Have it ask `client`, and no system."""
    system: Any = object()
    client.backend = backend
    backend.attach(system, client)


@functools.cache
def server() -> tuple[Backend, FastAPI]:
    """One for all tests: it takes long to make."""
    backend = make_backend(Client())
    return backend, create_app(ServedModels([backend]))


def backend_of(client: Client, timeout_s: float = TIMEOUT_S) -> Backend:
    """The server's, asking this client; nothing is left of what others asked."""
    backend, _ = server()
    give_client(backend, client)
    backend.settings = replace(SETTINGS, request_timeout_s=timeout_s)
    backend.metrics = Metrics(SETTINGS.model_name)
    backend.num_active = 0
    return backend


Work = Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]


def over(app: Any, work: Work) -> Any:
    """What a client of HTTP makes of an application; what is taken for a defect is raised."""

    async def ask() -> Any:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await work(http)

    return asyncio.run(ask())


def with_client(client: Client, work: Work, timeout_s: float = TIMEOUT_S) -> Any:
    """What a client of HTTP makes of the routes."""
    backend_of(client, timeout_s)
    return over(server()[1], work)


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


def send(
    client: Client, method: str, path: str, body: Any = None, timeout_s: float = TIMEOUT_S
) -> httpx.Response:
    """What a request is answered; its place is free then."""
    answer: httpx.Response = with_client(
        client, lambda http: http.request(method, path, json=body), timeout_s
    )
    assert server()[0].num_active == 0
    return answer


def post(client: Client, path: str, **body: Any) -> httpx.Response:
    return send(client, "POST", path, {"model": "demo", **body})


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


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
    answer = post(Recording(), path, **body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert len(error["message"].splitlines()) == 1
    return error
