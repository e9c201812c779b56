"""Ollama's routes, read by its own client: answers, calls, options, and what is refused.

And which models there are, which are loaded and given up.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import ollama
import pytest

from hotcold.actors.protocol.messages import (
    GenerateRequest,
    Generation,
    TokenEvent,
    TokenLogprob,
)
from hotcold.model.errors import ServiceError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.ui.api.drawn import ollamas_sampling
from hotcold.ui.api.errors import ApiError
from tests.unit.ollama_routes import (
    CALLED,
    CONTEXT,
    HELLO,
    RESULT,
    TOOL,
    Embedding,
    Recording,
    backend_of,
    lines,
    post,
    send,
    with_ollama,
)
from tests.unit.test_served_models import House, house, until


def test_a_stream_is_lines_of_which_the_last_tells_all() -> None:
    for path, asked, told in (
        ("/api/generate", {"prompt": "Hello"}, lambda line: line["response"]),
        ("/api/chat", {"messages": HELLO}, lambda line: line["message"]["content"]),
    ):
        *pieces, last = lines(post(Recording(), path, **asked))
        assert [told(piece) for piece in pieces] == ["a", "b"]
        assert not any(piece["done"] for piece in pieces)
        assert last["done"] and last["done_reason"] == "stop" and told(last) == ""
        whole = post(Recording(), path, stream=False, **asked).json()
        assert told(whole) == "ab" and whole["created_at"].endswith("Z")
        for end in (last, whole):
            assert (end["prompt_eval_count"], end["eval_count"]) == (3, 2)
            assert end["prompt_eval_duration"] == 500_000_000
            assert end["eval_duration"] == 250_000_000
            assert end["load_duration"] >= 125_000_000 and end["total_duration"] > 0


def test_generate_asks_what_a_chat_asks() -> None:
    asked, brief = Recording(), {"role": "system", "content": "Be brief."}
    post(asked, "/api/generate", prompt="Hello", system="Be brief.", stream=False)
    post(asked, "/api/chat", messages=[brief, *HELLO], stream=False)
    first, second = [request.prompt_ids for request in asked.requests]
    assert first == second


def test_without_a_chat_template_a_prompt_is_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Recording()
    backend = backend_of(asked)
    monkeypatch.setattr(backend.prompts.tokenizer, "_template", None)
    body: dict[str, Any] = {"model": "demo", "prompt": "Hello", "stream": False}
    assert send(asked, "POST", "/api/generate", body).status_code == 200
    plain = backend.prompts.ids(GenerateRequest(backend.defaults, prompt="Hello"))
    assert asked.requests[0].prompt_ids == plain
    refused = send(asked, "POST", "/api/generate", {**body, "system": "Be brief."})
    assert refused.status_code == 400 and "no place for what" in refused.json()["error"]
    for tools in ([], [TOOL]):
        asked_chat = {"model": "demo", "messages": HELLO, "tools": tools}
        refused = send(asked, "POST", "/api/chat", asked_chat)
        assert refused.status_code == 400 and "no chat template" in refused.json()["error"]
    shown = send(asked, "POST", "/api/show", {"model": "demo"}).json()
    assert (shown["capabilities"], shown["template"]) == (["completion"], "{{ .Prompt }}")


@pytest.mark.parametrize(
    ("format", "text"), [("json", '"object"'), ({"required": ["a"]}, '"required"'), ("", None)]
)
def test_formats_are_grammars(format: Any, text: str | None) -> None:
    for path, asked in (("/api/generate", {"prompt": "a"}), ("/api/chat", {"messages": HELLO})):
        recording = Recording()
        post(recording, path, format=format, stream=False, **asked)
        grammar = recording.requests[0].grammar
        if text is None:
            assert grammar is None
        else:
            assert grammar is not None and grammar.kind == "json_schema" and text in grammar.text


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
        ("/api/generate", {"prompt": "a", "images": ["aa"]}, 400, "images is not supported here"),
        ("/api/generate", {"prompt": "a", "think": True}, 400, "does not support thinking"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "no place for what"),
        ("/api/generate", {"prompt": "a", "format": "xml"}, 400, "format must be"),
        ("/api/generate", {"prompt": "a", "options": {"top_p": 2}}, 400, "option top_p is 2; give"),
        ("/api/generate", {"prompt": "a " * 999}, 400, "the context holds 512"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["a"]}]}, 400, "support images"),
        ("/api/chat", {"messages": HELLO, "tools": [{}]}, 400, "tools.0."),
        ("/api/chat", {"messages": HELLO, "keep_alive": "bogus"}, 400, "keep_alive: 'bogus' is no"),
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
    answer = post(Recording(), path, **body)
    assert answer.status_code == status
    (error,) = answer.json().values()
    assert text in error and len(error.splitlines()) == 1


def test_a_message_without_content_is_an_empty_one() -> None:
    """As Ollama takes what its own client sends of a tool that returned nothing."""
    asked = Recording()
    for content in ({}, {"content": None}, {"content": ""}):
        messages = [{"role": "user", **content}, {"role": "tool", "tool_name": "f", **content}]
        assert post(asked, "/api/chat", messages=messages, stream=False).status_code == 200
    first, *others = (request.prompt_ids for request in asked.requests)
    assert others == [first] * 2


def test_what_fails_on_the_way_is_the_last_line() -> None:
    failing = Recording(TokenEvent("a", None, 1), ServiceError("the driver died"))
    first, last = lines(post(failing, "/api/chat", messages=HELLO))
    assert first["message"]["content"] == "a" and last == {"error": "the driver died"}
    whole = post(failing, "/api/chat", messages=HELLO, stream=False)
    assert (whole.status_code, whole.json()) == (503, {"error": "the driver died"})


def test_embeddings_of_both_kinds() -> None:
    recording = Embedding(lambda ids: [3.0, 4.0 * len(ids)])
    answer = post(recording, "/api/embed", input=["a", "a list of words"]).json()
    for vector, request in zip(answer["embeddings"], recording.requests, strict=True):
        assert sum(number * number for number in vector) == pytest.approx(1)
        assert vector[1] / vector[0] == pytest.approx(4 * len(request.prompt_ids or ()) / 3)
    counts = [len(request.prompt_ids or ()) for request in recording.requests]
    assert answer["prompt_eval_count"] == sum(counts)
    one = post(recording, "/api/embed", input="a", dimensions=1).json()
    assert one["embeddings"] == [[1.0]]
    every = post(recording, "/api/embed", input="a", dimensions=0).json()
    assert every["embeddings"] == answer["embeddings"][:1]
    older = post(recording, "/api/embeddings", prompt="a").json()
    assert older == {"embedding": [3.0, 4.0 * counts[0]]}
    post(recording, "/api/embed", input="word " * 999)
    assert len(recording.requests[-1].prompt_ids or ()) == CONTEXT


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


def test_ollamas_client_reads_lists_and_errors() -> None:
    async def work(client: ollama.AsyncClient) -> None:
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
        stream = await client.chat("demo", HELLO, tools=[look_up], stream=True)
        messages = [piece.message async for piece in stream]
        streamed = [call for one in messages for call in one.tool_calls or ()]
        for calls in (answer.message.tool_calls or (), streamed):
            assert [call.function.name for call in calls] == ["look_up"] * 2
            assert [dict(call.function.arguments) for call in calls] == [{"a": 1}, {"a": 2}]
        assert answer.message.content == "".join(one.content or "" for one in messages) == "Well."
        result = {"role": "tool", "tool_name": "look_up", "content": "1"}
        await client.chat("demo", [*HELLO, answer.message, result], tools=[look_up])

    with_ollama(Recording(TokenEvent(CALLED, RESULT)), called)

    async def embedded(client: ollama.AsyncClient) -> None:
        assert len((await client.embed("demo", ["a", "b"])).embeddings) == 2
        assert len((await client.embeddings("demo", "a")).embedding) == 2

    with_ollama(Embedding(lambda ids: [3.0, 4.0]), embedded)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, {}),
        ({"num_predict": -1, "seed": -1, "top_k": -1, "stop": None}, {"top_k": 0}),
        (
            {"top_k": 3.0, "mirostat": 2.0, "temperature": 3},
            {"top_k": 3, "mirostat": 2, "temperature": 3},
        ),
        ({"num_predict": 10**12}, {"max_tokens": (1 << 31) - 1}),
        ({"tfs_z": 1.0, "penalize_newline": True, "num_gpu": 1}, {}),
    ],
)
def test_options_without_effect(options: Any, expected: dict[str, Any]) -> None:
    assert ollamas_sampling(options) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"tfs_z": 0.5}, {"mirostat": "1"}, {"typical_p": "1"}, {"dry_sequence_breakers": [5]},
        {"temperature": "1"}, {"temperature": True}, {"top_k": 1e300}, {"seed": float("nan")},
        {"stop": 5}, {"stop": [1]}, {"num_predict": []}, {"temperature": 101},
    ],
)  # fmt: skip
def test_options_that_cannot_be_had_are_told(options: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=f"option {next(iter(options))} ") as refusal:
        ollamas_sampling(options)
    assert refusal.value.status == 400
    with pytest.raises(ApiError, match="option 'tempreture' is not known here"):
        ollamas_sampling({"tempreture": 1})


def test_words_that_are_missing_load_the_model() -> None:
    recording = Recording()
    for path in ("/api/generate", "/api/chat"):
        for keep_alive in (-1, 0):  # an only model stays
            answer = post(recording, path, keep_alive=keep_alive).json()
            assert (answer["done"], answer["done_reason"]) == (True, "load")
    assert post(recording, "/api/embeddings").json() == {"embedding": []}
    assert post(recording, "/api/embed", input="").json()["embeddings"] == []
    assert recording.requests == []


def test_models_as_ollama_lists_them() -> None:
    (listed,) = send(Recording(), "GET", "/api/tags").json()["models"]
    (running,) = send(Recording(), "GET", "/api/ps").json()["models"]
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
        answer = send(Recording(), "HEAD", path)
        assert (answer.status_code, answer.text) == (200, "")
    assert send(Recording(), "GET", "/").text == "Ollama is running"


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


ASKED: dict[str, dict[str, Any]] = {
    "/api/generate": {"prompt": "a", "stream": False},
    "/api/chat": {"messages": HELLO},
    "/api/embed": {"input": ["a", "b", "c", "d", "e"]},  # more than run at once
    "/api/embeddings": {"prompt": "a"},
}


@pytest.mark.parametrize(
    ("path", "keep_alive"), [(path, "0m0.0s" if path == "/api/chat" else 0) for path in ASKED]
)
def test_a_model_that_is_not_to_stay_is_given_up_after_the_answer(
    path: str, keep_alive: Any
) -> None:
    @house(room=3)
    async def ask(house: House) -> None:
        body = {"model": "b", **ASKED[path]}
        assert (await house.http.post(path, json=body)).status_code == 200
        await house.http.post(path, json={**body, "keep_alive": "10m"})
        assert house.loaded == "b"
        await house.http.post(path, json={**body, "keep_alive": keep_alive})
        assert house.loaded == ""
        end = {"model": "b", "keep_alive": keep_alive}  # one that is not loaded stays so
        assert (await house.http.post("/api/chat", json=end)).json()["done_reason"] == "unload"
        await until(lambda: house.starts == ["start b", "end b"])
        await house.http.post(path, json=body)
        assert house.loaded == "b"

    ask()


@house(room=3)
async def test_loading_is_told_of_what_an_embedding_took(house: House) -> None:
    house.may_load.clear()
    asked = asyncio.create_task(house.http.post("/api/embed", json={"model": "b", "input": "a"}))
    await until(lambda: house.log[-1:] == ["start b"])
    await asyncio.sleep(0.02)
    house.may_load.set()
    told = (await asked).json()
    assert 20_000_000 <= told["load_duration"] <= told["total_duration"]


@house(room=3, names="a")
async def test_an_only_model_stays(house: House) -> None:
    given = {"model": "a", "keep_alive": 0}
    for path, asked in ASKED.items():
        assert (await house.http.post(path, json={**given, **asked})).status_code == 200
    told = (await house.http.post("/api/generate", json=given)).json()
    assert told["done_reason"] == "load"
    assert house.starts == ["start a"] and house.loaded == "a"


@house(room=3)
async def test_a_model_that_cannot_be_read_hides_no_other(house: House) -> None:
    """Its files are gone: it answers on where it is loaded, and is listed for that."""
    assert await house.ask("b") == "b"
    gone = replace(house.of["b"].config, model_path="/nowhere")
    house.of["b"].config = gone
    house.of["c"].config = gone
    tags, running = [
        (await house.http.get(path)).json()["models"] for path in ("/api/tags", "/api/ps")
    ]
    assert [model["name"] for model in tags] == ["a:latest", "b:latest", "c:latest"]
    assert [model["digest"] != "" for model in tags] == [True, False, False]
    assert tags[1]["details"]["family"] == tags[0]["details"]["family"]
    (one,) = running
    assert (one["name"], one["size"], one["digest"]) == ("b:latest", 0, "")
    assert len((await house.http.get("/v1/models")).json()["data"]) == 3


@house(room=3)
async def test_a_model_is_given_up_once_it_has_loaded(house: House) -> None:
    house.may_load.clear()
    asked = asyncio.create_task(house.ask("b"))
    await until(lambda: house.log[-1:] == ["start b"])
    asked.cancel()  # the one who had it loaded goes away
    with pytest.raises(asyncio.CancelledError):
        await asked
    await house.http.post("/api/generate", json={"model": "b", "keep_alive": 0})
    house.may_load.set()
    await until(lambda: house.starts == ["start b", "end b"])
    load = asyncio.create_task(house.http.post("/api/generate", json={"model": "b"}))
    assert (await load).json()["done_reason"] == "load" and house.loaded == "b"
    house.of["b"].attend(1)
    house.of["b"].attend(-1)
    assert house.loaded == "b"


@house(room=3)
async def test_a_model_stays_until_nobody_needs_it(house: House) -> None:
    end = {"model": "b", "keep_alive": 0}
    assert await house.ask("b") == "b"
    house.may_answer.clear()
    asked = asyncio.create_task(house.ask("b"))
    await until(lambda: house.of["b"].num_active == 1)
    house.of["b"].attend(1)  # as `hotcold chat` does
    assert (await house.http.post("/api/generate", json=end)).json()["done_reason"] == "unload"
    house.may_answer.set()
    assert await asked == "b" and house.loaded == "b"
    house.of["b"].attend(-1)
    assert house.loaded == ""


def test_a_call_that_was_cut_off_is_none() -> None:
    cut = CALLED[: CALLED.index("1}")]
    event = TokenEvent(cut, Generation(cut, [7], "length", 3, 0.1, 0.1))
    answer = post(Recording(event), "/api/chat", messages=HELLO, tools=[TOOL], stream=False).json()
    assert answer["message"] == {"role": "assistant", "content": "Well."}
    assert answer["done_reason"] == "length"
