"""/v1/responses, read by OpenAI's client: conversations that go on, items, events, what is kept."""

from __future__ import annotations

import typing
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseReasoningItem, response_input_item_param, tool_param

from hotcold.model.errors import ServiceError
from hotcold.ui.api.cached import client as client_of_context
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.responses.schemas import ResponsesRequest
from hotcold.ui.api.responses.stored import StoredResponse, StoredResponses
from hotcold.ui.api.schemas import parse
from hotcold.ui.gate import Gate
from tests.unit.ollama_routes import (
    ANSWER,
    HELLO,
    TOOL,
    Recording,
    backend_of,
    create,
    over,
    prompt_of,
    send,
    server,
    with_openai,
)
from tests.unit.test_cached_tokens import KEYS, Finding
from tests.unit.test_thoughts import SAID, answering
from tests.unit.test_thoughts import thinking as thinking

CALL = {"type": "function", **TOOL["function"]}
CALLED = '<tool_call>\n{"name": "look_up", "arguments": {"a": 1}}\n</tool_call>'


def test_a_follow_up_is_the_whole_conversation() -> None:
    client = Recording()
    first = create(client, input="One", instructions="Be brief.")
    more = [{"role": "user", "content": "Two"}]
    second = create(client, input=more, previous_response_id=first.id)
    third = create(client, input="Three", previous_response_id=second.id, instructions="Be long.")
    create(client, input="Right", previous_response_id=first.id)
    assert (second.previous_response_id, third.store) == (first.id, True)
    talk = [
        {"role": "user", "content": "One"}, {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "Two"}, {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "Three"},
    ]  # fmt: skip
    create(client, input=talk[:3], store=False)
    create(client, input=talk, instructions="Be long.", store=False)
    create(client, input=[*talk[:2], {"role": "user", "content": "Right"}], store=False)
    ids = [request.prompt_ids for request in client.requests]
    assert ids[1:4] == [ids[4], ids[5], ids[6]]  # instructions are a request's own
    made = [one.id.partition("_")[2] for one in (first, second, third, first.output[0])]
    assert len({bytes.fromhex(one) for one in made if len(one) == 32}) == 4, "cannot be guessed"


def test_calls_and_results_are_kept() -> None:
    first = create(answering(CALLED), input="One", tools=[CALL])
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


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_kept_response_is_got_and_forgotten(is_streamed: bool) -> None:
    async def work(api: Any) -> None:
        asked = {"model": "demo", "input": "One", "metadata": {"a": "b"}}
        if is_streamed:
            events = [one async for one in await api.responses.create(**asked, stream=True)]
            made = events[-1].response
        else:
            made = await api.responses.create(**asked)
        other = await api.responses.create(**asked, store=False)
        again = await api.responses.retrieve(made.id)
        assert again == made and again.metadata == {"a": "b"} and again.output_text == "ab"
        await api.responses.delete(made.id)
        assert (made.store, other.store) == (True, False)
        for gone in (made, other):
            for call in (api.responses.retrieve, api.responses.delete):
                with pytest.raises(openai.NotFoundError, match=f"id '{gone.id}' not found"):
                    await call(gone.id)
            with pytest.raises(openai.BadRequestError) as refused:
                await api.responses.create(model="demo", input="Two", previous_response_id=gone.id)
            assert refused.value.code == "previous_response_not_found"
            assert refused.value.param == "previous_response_id"
            item = {"type": "item_reference", "id": gone.output[0].id}
            with pytest.raises(openai.NotFoundError, match="send the item itself"):
                await api.responses.create(model="demo", input=[item])

    with_openai(Recording(), work)


def test_clients_of_other_keys_find_nothing() -> None:
    backend_of(Recording())

    async def work(http: httpx.AsyncClient) -> None:
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
            await other.responses.create(model="demo", input="Two", previous_response_id=made.id)
        assert (await own.responses.retrieve(made.id)).id == made.id

    over(Gate(server()[1], keys=KEYS, local=True, max_body_bytes=1 << 20), work)


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize("summary", [None, "auto", "none"])
def test_thoughts_go_back_as_they_came_or_by_their_encrypted_content(summary: str | None) -> None:
    """Codex sends that and the summary back, and never the content."""
    asked: dict[str, Any] = {"model": "demo", "input": "a", "reasoning": {"summary": summary}}

    async def work(api: Any) -> Any:
        plain = await api.responses.create(**asked)
        asked["include"] = ["reasoning.encrypted_content"]
        events = [one async for one in await api.responses.create(**asked, stream=True)]
        return plain, await api.responses.create(**asked), events

    plain, whole, events = with_openai(answering(SAID), work)
    (thought, said), final = whole.output, events[-1].response
    assert plain.output[0].encrypted_content is None and said.content[0].text == "Yes."
    told = thought.content if summary != "auto" else thought.summary
    assert [one.text for one in told] == ["I see."]
    ResponseReasoningItem.model_validate(thought.model_dump(), strict=True)
    encrypted = {one.encrypted_content for one in (thought, final.output[0])}
    assert len(encrypted) == 1 and "I see." not in str(encrypted)
    client = Recording()
    create(client, input="b", previous_response_id=plain.id)
    back = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    items = [{"role": "user", "content": "a"}, back, said.model_dump()]
    create(client, input=[*items, {"role": "user", "content": "b"}])
    for request in client.requests:
        assert prompt_of(request).count("[assistant]<think>I see.</think>Yes.") == 1
    for other in ("gAAAAABo" * 9, "text:not base64", "text:/w==", ""):
        back["encrypted_content"] = other
        create(client, input=items)
        assert "<think>" not in prompt_of(client.requests[-1])


def test_an_answer_that_fails_midway_is_a_failed_response() -> None:
    async def work(api: Any) -> list[Any]:
        stream = await api.responses.create(model="demo", input="a", stream=True)
        return [one async for one in stream]

    *_, last = with_openai(Recording(ANSWER[0], ServiceError("it is gone")), work)
    error = last.response.error
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (error.code, error.message) == ("server_error", "it is gone")
    with pytest.raises(openai.NotFoundError):
        with_openai(Recording(), lambda api: api.responses.retrieve(last.response.id))


def test_a_stream_is_not_told_again() -> None:
    made = create(Recording(), input="a")
    answer = send(Recording(), "GET", f"/v1/responses/{made.id}?stream=true")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream"


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [CALL], "tool_choice": "required", "metadata": {"a": "b"}},
        {"tools": [CALL], "tool_choice": {"type": "function", "name": "look_up"}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
        {"reasoning": {"effort": "low", "summary": "auto"}, "temperature": 0.5, "top_p": 0.9},
    ],
)
def test_responses_and_their_events_are_of_openais_types(fields: dict[str, Any]) -> None:
    """Its client takes anything; its types are strict. And a stream tells what the whole is."""
    said = f"<think>I see.</think>{CALLED if 'tools' in fields else 'Yes.'}"

    async def work(api: Any) -> list[Any]:
        asked = {"model": "demo", "input": "a", "instructions": "Be brief.", **fields}
        whole = await api.responses.create(**asked)
        kept = await api.responses.retrieve(whole.id)
        events = await api.responses.create(**asked, stream=True)
        return [whole, kept, *[one async for one in events]]

    found = with_openai(answering(said), work)
    for one in found:
        type(one).model_validate_json(one.to_json(), strict=True)
    whole, _, *events = found
    kinds = list(dict.fromkeys(one.type for one in events))
    thought = "reasoning_summary" if "reasoning" in fields else "reasoning"
    part = ["response.reasoning_summary_part.added"] if "reasoning" in fields else []
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[2 : 5 + len(part)] == [
        "response.output_item.added", *part, f"response.{thought}_text.delta",
        f"response.{thought}_text.done",
    ]  # fmt: skip
    assert [one.sequence_number for one in events] == list(range(len(events)))

    def plain(response: Any) -> list[Any]:
        return [one.model_dump(exclude={"id", "call_id"}) for one in response.output]

    assert plain(events[-1].response) == plain(whole)
    done = [one.item for one in events if one.type == "response.output_item.done"]
    assert done == events[-1].response.output


def test_tokens_of_an_input_are_counted() -> None:
    async def work(api: Any) -> None:
        first = await api.responses.create(model="demo", input="One", instructions="Be brief.")
        asked: dict[str, Any] = {"model": "demo", "input": "Two", "tools": [CALL]}
        asked["previous_response_id"] = first.id
        counted = await api.responses.input_tokens.count(**asked)
        answered = await api.responses.create(**asked)
        assert counted.input_tokens == answered.usage.input_tokens > first.usage.input_tokens

    client = Finding(0)
    with_openai(client, work)
    assert len(client.requests) == 2


def keep(kept: StoredResponses, name: str, size: int = 10) -> None:
    kept.add(name, StoredResponse(b"a" * size, b"{}", frozenset()))


def names(kept: StoredResponses, count: int) -> list[int]:
    """Those that this client finds, by no use of them."""
    owner = client_of_context.get()
    return [number for number in range(count) if (owner, f"{number}") in kept._stored]


def test_the_oldest_used_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = StoredResponses(most=2)
    for name in "01":
        keep(kept, name)
    kept.found("0")
    keep(kept, "2")
    assert names(kept, 3) == [0, 2]
    monkeypatch.setattr("hotcold.ui.api.responses.stored.MOST_S", -1)
    with pytest.raises(ApiError):
        kept.found("2")
    assert kept.own() == []


@pytest.mark.parametrize("is_by_bytes", [False, True])
def test_no_client_pushes_out_what_one_with_fewer_has(is_by_bytes: bool) -> None:
    size = StoredResponse(b"a" * 1000, b"{}", frozenset()).num_bytes
    kept = StoredResponses(most_bytes=6 * size) if is_by_bytes else StoredResponses(most=6)
    for number, owner in enumerate(["a"] * 2 + ["b"] * 40 + ["a"] + ["c"] * 2):
        client_of_context.set(owner)
        keep(kept, str(number), 1000)
    found = []
    for owner in "abc":
        client_of_context.set(owner)
        found.append(names(kept, 45))
    client_of_context.set("")
    assert found == [[1, 42], [40, 41], [43, 44]]


def kinds(union: Any) -> set[str]:
    """The types of a union's members, as OpenAI's client declares them."""
    found: set[str] = set()
    for member in typing.get_args(union):
        kind = typing.get_type_hints(member)["type"]
        for literal in (kind, *typing.get_args(kind)):
            found |= {name for name in typing.get_args(literal) if isinstance(name, str)}
    return found


def test_a_session_goes_on_after_items_and_with_tools_of_every_kind() -> None:
    """What is of another server, or of next year, is passed over."""
    own = {"message", "function_call", "function_call_output", "custom_tool_call",
           "custom_tool_call_output", "item_reference"}  # fmt: skip
    others = sorted({*kinds(response_input_item_param.ResponseInputItemParam), "next"} - own)
    tools = sorted(kinds(tool_param.ToolParam) - {"function", "custom", "namespace"})
    assert len(others) > 12 and len(tools) > 6
    items = [{"type": kind, "id": "x", "call_id": "x", "action": {}} for kind in others]
    client = Recording()
    create(client, input=[*HELLO, *items], tools=[CALL, *({"type": kind} for kind in tools)])
    create(client, input=HELLO, tools=[CALL])
    assert client.requests[0].prompt_ids == client.requests[1].prompt_ids


def test_what_was_said_and_called_is_one_message_with_the_results_after_it() -> None:
    """As a chat has it; pictures and what is encrypted are named, agents tell as users do."""
    secret = {"type": "encrypted_content", "encrypted_content": "x"}
    task = [{"type": "input_text", "text": "Find it."}, secret]
    call = {"type": "function_call", "arguments": "{}"}
    items = [
        {"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": task},
        {"role": "assistant", "content": [
            {"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {**call, "call_id": "c", "namespace": "m", "name": "f"},
        {"role": "user", "content": "Well?"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "2"},
        {"type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_image", "image_url": "data:"}]},
    ]  # fmt: skip
    items.insert(4, {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"})
    client = Recording()
    create(client, input=items, tools=[CALL])
    functions = [{"name": "m__f", "arguments": "{}"}, {"name": "g", "arguments": '{"input": "x"}'}]
    messages = [
        {"role": "user", "content": "Find it.\n[encrypted text left out]"},
        {"role": "assistant", "content": "ab", "tool_calls": [
            {"id": name, "type": "function", "function": one}
            for name, one in zip("cd", functions, strict=True)]},
        {"role": "tool", "tool_call_id": "d", "content": "2"},
        {"role": "tool", "tool_call_id": "c", "content": "[image left out]"},
        {"role": "user", "content": "Well?"},
    ]  # fmt: skip
    send(client, "POST", "/v1/chat/completions", {"messages": messages, "tools": [TOOL]})
    assert prompt_of(client.requests[0]) == prompt_of(client.requests[1])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_json_lacks_are_refused(number: str) -> None:
    schema = '{"type": "object", "properties": {"a": {"maximum": ' + number + "}}}"
    for where, field in (
        ("tools", '[{"type": "function", "name": "f", "parameters": ' + schema + "}]"),
        ("text", '{"format": {"type": "json_schema", "name": "f", "schema": ' + schema + "}}"),
    ):
        with pytest.raises(ApiError, match="must hold finite numbers alone") as error:
            parse(ResponsesRequest, f'{{"input": "a", "{where}": {field}}}'.encode())
        assert str(error.value.param).startswith(where)
