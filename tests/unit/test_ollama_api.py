"""Ollama's routes over a system that answers as a test says, asked by Ollama's own client too."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import ollama
import pytest
from fastapi import FastAPI

from actors.protocol.messages import GenerateRequest, Generation, TokenEvent, TokenLogprob
from model.errors import ServiceError
from model.files.artifact import ModelIdentity
from model.files.locate import DEMO_DIRECTORY
from tests.unit.test_served_models import House, house
from tests.unit.test_server_limits import Client, Deliver, make_backend
from ui.api.backend import Backend
from ui.api.errors import ApiError
from ui.api.ollama.options import sampling_fields
from ui.models.served import ServedModels
from ui.server import create_app

RESULT = Generation("ab", [7, 8], "stop", 3, prefill_s=0.5, decode_s=0.25, queued_s=0.125)
ANSWER = (TokenEvent("a", None, 1), TokenEvent("b", RESULT, 1))
CONTEXT = 512
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
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
    backend.client = client  # type: ignore[assignment]
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


def with_ollama(
    client: Client, work: Callable[[ollama.AsyncClient], Coroutine[Any, Any, Any]]
) -> Any:
    """What Ollama's client makes of the routes."""
    backend_of(client)
    transport = httpx.ASGITransport(server()[1])
    return asyncio.run(work(ollama.AsyncClient("http://localhost", transport=transport)))


def test_a_whole_answer() -> None:
    client = Recording()
    answer = post(client, "/api/generate", prompt="Hello", stream=False).json()
    assert answer["response"] == "ab" and answer["model"] == "demo"
    assert (answer["done"], answer["done_reason"]) == (True, "stop")
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (3, 2)
    assert answer["prompt_eval_duration"] == 500_000_000
    assert answer["eval_duration"] == 250_000_000
    assert answer["load_duration"] >= 125_000_000 and answer["total_duration"] > 0
    assert "context" not in answer and answer["created_at"].endswith("Z")


def test_a_stream_is_lines_of_which_the_last_tells_all() -> None:
    for path, asked, told in (
        ("/api/generate", {"prompt": "Hello"}, lambda line: line["response"]),
        ("/api/chat", {"messages": HELLO}, lambda line: line["message"]["content"]),
    ):
        *pieces, last = lines(post(Recording(), path, **asked))
        assert [told(piece) for piece in pieces] == ["a", "b"]
        assert not any(piece["done"] for piece in pieces)
        assert last["done"] and last["done_reason"] == "stop" and told(last) == ""
        assert last["eval_count"] == 2


def test_generate_asks_what_a_chat_asks_and_raw_does_not() -> None:
    asked = Recording()
    post(asked, "/api/generate", prompt="Hello", system="Be brief.", stream=False)
    system = {"role": "system", "content": "Be brief."}
    post(asked, "/api/chat", messages=[system, *HELLO], stream=False)
    post(asked, "/api/generate", prompt="Hello", stream=False)
    post(asked, "/api/generate", prompt="Hello", raw=True, stream=False)
    first, second, third, raw = [request.prompt_ids for request in asked.requests]
    assert first == second != third
    backend = backend_of(asked)
    plain = backend.prompts.ids(GenerateRequest(backend.defaults, prompt="Hello"))
    assert raw == plain != third


def test_without_a_chat_template_a_prompt_is_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Recording()
    backend = backend_of(asked)
    monkeypatch.setattr(backend.prompts.tokenizer, "_template", None)
    body: dict[str, Any] = {"model": "demo", "prompt": "Hello", "stream": False}
    assert send(asked, "POST", "/api/generate", body)[0].status_code == 200
    plain = backend.prompts.ids(GenerateRequest(backend.defaults, prompt="Hello"))
    assert asked.requests[0].prompt_ids == plain
    refused = send(asked, "POST", "/api/generate", {**body, "system": "Be brief."})[0]
    assert refused.status_code == 400 and "no chat template" in refused.json()["error"]
    for tools in ([], [TOOL]):
        asked_chat = {"model": "demo", "messages": HELLO, "tools": tools}
        refused = send(asked, "POST", "/api/chat", asked_chat)[0]
        assert refused.status_code == 400 and "no chat template" in refused.json()["error"]
    shown = send(asked, "POST", "/api/show", {"model": "demo"})[0].json()
    assert (shown["capabilities"], shown["template"]) == (["completion"], "{{ .Prompt }}")


def test_options_reach_the_system() -> None:
    asked = Recording()
    options = {
        "num_predict": 5, "temperature": 0, "top_k": 3.0, "top_p": 0.5, "min_p": 0.25, "seed": 7,
        "stop": ["x"], "repeat_penalty": 1.25, "repeat_last_n": 9, "num_ctx": 4096, "numa": None,
    }  # fmt: skip
    post(asked, "/api/chat", messages=HELLO, options=options, stream=False, keep_alive="5m")
    sampling = asked.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (5, 0, 3)
    assert (sampling.top_p, sampling.min_p, sampling.seed) == (0.5, 0.25, 7)
    assert sampling.stop == ("x",)
    assert (sampling.repeat_penalty, sampling.repeat_last_n) == (1.25, 9)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0, 0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, {}),
        ({"num_predict": -1, "seed": -1, "top_k": -1, "stop": None}, {"top_k": 0}),
        ({"num_predict": 10**12}, {"max_tokens": (1 << 31) - 1}),
        ({"mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0, "penalize_newline": True}, {}),
    ],
)
def test_options_without_effect(options: Any, expected: dict[str, Any]) -> None:
    assert sampling_fields(options) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"mirostat": 1}, {"typical_p": 0.5},
        {"temperature": "1"}, {"temperature": True}, {"top_k": 1e300}, {"seed": float("nan")},
        {"stop": "x"}, {"stop": [1]}, {"num_predict": []},
    ],
)  # fmt: skip
def test_options_that_cannot_be_had_are_told(options: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=f"option {next(iter(options))} ") as refusal:
        sampling_fields(options)
    assert refusal.value.status == 400


def test_an_unknown_option_is_told() -> None:
    with pytest.raises(ApiError, match="option 'tempreture' is not known here"):
        sampling_fields({"tempreture": 1})


@pytest.mark.parametrize(
    ("format", "kind", "text"),
    [
        ("json", "json_schema", '"object"'),
        ({"type": "object", "required": ["a"]}, "json_schema", '"required"'),
        ("", None, ""),
        (None, None, ""),
    ],
)
def test_formats_are_grammars(format: Any, kind: str | None, text: str) -> None:
    for path, asked in (("/api/generate", {"prompt": "a"}), ("/api/chat", {"messages": HELLO})):
        recording = Recording()
        post(recording, path, format=format, stream=False, **asked)
        grammar = recording.requests[0].grammar
        assert (grammar and grammar.kind) == kind
        assert grammar is None or text in grammar.text


def test_calls_are_told_whole_with_arguments_as_objects() -> None:
    half = len(CALLED) // 2
    result = Generation(CALLED, [7], "stop", 3, 0.1, 0.1)
    events = (TokenEvent(CALLED[:half]), TokenEvent(CALLED[half:], result))
    expected = [{"a": 1}, {"a": 2}]

    def arguments_of(message: dict[str, Any]) -> list[Any]:
        for call in message.get("tool_calls", ()):
            assert call["id"] and call["function"]["name"] == "look_up"
        return [call["function"]["arguments"] for call in message.get("tool_calls", ())]

    asked: dict[str, Any] = {"messages": HELLO, "tools": [TOOL]}
    recording = Recording(*events)
    whole = post(recording, "/api/chat", stream=False, **asked).json()
    assert arguments_of(whole["message"]) == expected
    assert whole["message"]["content"] == "Well." and whole["done_reason"] == "stop"
    assert recording.requests[0].grammar is not None
    streamed = [line["message"] for line in lines(post(Recording(*events), "/api/chat", **asked))]
    assert [one for message in streamed for one in arguments_of(message)] == expected
    assert "".join(message["content"] for message in streamed) == "Well."


def test_a_call_that_was_cut_off_is_none() -> None:
    cut = CALLED[: CALLED.index("1}")]
    event = TokenEvent(cut, Generation(cut, [7], "length", 3, 0.1, 0.1))
    answer = post(Recording(event), "/api/chat", messages=HELLO, tools=[TOOL], stream=False).json()
    assert answer["message"] == {"role": "assistant", "content": "Well."}
    assert answer["done_reason"] == "length"


def test_calls_and_results_go_back_into_the_conversation() -> None:
    call = {"function": {"name": "look_up", "arguments": {"a": 1}}}
    talk = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call], "thinking": "hm"},
        {"role": "TOOL", "tool_name": "look_up", "content": "five"},
    ]
    ours = Recording()
    assert post(ours, "/api/chat", messages=talk, tools=[TOOL], stream=False).status_code == 200
    function = {"name": "look_up", "arguments": '{"a": 1}'}
    theirs = Recording()
    openai_talk = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "name": "look_up", "content": "five"},
    ]
    answer = post(theirs, "/v1/chat/completions", messages=openai_talk, tools=[TOOL])
    assert answer.status_code == 200
    assert ours.requests[0].prompt_ids == theirs.requests[0].prompt_ids


def test_logprobs_are_those_of_openais_route() -> None:
    scored = TokenEvent(
        "ab", RESULT, 2, (TokenLogprob(7, -0.5, ((7, -0.5),)), TokenLogprob(8, -1.5))
    )
    asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 1}
    theirs = post(Recording(scored), "/v1/chat/completions", **asked).json()
    ours = post(Recording(scored), "/api/chat", stream=False, **asked).json()
    assert ours["logprobs"] == theirs["choices"][0]["logprobs"]["content"] != []
    streamed = lines(post(Recording(scored), "/api/chat", **asked))
    assert [one for line in streamed for one in line.get("logprobs", ())] == ours["logprobs"]
    assert "logprobs" not in post(Recording(scored), "/api/chat", messages=HELLO, top_logprobs=1,
                                  stream=False).json()  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/api/generate", {"prompt": "a", "model": "other"}, 404, "model 'other' not found"),
        ("/api/chat", {"messages": HELLO, "model": "demo:7b"}, 404, "model 'demo:7b' not found"),
        ("/api/chat", {"messages": HELLO, "model": ""}, 400, "model is required"),
        ("/api/show", {"model": "other"}, 404, "model 'other' not found"),
        ("/api/generate", {"prompt": "a", "images": ["aa"]}, 400, '"demo" does not support images'),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, '"demo" does not support insert'),
        ("/api/generate", {"prompt": "a", "think": True}, 400, "does not support thinking"),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 400, "raw true"),
        ("/api/generate", {"prompt": "a", "context": [1]}, 400, "/api/chat"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "raw mode does not"),
        ("/api/generate", {"prompt": "a", "format": "xml"}, 400, "format must be"),
        ("/api/generate", {"prompt": 1}, 400, "prompt must be a text"),
        ("/api/generate", {"prompt": "a", "options": {"top_p": 2}}, 400, "top_p must be at most 1"),
        ("/api/generate", {"prompt": "a " * 999}, 400, "the context holds 512"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["a"]}]}, 400, "support images"),
        ("/api/chat", {"messages": [{"role": "king"}]}, 400, "role must be"),
        (
            "/api/chat",
            {"messages": HELLO, "tools": [{"type": "function"}]},
            400,
            "tools.0.function",
        ),
        ("/api/embed", {"input": [1]}, 400, "input"),
        ("/api/embed", {"input": "a " * 999, "truncate": False}, 400, "the context holds 512"),
        ("/api/pull", {"model": "demo"}, 403, "hotcold pull"),
        ("/api/push", {"model": "demo"}, 403, "not sent"),
        ("/api/create", {"model": "a"}, 403, "not made here"),
        ("/api/copy", {"source": "a"}, 403, "not copied"),
        ("/api/blobs/sha256:0", {}, 403, "not kept"),
        ("/api/nowhere", {}, 404, "there is no POST /api/nowhere here"),
    ],
)
def test_what_is_refused_is_a_text(path: str, body: dict[str, Any], status: int, text: str) -> None:
    answer, backend = send(Recording(), "POST", path, {"model": "demo", **body})
    assert answer.status_code == status
    (error,) = answer.json().values()
    assert text in error and len(error.splitlines()) == 1
    assert backend.num_active == 0


def test_what_fails_on_the_way_is_the_last_line() -> None:
    failing = Recording(TokenEvent("a", None, 1), ServiceError("the driver died"))
    first, last = lines(post(failing, "/api/chat", messages=HELLO))
    assert first["message"]["content"] == "a" and last == {"error": "the driver died"}
    whole = post(failing, "/api/chat", messages=HELLO, stream=False)
    assert (whole.status_code, whole.json()) == (503, {"error": "the driver died"})


def test_the_queues_limit_holds() -> None:
    body = {"model": "demo", "messages": HELLO}
    answer, _ = send(Recording(), "POST", "/api/chat", body, num_active=3)
    assert answer.status_code == 503 and "queue is full" in answer.json()["error"]


def test_words_that_are_missing_load_the_model() -> None:
    recording = Recording()
    for path in ("/api/generate", "/api/chat"):
        answer = post(recording, path, keep_alive=-1).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert post(recording, "/api/embeddings").json() == {"embedding": []}
    assert post(recording, "/api/embed", input="").json()["embeddings"] == []
    assert recording.requests == []


def test_embeddings_of_both_kinds() -> None:
    recording = Embedding()
    answer = post(recording, "/api/embed", input=["a", "a list of words"]).json()
    for vector, request in zip(answer["embeddings"], recording.requests, strict=True):
        assert sum(number * number for number in vector) == pytest.approx(1)
        assert vector[1] / vector[0] == pytest.approx(4 * len(request.prompt_ids or ()) / 3)
    counts = [len(request.prompt_ids or ()) for request in recording.requests]
    assert answer["prompt_eval_count"] == sum(counts)
    one = post(recording, "/api/embed", input="a", dimensions=1).json()
    assert one["embeddings"] == [[1.0]]
    older = post(recording, "/api/embeddings", prompt="a").json()
    assert older == {"embedding": [3.0, 4.0 * counts[0]]}
    post(recording, "/api/embed", input="word " * 999)
    assert len(recording.requests[-1].prompt_ids or ()) == CONTEXT


def test_models_as_ollama_lists_them() -> None:
    (listed,) = send(Recording(), "GET", "/api/tags")[0].json()["models"]
    (running,) = send(Recording(), "GET", "/api/ps")[0].json()["models"]
    shown = post(Recording(), "/api/show", name="demo:latest").json()
    assert listed["name"] == listed["model"] == running["name"] == "demo:latest"
    assert listed["digest"] == running["digest"] == ModelIdentity.of(DEMO_DIRECTORY).digest
    size = (DEMO_DIRECTORY / "model.safetensors").stat().st_size
    assert 0.9 * size < listed["size"] < size
    assert listed["details"]["parameter_size"].endswith("M")
    assert listed["details"]["family"] == shown["model_info"]["general.architecture"]
    assert running["size"] > 0 and running["context_length"] == CONTEXT
    family = listed["details"]["family"]
    assert shown["model_info"][f"{family}.embedding_length"] == 384
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["template"] == (DEMO_DIRECTORY / "chat_template.jinja").read_text()
    for path in ("/api/version", "/api/tags", "/"):
        answer = send(Recording(), "HEAD", path)[0]
        assert (answer.status_code, answer.text) == (200, "")
    assert send(Recording(), "GET", "/")[0].text == "Ollama is running"


def test_the_routes_are_described() -> None:
    described = send(Recording(), "GET", "/openapi.json")[0].json()
    names = {"chat", "generate", "embed", "embeddings", "show", "tags", "ps", "version"}
    assert names == {path.removeprefix("/api/") for path in described["paths"] if "/api/" in path}
    body = described["components"]["schemas"]["OllamaChat"]["properties"]
    assert {"messages", "tools", "format", "options", "keep_alive"} <= set(body)
    assert "OllamaCall" in described["components"]["schemas"]
    assert "/api/chat" in send(Recording(), "GET", "/docs")[0].text


def test_ollamas_client_reads_it_all() -> None:
    async def work(client: ollama.AsyncClient) -> None:
        whole = await client.chat("demo", HELLO)
        assert whole.message.content == "ab" and whole.done_reason == "stop"
        stream = await client.generate("demo:latest", "Hello", stream=True)
        assert "".join([piece.response or "" async for piece in stream]) == "ab"
        assert [model.model for model in (await client.list()).models] == ["demo:latest"]
        assert (await client.ps()).models[0].context_length == CONTEXT
        shown = await client.show("demo")
        assert shown.capabilities == ["completion", "tools"] and shown.modelinfo
        with pytest.raises(ollama.ResponseError, match="model 'x' not found") as missing:
            await client.chat("x", HELLO)
        assert missing.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="hotcold pull"):
            await client.pull("x")

    with_ollama(Recording(), work)


def test_ollamas_client_reads_calls_and_vectors() -> None:
    def look_up(a: int) -> str:
        """Looks up."""
        return str(a)

    async def called(client: ollama.AsyncClient) -> None:
        answer = await client.chat("demo", HELLO, tools=[look_up])
        first, second = answer.message.tool_calls or ()
        assert (first.function.name, dict(first.function.arguments)) == ("look_up", {"a": 1})
        assert dict(second.function.arguments) == {"a": 2}
        result = {"role": "tool", "tool_name": "look_up", "content": "1"}
        await client.chat("demo", [*HELLO, answer.message, result], tools=[look_up])

    with_ollama(Recording(TokenEvent(CALLED, RESULT)), called)

    async def embedded(client: ollama.AsyncClient) -> None:
        assert len((await client.embed("demo", ["a", "b"])).embeddings) == 2
        assert len((await client.embeddings("demo", "a")).embedding) == 2

    with_ollama(Embedding(), embedded)


@house(room=1)
async def test_of_several_models_the_one_that_is_named_is_loaded(house: House) -> None:
    async def names(path: str) -> list[str]:
        return [model["name"] for model in (await house.http.get(path)).json()["models"]]

    assert await names("/api/tags") == ["a:latest", "b:latest", "c:latest"]
    assert await names("/api/ps") == []
    told = await house.http.post("/api/generate", json={"model": "b"})
    assert told.json()["done_reason"] == "load" and house.loaded == "b"
    asked = {"model": "c:latest", "messages": HELLO, "stream": False}
    answer = (await house.http.post("/api/chat", json=asked)).json()
    assert (answer["model"], answer["message"]["content"]) == ("c:latest", "c")
    assert await names("/api/ps") == ["c:latest"]
