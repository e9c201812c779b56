"""Deadlines, the queue, streams and failures of a server, over a system that answers as told."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import psutil
import pytest
from fastapi.routing import APIRoute
from openai._streaming import SSEDecoder

from hotcold.actors.protocol.failures import RequestError
from hotcold.actors.protocol.messages import GenerateRequest, TokenEvent, TokenLogprob
from hotcold.model.errors import PromptTooLongError, ServiceError
from hotcold.ui.api import sse
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app
from hotcold.ui.system_routes import SystemRoutes
from tests.unit.ollama_routes import (
    END,
    HELLO,
    RESULT,
    TIMEOUT_S,
    TOOL,
    Client,
    Deliver,
    Embedding,
    backend_of,
    make_backend,
    post,
    send,
    server,
    with_client,
)

LONG = [{"role": "user", "content": "a " * (1 << 20)}]


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():
            await asyncio.sleep(0.001)


class Slow(Client):
    """Answers each request once it is let to."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Deliver] = []
        self.most_held = 0

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        await asyncio.sleep(0)
        self.held.append(deliver)
        self.most_held = max(self.most_held, len(self.held))
        return await super().submit(request, deliver)

    def end_first(self) -> None:
        self.held.pop(0)(END)


@pytest.mark.parametrize(("num_prompts", "echo"), [(1000, True), (1000, False), (100, True)])
def test_logprobs_of_many_answers(num_prompts: int, echo: bool) -> None:
    """They are refused before anything runs, or end the request once they are too many."""
    scored = TokenLogprob(7, -0.5, [(n, -0.5 * n) for n in range(20)])
    part = TokenEvent("a", None, 1, (scored,) * 100)
    client = Client(part if num_prompts > 100 else TokenEvent("a", None, 1), END)
    prompts = [[5] * 120] * num_prompts
    asked: dict[str, Any] = {"prompt": prompts, "logprobs": 20, "echo": echo, "max_tokens": 5}
    response = post(client, "/v1/completions", **asked)
    if num_prompts == 100:
        assert response.status_code == 200 and len(client.requests) == 100
        return
    assert response.status_code == 400
    assert "too many logprobs for one request" in response.json()["error"]["message"]
    assert len(client.requests) == 0 if echo else 700 < len(client.requests) < 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a word or two, " * 60_000}),  # in another process
        ("/detokenize", {"tokens": [300, 301] * 500_000}),
        ("/v1/embeddings", {"input": [[1, 2]] * 40}),
    ],
)
def test_others_are_answered_while_a_large_request_is(path: str, body: dict[str, Any]) -> None:
    num_answered = 0

    async def talk(http: httpx.AsyncClient) -> None:
        nonlocal num_answered
        content = json.dumps(body).encode()
        large = asyncio.create_task(http.post(path, content=content, timeout=300))
        while not large.done():
            await asyncio.sleep(0)
            num_answered += (await http.get("/health")).is_success
        assert large.result().is_success and len(large.result().content) > 100_000

    with_client(Embedding(lambda ids: [1 / 3 + len(ids)] * 100_000), talk)
    assert num_answered > 50  # 31, where the loop does it; hundreds where threads do


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
    answer = post(client, "/v1/completions", prompt=[1, 2], n=2, stream=stream)
    assert answer.status_code == (200 if stream else 504)
    (error,) = [json.loads(line)["error"] for line in re.findall(r"\{.*\}", answer.text)]
    assert error["type"] == "timeout" and "4 tokens of prompts" in error["message"]
    assert sorted(client.cancelled) == ["1", "2"]


@pytest.mark.parametrize(
    ("error", "status"), [(RequestError("a NaN"), 500), (ServiceError("it died"), 503)]
)
def test_failures_of_the_system_are_told(error: Exception, status: int) -> None:
    answer = post(Client(error), "/v1/completions", prompt=[1, 2])
    assert answer.status_code == status and str(error) in answer.json()["error"]["message"]


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
    answer = post(Client(*events, PromptTooLongError("it is long")), path, **body)
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
    answer = send(Client(END), "POST", "/v1/completions", {"prompt": [1]}, timeout_s=0.2)
    assert answer.status_code == 504


def prompts_of_one(count: int, first: int = 0) -> list[list[int]]:
    return [[number] for number in range(first, first + count)]


def test_a_list_of_a_hundred_prompts_waits_for_itself_and_lets_others_between() -> None:
    """Two run side by side and one more may wait."""
    client = Slow()
    backend = backend_of(client)

    async def run(http: httpx.AsyncClient) -> httpx.Response:
        async def asked(prompt: Any) -> httpx.Response:
            return await http.post("/v1/completions", json={"prompt": prompt}, timeout=TIMEOUT_S)

        many = asyncio.create_task(asked(prompts_of_one(100)))
        await until(lambda: len(client.held) == 2)
        assert backend.num_active == 2
        other = asyncio.create_task(asked([500]))
        await until(lambda: len(client.held) == 3)
        assert backend.num_active == 3
        assert "queue is full" in (await asked([501])).text
        for _ in range(3):  # in the order in which they came
            client.end_first()
        assert (await other).is_success
        assert len(client.requests) < 10
        while not many.done():
            await until(lambda: bool(client.held) or many.done())
            if client.held:
                client.end_first()
        return await many

    found = with_client(client, run).json()
    assert [one["index"] for one in found["choices"]] == list(range(100))
    assert found["usage"]["prompt_tokens"] == 100 * RESULT.num_prompt_tokens
    asked = sorted(list(one.prompt_ids or ()) for one in client.requests)
    assert asked == [*prompts_of_one(100), [500]]
    assert client.most_held == 3 and backend.num_active == 0


CHAT: dict[str, Any] = {"messages": HELLO, "tools": [TOOL]}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "Hello"}),
    ("/v1/responses", {"input": "Hello", "tools": [{"type": "function", **TOOL["function"]}]}),
    ("/api/chat", CHAT),
    ("/api/generate", {"prompt": "Hello"}),
]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"a": 1}}\n</tool_call>'


class Connection:
    """One request of an ASGI server, and what has been sent of its answer."""

    def __init__(self, path: str, *pieces: bytes, reads: int | None = None) -> None:
        """`pieces` of its body; then it leaves once `leaves`. It reads `reads` messages at most."""
        self.sent: list[Any] = []
        self.leaves = asyncio.Event()
        self._coming = [
            {"type": "http.request", "body": piece, "more_body": piece is not pieces[-1]}
            for piece in pieces
        ]
        self._reads = reads
        self._scope = {
            "type": "http", "method": "POST", "path": path, "headers": [],
            "query_string": b"", "http_version": "1.1", "scheme": "http",
        }  # fmt: skip

    async def answered(self, app: Any = None) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await (app or server()[1])(self._scope, self._receive, self._send)

    async def until_alive(self, sign: bytes) -> None:
        """Until two more signs of life have come."""
        before = self.bodies.count(sign)
        await until(lambda: self.bodies.count(sign) >= before + 2)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent[1:]]

    async def _receive(self) -> Any:
        if self._coming:
            return self._coming.pop(0)
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if len(self.sent) == self._reads:
            await asyncio.Event().wait()
        self.sent.append(message)


def streamed(body: dict[str, Any]) -> bytes:
    return json.dumps({"model": "demo", "stream": True, **body}).encode()


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_stream_says_at_once_that_it_lives(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Before its first token, and while a call is withheld; clients read over the signs."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    client = Slow()
    backend = backend_of(client)
    sign = b" " if path.startswith("/api/") else b": still working\n\n"

    async def talk() -> Connection:
        connection = Connection(path, streamed(body))
        answering = asyncio.create_task(connection.answered())
        await until(lambda: bool(connection.sent))  # nothing has been read of the prompt
        assert connection.sent[0]["status"] == 200
        await connection.until_alive(sign)
        client.held[0](TokenEvent(CALL[:20], None, 1))
        await connection.until_alive(sign)
        client.held[0](TokenEvent(CALL[20:], RESULT, 1))
        await answering
        return connection

    connection = asyncio.run(talk())
    assert connection.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    whole = b"".join(connection.bodies)
    if path.startswith("/api/"):
        found = [json.loads(line) for line in whole.splitlines()]
    else:
        events = SSEDecoder().iter_bytes(iter([whole]))
        found = [json.loads(one.data) for one in events if one.data not in ("", "[DONE]")]
    assert "look_up" in json.dumps(found) and backend.num_active == 0


@pytest.mark.parametrize("num_read", [0, 2, None])
def test_a_client_that_does_not_read_or_leaves_frees_its_places(num_read: int | None) -> None:
    """At the deadline where it reads no more; None: it has left before the first token."""
    client = Slow()
    backend = backend_of(client, TIMEOUT_S if num_read is None else 0.3)

    async def run() -> None:
        body = streamed({"prompt": [1, 2], "n": 2})
        connection = Connection("/v1/completions", body, reads=num_read)
        answering = asyncio.create_task(connection.answered())
        await until(lambda: len(client.held) == 2)
        assert backend.num_active == 2
        for deliver in client.held if num_read else ():
            deliver(TokenEvent("a", None, 1))
        if num_read is None:
            connection.leaves.set()
        await answering

    asyncio.run(run())
    assert sorted(client.cancelled) == ["1", "2"] and backend.num_active == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/hotcold/generate"])
def test_a_client_that_leaves_while_it_asks_is_no_failure(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of its body has come."""
    models = ServedModels([backend_of(Client(END))])

    async def run() -> Connection:
        connection = Connection(path, b'{"req', b"")
        connection._coming.pop()
        connection.leaves.set()
        await connection.answered(create_app(models, None, SystemRoutes(models)))
        return connection

    assert asyncio.run(run()).sent[0]["status"] == 499
    assert not caplog.records


def test_head_wherever_there_is_get() -> None:
    paths = [
        route.path
        for route in server()[1].routes
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()) and "{" not in route.path
    ]
    assert {"/", "/health", "/metrics", "/v1/models", "/api/tags", "/openapi.json"} <= set(paths)

    async def compare(http: httpx.AsyncClient) -> None:
        for path in (*paths, "/v1/models/demo", "/v1/none", "/api/none"):
            head, got = await http.head(path), await http.get(path)
            assert (head.status_code, head.text) == (got.status_code, ""), path
            assert head.headers["content-type"] == got.headers["content-type"], path

    with_client(Client(), compare)


def test_health_and_metrics() -> None:
    answer = send(Client(), "GET", "/health")
    assert answer.json() == {"status": "ok", "model": "demo", "device": "cpu"}
    answer = send(Client(ServiceError("it died")), "GET", "/health")
    assert answer.status_code == 503 and answer.json()["reason"] == "it died"
    answer = send(Client(), "GET", "/metrics")
    for line in (
        'vllm:num_requests_running{model_name="demo"} 1.0',
        'vllm:num_requests_waiting{model_name="demo"} 2.0',
        'vllm:kv_cache_usage_perc{model_name="demo"} 0.25',
        'vllm:generation_tokens_total{model_name="demo"} 0.0',
    ):
        assert line in answer.text.splitlines()
