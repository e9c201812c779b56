"""Requests: fields that change answers are done or refused, wrong ones cost little."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
import tokenizers

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.errors import PromptError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.ui.api.embeddings import EmbeddingsRequest
from hotcold.ui.api.errors import ApiError, as_api_error
from hotcold.ui.api.fields import CHANGING, Request
from hotcold.ui.api.ollama.schemas import OllamaChat, OllamaEmbed, OllamaGenerate
from hotcold.ui.api.responses.schemas import ResponsesRequest
from hotcold.ui.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)
from tests.unit.ollama_routes import HELLO, TOOL, Recording, post, refused

BODIES: dict[type[Request], dict[str, Any]] = {
    ChatRequest: {"messages": HELLO},
    CompletionRequest: {"prompt": "a"},
    ResponsesRequest: {"input": "a"},
    OllamaChat: {"model": "demo", "messages": HELLO},
    OllamaGenerate: {"model": "demo", "prompt": "a"},
    OllamaEmbed: {"model": "demo", "input": "a"},
    EmbeddingsRequest: {"input": "a"},
    TokenizeRequest: {"prompt": "a"},
}
HARMLESS = {
    "user": "a", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prediction": {},
    "cache_prompt": True, "id_slot": 1, "priority": 1,
    "safety_identifier": "a", "prompt_cache_key": "a", "nobody_knows_this": [1], "usage": {},
    "conversation_id": "a", "transforms": [], "models": ["a"], "provider": {},
    "min_output_tokens": 1, "x" * 200_000: 1,
}  # fmt: skip


def said_of(schema: type[Request], **fields: Any) -> str | None:
    try:
        parse(schema, json.dumps({**BODIES[schema], **fields}).encode())
    except ApiError as error:
        assert error.status == 400
        return error.message
    return None


@pytest.mark.parametrize("schema", BODIES)
def test_each_field_is_done_or_refused_by_its_name(schema: type[Request]) -> None:
    refused = {name for name in CHANGING if name not in schema.model_fields}
    assert len(refused) > 25
    for name in refused:
        assert str(said_of(schema, **{name: ["something"]})).startswith(f"{name} is not "), name
        for nothing in (None, "", [], {}, *CHANGING[name].unchanging):
            assert said_of(schema, **{name: nothing}) is None, name
    known = {*CHANGING, *(name for one in BODIES for name in one.model_fields)}
    assert {other.instead for other in CHANGING.values()} <= known | {""}
    for name, value in HARMLESS.items():
        assert name not in CHANGING
        assert said_of(schema, **{name: value}) is None, name


def test_names_lead_to_what_a_route_has() -> None:
    for schema, name, instead in (
        (ResponsesRequest, "num_predict", "max_output_tokens"),
        (OllamaChat, "thinking", "think"),
        (ResponsesRequest, "thinking", "reasoning"),
        (ChatRequest, "stop_sequences", "stop"),
    ):
        assert said_of(schema, **{name: 3}) == f"{name} is not known here; give {instead}"
    assert said_of(ChatRequest, extra_body=3) == "extra_body is not supported here; leave it out"
    excluding = {"effort": "low", "exclude": True}
    assert said_of(ChatRequest, reasoning=excluding) == "reasoning.exclude must be False"
    assert said_of(ChatRequest, reasoning={"effort": "low", "exclude": False}) is None


def asked(path: str = "/v1/chat/completions", **fields: Any) -> GenerateRequest:
    client = Recording()
    prompt = {} if "prompt" in fields or path == "/v1/responses" else {"messages": HELLO}
    answer = post(client, path, **{"max_tokens": 20, **prompt, **fields})
    assert answer.status_code == 200, answer.text
    return client.requests[0]


TEXT_SHAPE = {"type": "json_object"}


CALL = {"type": "function", **TOOL["function"]}
FLAT = {**CALL, "name": "n__look_up"}
INNER = {"type": "namespace", "name": "n", "tools": [CALL]}
FOREIGN = {"type": "web_search"}
LONG = [{"role": "user", "content": "a " * (1 << 20)}]
# By route: what a request has besides, and fields, what is told of them, and often the wrong one.
REFUSED: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]]]] = {
    "/v1/chat/completions": ({"messages": HELLO, "max_tokens": 20}, [
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"temperature": -1}, "temperature must be at least 0"),
        (
            {"repeat_penality": 1},
            "'repeat_penality' is not known here; did you mean repeat_penalty?",
        ),
        ({"maxTokens": 1}, "'maxTokens' is not known here; did you mean max_tokens?"),
        ({"logprob": 1}, "'logprob' is not known here; did you mean logprobs?"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"seed": 1 << 64}, "seed must be"),
        ({"stop": 5}, "stop must be a text or a list"),
        ({"stop": [""]}, "stop.0 must not be empty"),
        ({"cache_salt": ""}, "cache_salt must not be empty"),
        ({"min_tokens": 21}, "min_tokens is 21; give a whole number from 0 to 20"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"stop_token_ids": [1 << 20]}, "token id 1048576 is not in the vocabulary"),
        ({"logit_bias": {"1048576": 1}}, "token id 1048576 is not in the vocabulary"),
        ({"logit_bias": {"1": 500}}, "logit_bias must hold token ids, each once, with a number"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs must be at most 20"),
        ({"top_logprobs": 1}, "top_logprobs is for requests with logprobs true"),
        ({"stream_options": {"include_usage": True}}, "stream_options is for requests with stream"),
        ({"messages": [{"role": "pirate"}]}, "messages.0.role must be 'system', 'developer', "),
        ({"messages": [{"role": "user"}]}, "messages.0: content is missing; a message of user"),
        (
            {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
            "messages.0.content.0.type must be 'text', 'input_text' or",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format: json_schema must be"),
        ({"grammar": "a", "response_format": TEXT_SHAPE}, "response_format and grammar were both"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json and guided_regex were both given"),
        ({"guided_json": "{"}, "the JSON schema is no JSON"),
        (
            {"structured_outputs": {"structural_tag": {}}},
            "structured_outputs.structural_tag is",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.regex and"),
        ({"tools": [TOOL, TOOL]}, "two of the tools have the same name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type must be 'function'"),
        ({"tools": [TOOL], "guided_regex": "a"}, "tools and grammar were both given"),
        ({"tool_choice": "required"}, "tool_choice is for requests with tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice names 'x', which is no tool",
        ),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message and add_generation_prompt exclude each other",
        ),
        ({"messages": LONG}, "the context", "messages"),
    ]),
    "/v1/completions": ({}, [({"prompt": [4096]}, "not in the vocabulary", "prompt")]),
    "/v1/responses": ({"input": "a"}, [
        ({"input": LONG}, "the context", "input"),
        ({"temperature": 3}, "must be at most 2", "temperature"),
        ({"truncation": "auto"}, "is not supported here", "truncation"),
        ({"store": "yes"}, "must be true or false", "store"),
        ({"previous_response_id": 3}, "must be a text", "previous_response_id"),
        ({"background": True}, "is not supported here", "background"),
        ({"conversation": "conv_1"}, "is not supported here", "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "is not supported here", "include"),
        ({"reasoning": {"summary": "long"}}, "must be", "reasoning.summary"),
        ({"metadata": {str(number): "" for number in range(17)}}, "at most 16", "metadata"),
        ({"metadata": {"a": "b" * 513}}, "at most 512", "metadata.a"),
        ({"input": [{"type": "item_reference", "id": ""}]}, "must not be empty", "input.0.id"),
        ({"input": [{"type": "item_reference"}]}, "is missing", "input.0.id"),
        ({"tools": [INNER, FLAT]}, "'n__look_up', as the model calls them", "tools"),
        ({"tools": [{**INNER, "tools": [INNER]}]}, "is of a type that", "tools.0.tools.0"),
        ({"tools": [FOREIGN], "tool_choice": "required"}, "no function among", "tool_choice"),
        ({"tools": [CALL], "tool_choice": FOREIGN}, "cannot be chosen here", "tool_choice"),
        ({"tools": [CALL], "tool_choice": {"type": "function", "name": "x"}}, "is no tool", None),
    ]),
    "/v1/responses/input_tokens": ({}, [({"input": LONG}, "the context", "input")]),
    "/v1/embeddings": ({}, [
        ({"input": ""}, "empty", "input"),
        ({"input": []}, "must not be empty", "input"),
        ({"input": ["a", ""]}, "empty", "input"),
        ({"input": [[]]}, "must not be empty", "input.0"),
        ({"input": [99999]}, "not in the vocabulary", "input"),
        ({"input": [1] * 513}, "has 513 tokens, the context holds 512;", "input"),
        ({"input": "a", "dimensions": 64}, "dimensions is not supported here", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "must be 'float' or 'base64'"),
        ({}, "input is missing", "input"),
    ]),
    "/detokenize": ({}, [
        ({"tokens": [4096]}, "token id 4096 is not in the vocabulary", "tokens"),
        ({"tokens": "ab"}, "tokens must be a list", "tokens"),
        ({"tokens": [1, -1]}, "tokens.1 must be at least 0", "tokens.1"),
        ({"tokens": [1, 2.5]}, "tokens.1 must be a whole number", "tokens.1"),
        ({"prompt": "a"}, "tokens is missing", "tokens"),
    ]),
    "/tokenize": ({}, [
        ({"prompt": "a" * (1 << 21)}, "characters", "prompt"),
        ({"messages": LONG}, "characters", "messages"),
        ({"content": "b"}, "give either prompt or messages", None),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("path", REFUSED)
def test_a_refusal_is_a_sentence_that_names_the_field(path: str) -> None:
    usual, rows = REFUSED[path]
    for fields, told, *param in rows:
        error = refused(path, usual | fields)
        assert told in error["message"] and [error["param"]] == (param or [error["param"]]), error


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SHAPE = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
LARK = 'start: "a"'


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"guided_json": SCHEMA}, SHAPE),
        ({"json_schema": SCHEMA}, SHAPE),
        ({"structured_outputs": {"json": SCHEMA}}, SHAPE),
        ({"structured_outputs": {"json_object": True}}, {"type": "json_object"}),
        ({"guided_grammar": LARK}, LARK),
        ({"guided_choice": ["a", 'b"\n']}, 'start: "a" | "b\\"\\n"\n'),
        ({"guided_regex": "[ab]"}, ("regex", "[ab]")),
        ({"structured_outputs": {"regex": "[ab]"}}, ("regex", "[ab]")),
    ],
)
def test_shapes_of_every_name_are_those_of_openais(
    path: str, fields: dict[str, Any], same: str | tuple[str, str] | dict[str, Any]
) -> None:
    prompt = {"prompt": "a"} if path == "/v1/completions" else {}
    grammar = asked(path, **fields, **prompt).grammar
    assert grammar is not None
    if isinstance(same, dict):
        assert grammar == asked(path, response_format=same, **prompt).grammar
    else:
        kind, text = ("lark", same) if isinstance(same, str) else same
        assert (grammar.kind, grammar.text) == (kind, text)


def variables_of(monkeypatch: pytest.MonkeyPatch, path: str, **fields: Any) -> dict[str, Any]:
    """What the chat template is given besides."""
    found: list[dict[str, Any]] = []
    render = Tokenizer.render_chat

    def told(self: Tokenizer, *args: Any, **more: Any) -> str:
        found.append(dict(more["variables"] or {}))
        return render(self, *args, **more)

    monkeypatch.setattr(Tokenizer, "render_chat", told)
    answer = post(Recording(), path, **fields)
    assert answer.status_code == 200, answer.text
    return found[0]


THINKS = {"enable_thinking": True, "thinking": True}
THINKS_NOT = {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"chat_template_kwargs": {"a": [1], "enable_thinking": False}},
         {"a": [1], "enable_thinking": False}),
        ({"reasoning_effort": "none"}, THINKS_NOT),
        ({"reasoning": {"effort": "none"}}, THINKS_NOT),
        ({"enable_thinking": False}, THINKS_NOT),
        ({"thinking": {"type": "disabled"}}, THINKS_NOT),
        ({"thinking": {"type": "enabled"}}, THINKS),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", **THINKS}),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"thinking": 5}},
         {"reasoning_effort": "low", "enable_thinking": True, "thinking": 5}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ],
)  # fmt: skip
def test_variables_reach_the_chat_template(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        assert variables_of(monkeypatch, path, messages=HELLO, **fields) == expected
    if set(fields) <= {"reasoning", "chat_template_kwargs"}:
        assert variables_of(monkeypatch, "/v1/responses", input="a", **fields) == expected


def test_a_message_that_has_begun_is_continued() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "It is twelve "}]
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO_DIRECTORY / "tokenizer.json"))

    def prompt_of(**fields: Any) -> str:
        ids = asked(messages=begun, **fields).prompt_ids or []
        told = post(Recording(), "/tokenize", messages=begun, **fields).json()
        assert told["tokens"] == ids
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    assert prompt_of(continue_final_message=True).endswith("It is twelve")
    assert not prompt_of().endswith("It is twelve")
    empty = [*HELLO, {"role": "assistant", "content": ""}]
    answer = post(Recording(), "/v1/chat/completions", messages=empty, continue_final_message=True)
    assert answer.status_code == 400


def refused_body(schema: Any, body: bytes) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(schema, body)
    assert error.value.status == 400 and len(error.value.message.splitlines()) == 1
    return error.value


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}',
     b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"prompt": [1, "a"]}',
     b'{"prompt": [[1], "a"]}', b'{"prompt": [-1]}', b'{"prompt": [true]}', b'{"prompt": []}',
     b'{"prompt": "a", "temperature": 1e999}',
     b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
     b'{"prompt": "a", "suffix": "b"}'],
)  # fmt: skip
def test_malformed_bodies_are_refused(body: bytes) -> None:
    refused_body(CompletionRequest, body)


BOMBS = {
    "messages": (ChatRequest, b'{"messages":[%s]}', b"{}"),
    "empty lists": (CompletionRequest, b'{"prompt":[%s]}', b"[]"),
    "stop strings": (CompletionRequest, b'{"prompt":"a","stop":[%s]}', b"1"),
    "tokens": (DetokenizeRequest, b'{"tokens":[%s]}', b"-1"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_refusal_costs_no_more_than_a_few_times_the_request(name: str) -> None:
    """Wrong items were all told of, those of a union once for each of its members."""
    schema, frame, item = BOMBS[name]
    body = frame % b",".join([item] * (180_000 // (len(item) + 1)))
    tracemalloc.start()
    try:
        error = refused_body(schema, body)
        assert tracemalloc.get_traced_memory()[1] < 60 * len(body)
    finally:
        tracemalloc.stop()
    assert len(json.dumps(error.body)) < 2000


def test_what_is_long_or_a_defect_is_not_told() -> None:
    for body in (
        b'{"prompt":"a","logit_bias":{"%s":1}}' % (b"n" * 100_000),
        b'{"prompt":"a","grammar":"%s"}' % (b"g" * 300_000),
    ):
        assert len(json.dumps(refused_body(CompletionRequest, body).body)) < 2000
    assert len(as_api_error(PromptError("\\" * 100_000)).body["error"]["message"]) < 1100
    told = as_api_error(RuntimeError("secret"))
    assert told.status == 500 and "secret" not in str(told.body)
    # Brackets within a text are none.
    assert parse(CompletionRequest, json.dumps({"prompt": '[{"\\' * 100_000}).encode()).prompt
