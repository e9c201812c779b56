"""Deadlines, the queue and failures of a server, over a system that answers as a test says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import psutil
import pytest
from fastapi.routing import APIRoute

from hotcold.actors.protocol.failures import RequestError
from hotcold.actors.protocol.messages import (
    DriverLoad,
    GenerateRequest,
    Generation,
    SystemConfig,
    TokenEvent,
    TokenLogprob,
)
from hotcold.model.errors import PromptTooLongError, ServiceError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.ui.api.answer import answer_of, whole
from hotcold.ui.api.backend import Backend, ServerSettings
from hotcold.ui.api.completions import CompletionAnswer
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.schemas import CompletionRequest, parse
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app
from hotcold.ui.system_routes import SystemRoutes

END = TokenEvent("", Generation("ab", [7, 8], "stop", 2, 0.1, 0.1), 1)
_TIMEOUT_S = 60.0
Deliver = Callable[[TokenEvent | BaseException], None]


class Client:
    """Delivers `events` to each request as soon as it is queued."""

    def __init__(self, *events: TokenEvent | BaseException, last: int = 0) -> None:
        """With the request of number `last` the time of all is up."""
        self.events = events
        self.cancelled: list[str] = []
        self.num_submitted = 0
        self.backend: Backend
        self._last = last

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        self.num_submitted += 1
        for event in self.events:
            deliver(event)
        if self.num_submitted == self._last:
            self.backend.settings = replace(self.backend.settings, request_timeout_s=0.0)
        return str(self.num_submitted)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def load(self, with_experts: bool = False) -> DriverLoad:
        if self.events and isinstance(self.events[0], ServiceError):
            raise self.events[0]
        return DriverLoad(1, 2, 0.25)


def make_backend(client: Client, num_active: int = 0, timeout_s: float = _TIMEOUT_S) -> Backend:
    config = SystemConfig(str(DEMO_DIRECTORY), context_length=128, max_batch=2)
    backend = Backend(config, ServerSettings("demo", 1, 100, timeout_s))
    give_client(backend, client)
    backend.num_active = num_active
    return backend


def give_client(backend: Backend, client: Any) -> None:
    """Have it ask `client`, and no system."""
    system: Any = object()
    client.backend = backend
    backend.attach(system, client)


def ask(
    client: Client,
    path: str = "/v1/completions",
    num_active: int = 0,
    timeout_s: float = _TIMEOUT_S,
    **body: Any,
) -> tuple[httpx.Response, Backend]:
    backend = make_backend(client, num_active, timeout_s)

    async def send(http: httpx.AsyncClient) -> httpx.Response:
        return await (http.post(path, json=body) if body else http.get(path))

    return over_http(backend, send), backend


def over_http(backend: Backend, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """What a client of HTTP makes of a server with this model."""

    async def ask() -> Any:
        app = create_app(ServedModels([backend]))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await work(http)

    return asyncio.run(ask())


@pytest.mark.parametrize(("num_prompts", "echo"), [(1000, True), (1000, False), (100, True)])
def test_logprobs_of_many_answers(num_prompts: int, echo: bool) -> None:
    """They are refused before anything runs, or end the request once they are too many."""
    scored = TokenLogprob(7, -0.5, [(n, -0.5 * n) for n in range(20)])
    part = TokenEvent("a", None, 1, (scored,) * 100)
    client = Client(part if num_prompts > 100 else TokenEvent("a", None, 1), END)
    prompts = [[5] * 120] * num_prompts
    asked: dict[str, Any] = {"prompt": prompts, "logprobs": 20, "echo": echo, "max_tokens": 5}
    response, backend = ask(client, **asked)
    assert backend.num_active == 0
    if num_prompts == 100:
        assert response.status_code == 200 and client.num_submitted == 100
        return
    assert response.status_code == 400
    assert "too many logprobs for one request" in response.json()["error"]["message"]
    assert client.num_submitted == 0 if echo else 700 < client.num_submitted < 1000


LONG = [{"role": "user", "content": "a " * (1 << 20)}]


class Vectors(Client):
    """Answers each prompt with a long vector."""

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        vector = [1 / 3 + len(request.prompt_ids or ())] * 100_000
        deliver(TokenEvent("", Generation("", [], "stop", 2, 0.1, 0.0, embedding=vector)))
        return ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a word or two, " * 60_000}),  # in another process
        ("/detokenize", {"tokens": [300, 301] * 500_000}),
        ("/v1/embeddings", {"input": [[1, 2]] * 10}),
    ],
)
def test_others_are_answered_while_a_large_request_is(path: str, body: dict[str, Any]) -> None:
    num_answered = 0

    async def send(http: httpx.AsyncClient) -> None:
        nonlocal num_answered
        content = json.dumps(body).encode()
        large = asyncio.create_task(http.post(path, content=content, timeout=300))
        while not large.done():
            await asyncio.sleep(0)
            num_answered += (await http.get("/health")).is_success
        assert large.result().is_success and len(large.result().content) > 100_000

    over_http(make_backend(Vectors()), send)
    assert num_answered > 20  # ten, where the loop does it; 39 to thousands where threads do


def test_a_long_text_is_given_up_with_its_client() -> None:
    """The process that encodes it is ended; the next text is encoded by another."""
    backend = make_backend(Client())
    long, few = "a word or two, " * 200_000, "a word or two, " * 20_000
    before = set(psutil.Process().children())

    async def ask_and_leave() -> list[list[int]]:
        first = await backend.in_thread(partial(backend.prompts.encode, few, True))
        (process,) = set(psutil.Process().children()) - before
        used = process.cpu_times().user
        request_state = asyncio.create_task(
            backend.in_thread(lambda unwanted: backend.prompts.encode(long, True, unwanted))
        )
        while process.cpu_times().user < used + 0.1:  # it encodes
            await asyncio.sleep(0.01)
        request_state.cancel()
        await asyncio.to_thread(process.wait, 60)
        return [first, await backend.in_thread(partial(backend.prompts.encode, few, True))]

    tokenizer = backend.prompts.tokenizer
    assert tokenizer is not None
    assert asyncio.run(ask_and_leave()) == [tokenizer.encode(few)] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_what_takes_too_long_is_cancelled(stream: bool) -> None:
    """A stream has its head by then."""
    client = Client(last=2)
    answer, backend = ask(client, prompt=[1, 2], n=2, stream=stream)
    assert answer.status_code == (200 if stream else 504)
    (error,) = [json.loads(line)["error"] for line in re.findall(r"\{.*\}", answer.text)]
    assert error["type"] == "timeout" and "4 tokens of prompts" in error["message"]
    assert sorted(client.cancelled) == ["1", "2"] and backend.num_active == 0


@pytest.mark.parametrize(
    ("error", "status"), [(RequestError("a NaN"), 500), (ServiceError("it died"), 503)]
)
def test_failures_of_the_system_are_told(error: Exception, status: int) -> None:
    answer, backend = ask(Client(error), prompt=[1, 2])
    assert answer.status_code == status and str(error) in answer.json()["error"]["message"]
    assert backend.num_active == 0


@pytest.mark.parametrize(
    ("path", "field", "prompt"),
    [
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "a"}]),
        ("/v1/completions", "prompt", [1]),
        ("/v1/responses", "input", "a"),
        ("/v1/embeddings", "input", [1]),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_an_error_of_the_prompt_names_its_field(
    path: str, field: str, prompt: Any, begun: bool
) -> None:
    """Also of a request that the driver refuses after others of the same answer have begun.

    Streams of /v1/responses tell it by the event that makes agents such as Codex shorten.
    """
    events = [TokenEvent("a", None, 1)] * begun
    body = {field: prompt} | ({} if path == "/v1/embeddings" else {"stream": True})
    answer, _ = ask(Client(*events, PromptTooLongError("it is long")), path=path, **body)
    in_stream = "stream" in body and (begun or path == "/v1/responses")
    assert answer.status_code == (200 if in_stream else 400)
    said = [json.loads(line) for line in re.findall(r"\{.*\}", answer.text)][-1]
    if answer.status_code == 200 and path == "/v1/responses":  # which names no field
        assert said["type"] == "response.failed"
        error = {"code": "context_length_exceeded", "message": "it is long"}
        assert said["response"]["error"] == error
    else:
        assert said["error"]["param"] == field
        assert said["error"]["code"] == "context_length_exceeded"


def test_the_deadline_counts_what_comes_before_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(self: Backend, requests: Any) -> Any:
        assert self.num_active == 1, "no place was taken"
        await asyncio.Event().wait()

    monkeypatch.setattr(Backend, "prompt_ids", stuck)
    answer, backend = ask(Client(END), timeout_s=0.2, prompt=[1])
    assert answer.status_code == 504 and backend.num_active == 0


class Slow(Client):
    """Answers each request once it is let to, and tells how many wait for that."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[int]] = []
        self.held: list[Deliver] = []
        self.most_held = 0

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        await asyncio.sleep(0)
        self.asked.append(list(request.prompt_ids or ()))
        self.held.append(deliver)
        self.most_held = max(self.most_held, len(self.held))
        return str(len(self.asked))

    def answer(self) -> None:
        self.held.pop(0)(END)


def prompts_of_one(count: int, first: int = 0) -> list[list[int]]:
    return [[number] for number in range(first, first + count)]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        while not is_so():
            await asyncio.sleep(0)


def test_a_list_of_a_hundred_prompts_waits_for_itself_and_lets_others_between() -> None:
    """Two run side by side and one more may wait."""
    client = Slow()
    backend = make_backend(client)

    async def asked(**fields: Any) -> dict[str, Any]:
        body = parse(CompletionRequest, json.dumps(fields).encode())
        return await whole(CompletionAnswer(backend, body))

    async def run() -> dict[str, Any]:
        many = asyncio.create_task(asked(prompt=prompts_of_one(100)))
        await until(lambda: len(client.held) == 2)
        assert backend.num_active == 2
        other = asyncio.create_task(asked(prompt=[500]))
        await until(lambda: len(client.held) == 3)
        assert backend.num_active == 3
        with pytest.raises(ApiError, match="queue is full"):
            await asked(prompt=[501])
        for _ in range(3):  # in the order in which they came
            client.answer()
        await other
        assert len(client.asked) < 10
        while not many.done():
            await until(lambda: bool(client.held) or many.done())
            if client.held:
                client.answer()
        return await many

    found = asyncio.run(run())
    assert [one["index"] for one in found["choices"]] == list(range(100))
    assert found["usage"]["prompt_tokens"] == 100 * 2  # as the stand-in says
    assert sorted(client.asked) == [*prompts_of_one(100), [500]]
    assert client.most_held == 3 and backend.num_active == 0


@pytest.mark.parametrize("num_read", [0, 2, None])
def test_a_client_that_does_not_read_or_leaves_frees_its_places(num_read: int | None) -> None:
    """At the deadline where it reads no more; None: it has left before the stream began."""
    client = Client(TokenEvent("a", None, 1))
    backend = make_backend(client)
    places = []

    async def run() -> None:
        body = parse(CompletionRequest, b'{"prompt": [1, 2], "n": 2, "stream": true}')
        stream: Any = await answer_of(CompletionAnswer(backend, body), True)
        places.append(backend.num_active)
        now = asyncio.get_running_loop().time()
        assert stream.deadline is not None and 0 < stream.deadline - now <= _TIMEOUT_S
        if num_read is not None:
            stream.deadline = now
        sent: list[Any] = []

        async def receive() -> Any:
            if num_read is not None:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if len(sent) == num_read:
                places.append(backend.num_active)
                await asyncio.Event().wait()
            sent.append(message)

        async with asyncio.timeout(_TIMEOUT_S):
            await stream({"type": "http"}, receive, send)

    asyncio.run(run())
    assert set(places) == {2}
    assert sorted(client.cancelled) == ["1", "2"] and backend.num_active == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/hotcold/generate"])
def test_a_client_that_leaves_while_it_asks_is_no_failure(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of its body has come."""
    backend = make_backend(Client(END))
    models = ServedModels([backend])
    coming: list[Any] = [
        {"type": "http.request", "body": b'{"req', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return coming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "headers": [],
        "query_string": b"", "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    asyncio.run(create_app(models, None, SystemRoutes(models))(scope, receive, send))
    assert sent[0]["status"] == 499
    assert not caplog.records and backend.num_active == 0


def test_head_wherever_there_is_get() -> None:
    backend = make_backend(Client())
    paths = [
        route.path
        for route in create_app(ServedModels([backend])).routes
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()) and "{" not in route.path
    ]
    assert {"/", "/health", "/metrics", "/v1/models", "/api/tags", "/openapi.json"} <= set(paths)

    async def compare(http: httpx.AsyncClient) -> None:
        for path in (*paths, "/v1/models/demo", "/v1/none", "/api/none"):
            head, got = await http.head(path), await http.get(path)
            assert (head.status_code, head.text) == (got.status_code, ""), path
            assert head.headers["content-type"] == got.headers["content-type"], path

    over_http(backend, compare)


def test_health_and_metrics() -> None:
    answer, _ = ask(Client(), "/health")
    assert answer.json() == {"status": "ok", "model": "demo", "device": "cpu"}
    answer, _ = ask(Client(ServiceError("it died")), "/health")
    assert answer.status_code == 503 and answer.json()["reason"] == "it died"
    answer, _ = ask(Client(), "/metrics")
    for line in (
        'vllm:num_requests_running{model_name="demo"} 1.0',
        'vllm:num_requests_waiting{model_name="demo"} 2.0',
        'vllm:kv_cache_usage_perc{model_name="demo"} 0.25',
        'vllm:generation_tokens_total{model_name="demo"} 0.0',
    ):
        assert line in answer.text.splitlines()


@pytest.mark.parametrize(
    ("path", "body", "told", "param"),
    [
        ("/detokenize", {"tokens": [4096]}, "token id 4096 is not in the vocabulary", "tokens"),
        ("/detokenize", {"tokens": "ab"}, "tokens must be a list", "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens.1 must be at least 0", "tokens.1"),
        ("/detokenize", {"tokens": [1, 2.5]}, "tokens.1 must be a whole number", "tokens.1"),
        ("/detokenize", {"prompt": "a"}, "tokens is missing", "tokens"),
        ("/tokenize", {"prompt": "a" * (1 << 21)}, "characters", "prompt"),
        ("/tokenize", {"messages": LONG}, "characters", "messages"),
        ("/tokenize", {"content": "b"}, "give either prompt or messages", None),
        ("/v1/completions", {"prompt": [4096]}, "not in the vocabulary", "prompt"),
        ("/v1/chat/completions", {"messages": LONG}, "the context", "messages"),
        ("/v1/responses", {"input": LONG}, "the context", "input"),
        ("/v1/responses/input_tokens", {"input": LONG}, "the context", "input"),
    ],
)
def test_a_wrong_prompt_is_told_by_its_field(
    path: str, body: dict[str, Any], told: str, param: str | None
) -> None:
    answer, _ = ask(Client(), path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert told in error["message"], error["message"]
