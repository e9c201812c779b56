"""Responses that are kept and continued: OpenAI's client over the routes, and a stand-in."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import (
    ResponseInputMessageItem,
    ResponseReasoningItem,
    ResponseReasoningSummaryPartAddedEvent,
    ResponseReasoningSummaryTextDeltaEvent,
)

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent
from hotcold.model.errors import ServiceError
from hotcold.ui.api import requests
from hotcold.ui.api.cached import client as client_of_context
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.responses.kept import KeptResponses, Turn
from hotcold.ui.api.responses.route import ResponsesRoute
from hotcold.ui.api.responses.schemas import ResponsesRequest
from hotcold.ui.api.schemas import parse
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app
from hotcold.ui.gate import Gate
from tests.unit.ollama_routes import (
    ANSWER,
    CONTEXT,
    TOOL,
    Recording,
    backend_of,
    send,
    server,
    with_client,
)
from tests.unit.test_server_limits import make_backend
from tests.unit.test_thoughts import SAID, answering
from tests.unit.test_thoughts import thinking as thinking

TOKENIZER = server()[0].prompts.tokenizer
CALL = {"type": "function", **TOOL["function"]}
KEYS = ("a key of one client", "a key of another one")


def prompt_of(request: GenerateRequest) -> str:
    assert TOKENIZER is not None
    return TOKENIZER.decode(request.prompt_ids or [])


def with_openai(client: Recording, work: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
    """What OpenAI's client makes of the routes."""

    async def ask(http: httpx.AsyncClient) -> Any:
        return await work(
            openai.AsyncOpenAI(
                base_url="http://localhost/v1", api_key="any", http_client=http, max_retries=0
            )
        )

    return with_client(client, ask)


def create(client: Recording, **fields: Any) -> Any:
    return with_openai(client, lambda one: one.responses.create(model="demo", **fields))


def test_a_follow_up_is_the_whole_conversation() -> None:
    client = Recording()
    first = create(client, input="One", instructions="Be brief.")
    second = create(
        client, input=[{"role": "user", "content": "Two"}], previous_response_id=first.id
    )
    third = create(client, input="Three", previous_response_id=second.id, instructions="Be long.")
    assert (second.previous_response_id, third.store) == (first.id, True)
    talk = [
        {"role": "user", "content": "One"}, {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "Two"}, {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "Three"},
    ]  # fmt: skip
    create(client, input=talk[:3], store=False)
    create(client, input=talk, instructions="Be long.", store=False)
    ids = [request.prompt_ids for request in client.requests]
    assert ids[1] == ids[3] and ids[2] == ids[4]  # instructions are a request's own


def test_calls_and_results_are_kept() -> None:
    called = answering('<tool_call>\n{"name": "look_up", "arguments": {"a": 1}}\n</tool_call>')
    first = create(called, input="One", tools=[CALL])
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a function"}
    client = Recording()
    create(client, input=[result], previous_response_id=first.id, tools=[CALL])
    whole = [{"role": "user", "content": "One"}, call.model_dump(), result]
    create(client, input=whole, tools=[CALL])
    reference = {"type": "item_reference", "id": call.id}
    create(client, input=[whole[0], reference, result], tools=[CALL])
    ids = [request.prompt_ids for request in client.requests]
    assert ids[0] == ids[1] == ids[2] and "a function" in prompt_of(client.requests[0])


def test_branches_and_conversations_are_apart() -> None:
    client = Recording()
    root = create(client, input="Root")
    left = create(client, input="Left", previous_response_id=root.id)
    create(client, input="Other")
    create(client, input="Right", previous_response_id=root.id)
    create(client, input="End", previous_response_id=left.id)
    *_, other, right, end = map(prompt_of, client.requests)
    assert "Root" in right and not {"Left", "Other"} & set(right.replace("\n", " ").split())
    assert all(word in end for word in ("Root", "Left", "End"))
    assert "Right" not in end and "Other" not in end and "Root" not in other


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_kept_response_is_got_and_forgotten(is_streamed: bool) -> None:
    async def work(api: Any) -> None:
        asked = {"model": "demo", "input": "One", "metadata": {"a": "b"}}
        if is_streamed:
            events = [one async for one in await api.responses.create(**asked, stream=True)]
            made = events[-1].response
        else:
            made = await api.responses.create(**asked)
        again = await api.responses.retrieve(made.id)
        assert again == made and again.metadata == {"a": "b"} and again.output_text == "ab"
        assert again.text.format.type == "text" and again.truncation == "disabled"
        await api.responses.delete(made.id)
        for call in (api.responses.retrieve, api.responses.delete, api.responses.input_items.list):
            with pytest.raises(openai.NotFoundError) as error:
                await call(made.id)
            assert error.value.body["type"] == "invalid_request_error"
            assert error.value.body["message"] == f"Response with id '{made.id}' not found."
        with pytest.raises(openai.BadRequestError) as refused:
            await api.responses.create(model="demo", input="Two", previous_response_id=made.id)
        assert refused.value.code == "previous_response_not_found"
        assert refused.value.param == "previous_response_id"

    with_openai(Recording(), work)


@pytest.mark.parametrize("reference", [{"id": ""}, {}, {"id": None}])
def test_a_reference_to_nothing_is_refused(reference: dict[str, Any]) -> None:
    body = {"model": "demo", "input": [{"type": "item_reference", **reference}]}
    answer, _ = send(Recording(), "POST", "/v1/responses", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("input")
    assert "needs the id of an item" in answer.json()["error"]["message"]


def test_what_is_not_stored_is_not_found() -> None:
    made = create(Recording(), input="One", store=False)
    assert made.store is False
    with pytest.raises(openai.BadRequestError):
        create(Recording(), input="Two", previous_response_id=made.id)
    reference = [{"type": "item_reference", "id": made.output[0].id}]
    with pytest.raises(openai.NotFoundError, match="send the item itself"):
        create(Recording(), input=reference)


def test_the_items_of_an_input() -> None:
    async def work(api: Any) -> None:
        first = await api.responses.create(model="demo", input="One")
        more = [
            {"role": "developer", "content": [{"type": "input_text", "text": "Two"}]},
            {"role": "user", "content": "Three"},
        ]
        second = await api.responses.create(model="demo", input=more, previous_response_id=first.id)
        items = [
            item async for item in api.responses.input_items.list(second.id, limit=1, order="asc")
        ]
        assert [item.content[0].text for item in items] == ["One", "ab", "Two", "Three"]
        assert items[1].id == first.output[0].id and len({item.id for item in items}) == 4
        ResponseInputMessageItem.model_validate(items[0].model_dump(), strict=True)
        page = await api.responses.input_items.list(second.id)
        assert [item.id for item in page.data] == [item.id for item in reversed(items)]
        assert not page.has_more
        for wrong in ({"limit": 0}, {"limit": 101}, {"after": "x"}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError) as error:
                await api.responses.input_items.list(second.id, **wrong)
            assert error.value.param in wrong

    with_openai(Recording(), work)


def test_clients_of_other_keys_find_nothing() -> None:
    app: Any = create_app(ServedModels([make_backend(Recording())]))
    app = Gate(app, keys=KEYS, local=True, max_body_bytes=1 << 20)

    async def work() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport) as http:
            own, other = (
                openai.AsyncOpenAI(base_url="http://localhost/v1", api_key=key, http_client=http)
                for key in KEYS
            )
            made = await own.responses.create(model="demo", input="One")
            item: Any = {"type": "item_reference", "id": made.output[0].id}
            for call in (other.responses.retrieve, other.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(made.id)
            with pytest.raises(openai.NotFoundError):
                await other.responses.create(model="demo", input=[item])
            with pytest.raises(openai.BadRequestError):
                await other.responses.create(
                    model="demo", input="Two", previous_response_id=made.id
                )
            assert (await own.responses.retrieve(made.id)).id == made.id

    asyncio.run(work())


@pytest.mark.usefixtures("thinking")
def test_thoughts_are_a_summary_where_one_is_asked_for() -> None:
    def summed(api: Any, **more: Any) -> Any:
        return api.responses.create(model="demo", input="a", reasoning={"summary": "auto"}, **more)

    async def work(api: Any) -> tuple[Any, list[Any]]:
        return await summed(api), [one async for one in await summed(api, stream=True)]

    whole, events = with_openai(answering(SAID), work)
    thought, said = whole.output
    assert [one.text for one in thought.summary] == ["I see."] and thought.content is None
    assert said.content[0].text == "Yes." and whole.reasoning.summary == "auto"
    ResponseReasoningItem.model_validate(thought.model_dump(), strict=True)
    kinds = list(dict.fromkeys(one.type for one in events))
    assert kinds[2:8] == [
        "response.output_item.added", "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta", "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done", "response.output_item.done",
    ]  # fmt: skip
    for one in events:
        for kind in (
            ResponseReasoningSummaryPartAddedEvent, ResponseReasoningSummaryTextDeltaEvent
        ):  # fmt: skip
            if isinstance(one, kind):
                kind.model_validate(one.model_dump(), strict=True)
    texts = [one.delta for one in events if one.type == "response.reasoning_summary_text.delta"]
    assert "".join(texts) == "I see."
    client = Recording()
    create(client, input="b", previous_response_id=whole.id)
    assert "[assistant]<think>I see.</think>Yes." in prompt_of(client.requests[0])


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize("reasoning", [{}, {"summary": "auto"}, {"summary": "none"}])
def test_thoughts_come_back_by_their_encrypted_content(reasoning: dict[str, Any]) -> None:
    """Codex sends that and the summary back, and never the content."""
    asked: dict[str, Any] = {"input": "a", "reasoning": reasoning, "text": {"verbosity": "low"}}
    (plain, _) = create(answering(SAID), **asked).output
    assert plain.encrypted_content is None
    include = ["reasoning.encrypted_content"]

    async def work(api: Any) -> tuple[Any, list[Any]]:
        asked["include"] = include
        events = await api.responses.create(model="demo", stream=True, **asked)
        return await api.responses.create(model="demo", **asked), [one async for one in events]

    whole, events = with_openai(answering(SAID), work)
    thought, said = whole.output
    ResponseReasoningItem.model_validate(thought.model_dump(), strict=True)
    assert whole.reasoning.summary == (None if reasoning.get("summary") == "none" else
                                       reasoning.get("summary"))  # fmt: skip
    done = [one.item for one in events if one.type == "response.output_item.done"]
    final = events[-1].response.output
    told = {one.encrypted_content for one in (thought, done[0], final[0])}
    assert len(told) == 1 and "I see." not in str(told)
    client = Recording()
    back = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    items = [{"role": "user", "content": "a"}, back, said.model_dump()]
    create(client, input=[*items, {"role": "user", "content": "b"}])
    assert "[assistant]<think>I see.</think>Yes." in prompt_of(client.requests[0])
    for other in ("gAAAAABo" * 9, "text:not base64", "text:/w==", ""):
        back["encrypted_content"] = other
        create(client, input=items)
        assert "<think>" not in prompt_of(client.requests[-1])


def test_an_answer_that_fails_midway_is_a_failed_response() -> None:
    client = Recording(ANSWER[0], ServiceError("it is gone"))

    async def work(api: Any) -> list[Any]:
        return [
            one async for one in await api.responses.create(model="demo", input="a", stream=True)
        ]

    *_, last = with_openai(client, work)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == (
        "server_error", "it is gone"
    )  # fmt: skip
    with pytest.raises(openai.NotFoundError):
        with_openai(client, lambda api: api.responses.retrieve(last.response.id))


def test_a_long_conversation_loses_its_beginning_where_that_is_wanted(monkeypatch: Any) -> None:
    """What fits is found by prompts alone: the grammar of a schema is compiled once."""
    compiled: list[int] = []
    compile_schema = requests.schema_grammar

    def counted(*given: Any) -> Any:
        compiled.append(1)
        return compile_schema(*given)

    monkeypatch.setattr(requests, "schema_grammar", counted)
    talk: list[dict[str, Any]] = [{"role": "developer", "content": "Be brief."}]
    for number in range(12):
        talk += [
            {"role": "user", "content": f"Question {number}: " + "one two three " * 15},
            {"role": "assistant", "content": f"Answer {number}."},
        ]
    talk.append({"role": "user", "content": "The last one."})
    client = Recording()
    with pytest.raises(openai.BadRequestError) as error:
        create(client, input=talk)
    assert error.value.code == "context_length_exceeded" and not compiled
    made = create(client, input=talk, truncation="auto")
    assert made.truncation == "auto"
    (request,) = client.requests
    asked = prompt_of(request)
    assert len(request.prompt_ids or ()) <= CONTEXT * 0.75
    assert compiled == [1]
    assert "Be brief." in asked and "The last one." in asked and "Question 0" not in asked
    kept = [number for number in range(12) if f"Question {number}:" in asked]
    assert kept == list(range(kept[0], 12))
    # One turn more would be too many.
    longer = [talk[0], *talk[1 + 2 * (kept[0] - 1) :]]
    more = create(client, input=longer)
    assert len(client.requests[1].prompt_ids or ()) > CONTEXT * 0.75 and more.id
    one = [{"role": "user", "content": "one two three " * 400}]
    with pytest.raises(openai.BadRequestError, match="the context holds"):
        create(client, input=one, truncation="auto")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"truncation": "middle"}, "truncation"),
        ({"store": "yes"}, "store"),
        ({"previous_response_id": 3}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
    ],
)
def test_what_is_not_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    body = {"model": "demo", "input": "a", **fields}
    answer, _ = send(Recording(), "POST", "/v1/responses", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"].startswith(param)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [CALL], "tool_choice": "required", "metadata": {"a": "b"}},
        {"tools": [CALL], "tool_choice": {"type": "function", "name": "look_up"}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
        {"reasoning": {"effort": "low", "summary": "auto"}, "temperature": 0.5, "top_p": 0.9},
    ],
)
def test_responses_and_their_events_are_of_openais_types(fields: dict[str, Any]) -> None:
    """Its client takes anything; its types are strict."""
    said = '<tool_call>\n{"name": "look_up", "arguments": {"a": 1}}\n</tool_call>'

    async def work(api: Any) -> list[Any]:
        asked = {"model": "demo", "input": "a", "instructions": "Be brief.", **fields}
        whole = await api.responses.create(**asked)
        kept = await api.responses.retrieve(whole.id)
        events = await api.responses.create(**asked, stream=True)
        return [whole, kept, *[one async for one in events]]

    found = with_openai(answering(said if "tools" in fields else "Yes."), work)
    assert len({type(one) for one in found}) >= 8
    for one in found:
        type(one).model_validate_json(one.to_json(), strict=True)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
@pytest.mark.parametrize("where", ["tools", "text"])
def test_numbers_that_json_lacks_are_refused(number: str, where: str) -> None:
    schema = '{"type": "object", "properties": {"a": {"maximum": ' + number + "}}}"
    field = {
        "tools": '[{"type": "function", "name": "f", "parameters": ' + schema + "}]",
        "text": '{"format": {"type": "json_schema", "name": "f", "schema": ' + schema + "}}",
    }[where]
    with pytest.raises(ApiError, match="must hold finite numbers alone") as error:
        parse(ResponsesRequest, f'{{"input": "a", "{where}": {field}}}'.encode())
    assert error.value.status == 400 and str(error.value.param).startswith(where)


def test_tokens_of_an_input_are_counted() -> None:
    async def work(api: Any) -> None:
        first = await api.responses.create(model="demo", input="One", instructions="Be brief.")
        asked: dict[str, Any] = {"model": "demo", "input": "Two", "tools": [CALL]}
        asked["previous_response_id"] = first.id
        counted = await api.responses.input_tokens.count(**asked)
        answered = await api.responses.create(**asked)
        assert counted.input_tokens == answered.usage.input_tokens > first.usage.input_tokens
        assert counted.object == "response.input_tokens"

    client = Recording()
    with_openai(client, work)
    assert len(client.requests) == 2


def test_a_stream_is_not_told_again() -> None:
    made = create(Recording(), input="a")
    answer, _ = send(Recording(), "GET", f"/v1/responses/{made.id}?stream=true")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream"


def turn(previous: Turn | None = None, size: int = 10, name: str = "x") -> Turn:
    given = json.dumps([{"id": name, "type": "message", "content": "a" * size}]).encode()
    return Turn(previous, given, {"output": [{"id": f"msg_{name}"}]})


def test_the_oldest_used_are_forgotten_first() -> None:
    kept = KeptResponses(most=2)
    for name in ("a", "b"):
        kept.add(name, turn(name=name))
    assert kept.get("a") is not None
    kept.add("c", turn(name="c"))
    assert [kept.get(name) is not None for name in "abc"] == [True, False, True]
    assert kept.holder("msg_a") is kept.get("a")
    with pytest.raises(ApiError):
        kept.holder("msg_b")


def test_no_client_pushes_out_what_one_with_fewer_has() -> None:
    size = turn(size=1000, name="00").num_bytes
    for kept in (KeptResponses(most=6), KeptResponses(most_bytes=6 * size)):
        for number, owner in enumerate(["a"] * 2 + ["b"] * 40 + ["a"] + ["c"] * 2):
            client_of_context.set(owner)
            kept.add(f"{number:02}", turn(size=1000, name=f"{number:02}"))
            gc.collect()

        def found(owner: str, kept: KeptResponses = kept) -> list[int]:
            client_of_context.set(owner)
            return [number for number in range(45) if kept.get(f"{number:02}") is not None]

        assert [found(owner) for owner in "abc"] == [[1, 42], [40, 41], [43, 44]]
        client_of_context.set("")


def test_all_are_forgotten_in_time() -> None:
    now = [0.0]
    kept = KeptResponses(most_s=10, clock=lambda: now[0])
    kept.add("a", turn(name="a"))
    kept.add("b", turn(name="b"))
    now[0] = 8
    assert kept.get("a") is not None
    now[0] = 11
    assert kept.get("b") is None and kept.get("a") is not None
    now[0] = 22
    with pytest.raises(ApiError):
        kept.holder("msg_a")
    assert len(kept) == 0 and kept.num_bytes == 0


def test_bytes_are_bounded_also_those_of_forgotten_beginnings() -> None:
    size = turn(size=1000, name="00").num_bytes
    kept = KeptResponses(most_bytes=10 * size)
    for number in range(50):
        kept.add(str(number), turn(size=1000, name=f"{number:02}"))
        assert kept.num_bytes <= 11 * size
    gc.collect()
    assert kept.num_bytes == 10 * size == len(kept) * size
    # A follow-up holds what it continues, so a conversation beyond the limit goes as a whole.
    previous, long = None, KeptResponses(most_bytes=10 * size)
    for number in range(10):
        previous = turn(previous, size=1000, name=f"{number:02}")
        long.add(str(number), previous)
    for number in range(9):
        long.remove(str(number))
    assert len(long) == 1 and long.num_bytes == 10 * size
    assert previous is not None and len(previous.input) == 19
    del previous
    long.add("z", turn(size=1000, name="zz"))
    gc.collect()
    assert long.get("9") is None and long.get("z") is not None and long.num_bytes == size


def test_a_request_that_runs_holds_nothing_of_what_it_continues() -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    class Slow(Recording):
        async def submit(self, request: GenerateRequest, deliver: Any) -> str:
            if "wait" in prompt_of(request):
                begun.set()
                await may_end.wait()
            return await super().submit(request, deliver)

    kept = KeptResponses()
    route = ResponsesRoute(backend_of(Slow()), kept)

    async def respond(owner: str, text: str, previous: str | None = None) -> str:
        client_of_context.set(owner)
        body = {"model": "demo", "input": text, "previous_response_id": previous}
        made = await route.whole(parse(ResponsesRequest, json.dumps(body).encode()))
        assert made["store"] == (text != "wait")  # what is not kept does not say so
        return str(made["id"])

    async def work() -> None:
        chain = [await respond("a", "One")]
        for text in ("Two", "Three", "Four"):
            chain.append(await respond("a", text, chain[-1]))
        bound = kept.num_bytes * 3 // 2
        kept._most_bytes = bound
        running = asyncio.create_task(respond("a", "wait", chain[-1]))
        await begun.wait()
        for number in range(8):
            newest = await respond("b", f"Number {number}")
            assert kept.num_bytes <= bound and kept.get(newest) is not None
        may_end.set()
        chain.append(await running)
        client_of_context.set("a")
        assert not any(map(kept.get, chain))
        assert kept.num_bytes <= bound

    asyncio.run(work())


def test_a_conversation_of_many_turns_ends() -> None:
    kept, last = KeptResponses(most=1, most_bytes=1 << 40), None
    for number in range(50_000):
        last = turn(last, size=0, name=str(number))
        kept.add(str(number), last)
    assert last is not None and len(last.input) == 99_999
    del last
    kept.remove("49999")
    assert kept.num_bytes == 0


def test_clients_are_apart_in_what_is_kept() -> None:
    kept = KeptResponses()
    kept.add("a", turn())
    token = client_of_context.set("another")
    try:
        assert kept.get("a") is None
    finally:
        client_of_context.reset(token)
    assert kept.get("a") is not None


def test_ids_cannot_be_guessed() -> None:
    made = [create(Recording(), input="a") for _ in range(20)]
    ids = [one.id for one in made] + [one.output[0].id for one in made]
    assert len({one.partition("_")[2] for one in ids}) == 40
    assert all(len(bytes.fromhex(one.partition("_")[2])) == 16 for one in ids)


def test_usage_of_a_follow_up_says_what_was_cached() -> None:
    class Finding(Recording):
        async def submit(self, request: GenerateRequest, deliver: Any) -> str:
            size = len(request.prompt_ids or ())
            result = Generation("ab", [7, 8], "stop", size, 0.1, 0.1, num_cached_tokens=3)
            deliver(TokenEvent("ab", result, 2))
            return "1"

    first = create(Finding(), input="One")
    second = create(Finding(), input="Two", previous_response_id=first.id)
    assert second.usage.input_tokens_details.cached_tokens == 3
    assert second.usage.input_tokens > first.usage.input_tokens
