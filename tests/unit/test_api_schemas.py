"""What requests may hold, and how a wrong one is answered."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotcold.model.errors import PromptError, PromptTooLongError, ServiceError, UsageError
from hotcold.ui.api import schemas
from hotcold.ui.api.errors import ApiError, as_api_error
from hotcold.ui.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
)

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def refused(schema: Any, body: Any) -> ApiError:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as error:
        parse(schema, content)
    assert error.value.status == 400
    assert len(error.value.message.splitlines()) == 1
    return error.value


def test_unknown_fields_are_ignored_and_others_read() -> None:
    body = parse(ChatRequest, json.dumps({**CHAT, "user": "a", "store": [1], "n": 2}).encode())
    assert body.n == 2 and not hasattr(body, "user")
    assert body.messages[0].for_template == {"role": "user", "content": "hi"}


def test_parts_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = parse(
        ChatRequest, json.dumps({"messages": [{"role": "developer", "content": parts}]}).encode()
    )
    assert body.messages[0].for_template == {"role": "system", "content": "ab"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_of_every_form(prompt: Any, expected: Any) -> None:
    assert parse(CompletionRequest, json.dumps({"prompt": prompt}).encode()).prompts == expected


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**30}, "n"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"1": 500}}, "logit_bias"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"top_logprobs": 1}, None),
        ({"grammar": "a", "response_format": {"type": "json_object"}}, None),
    ],
)
def test_wrong_values_name_the_field(changes: dict[str, Any], param: str | None) -> None:
    error = refused(ChatRequest, {**CHAT, **changes})
    name = None if error.param is None else error.param
    assert name == param or (param == "stop" and str(name).startswith("stop"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function is missing"),
        ({"repetition_penalty": 0}, "repetition_penalty must be more than 0"),
        ({"best_of": 2}, "best_of is not supported here; leave it out"),
        ({"n_predict": 2}, "n_predict is not known here; give max_tokens"),
        ({"logit_bias": {"a": 1}}, "logit_bias must hold token ids, each once, with a number from"),
        ({"stop": 5}, "stop must be a text or a list"),
        ({"stop": ["a"] * 65}, "stop may hold at most 64 items"),
        ({"tool_choice": "maybe"}, "tool_choice must be 'none', 'auto' or 'required' or an object"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json and guided_regex were both given"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": 2}, "top_p must be at most 1"),
        ({"frequency_penalty": 3}, "frequency_penalty must be at most 2"),
        ({"stream": 1}, "stream must be true or false"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "pirate"}]}, "messages.0.role must be 'system', 'developer', "),
        ({"messages": [{"content": "a"}]}, "messages.0.role is missing"),
        ({"messages": [{"role": "user"}]}, "messages.0: content is missing; a message of user"),
        ({"messages": [{"role": "system", "content": None}]}, "messages.0: content is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
            "messages.0.content.0.type must be 'text' or 'refusal'",
        ),
    ],
)
def test_a_refusal_is_a_sentence(changes: dict[str, Any], said: str) -> None:
    assert refused(ChatRequest, {**CHAT, **changes}).message.startswith(said)


def test_who_may_say_nothing() -> None:
    """An answer of calls alone, and a tool that returned nothing, as OpenAI's own client types."""
    said = [{"role": role, "content": None} for role in ("assistant", "tool", "function")]
    asked = parse(ChatRequest, json.dumps({**CHAT, "messages": said}).encode())
    assert [one.for_template["content"] for one in asked.messages] == ["", "", ""]


def test_what_does_nothing_is_taken() -> None:
    neutral = {"repetition_penalty": 1.0, "best_of": 1, "frequency_penalty": 0, "tools": []}
    parse(ChatRequest, json.dumps({**CHAT, **neutral}).encode())


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
    refused(CompletionRequest, body)


BOMBS = {
    "messages": (ChatRequest, b'{"messages":[%s]}', b"{}"),
    "nested ids": (CompletionRequest, b'{"prompt":[%s]}', b"[1]"),
    "empty lists": (CompletionRequest, b'{"prompt":[%s]}', b"[]"),
    "wrong ids": (CompletionRequest, b'{"prompt":[%s]}', b"-1"),
    "wrong nested ids": (CompletionRequest, b'{"prompt":[%s]}', b'[""]'),
    "stop strings": (CompletionRequest, b'{"prompt":"a","stop":[%s]}', b"1"),
    "biases": (CompletionRequest, b'{"prompt":"a","logit_bias":{%s}}', b'"a":"b"'),
    "unknown": (CompletionRequest, b'{"prompt":[],"new":[%s]}', b"[]"),
    "tokens": (DetokenizeRequest, b'{"tokens":[%s]}', b"-1"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_refusal_costs_no_more_than_a_few_times_the_request(name: str) -> None:
    """Wrong items were all told of, those of a union once for each of its members."""
    schema, frame, item = BOMBS[name]
    body = frame % b",".join([item] * (180_000 // (len(item) + 1)))
    tracemalloc.start()
    try:
        error = refused(schema, body)
        assert tracemalloc.get_traced_memory()[1] < 60 * len(body)
    finally:
        tracemalloc.stop()
    assert len(json.dumps(error.body)) < 2000


def test_what_is_long_in_a_request_is_cut_in_its_refusal() -> None:
    for body in (
        b'{"prompt":"a","logit_bias":{"%s":1}}' % (b"n" * 100_000),
        b'{"prompt":"a","grammar":"%s"}' % (b"g" * 300_000),
    ):
        assert len(json.dumps(refused(CompletionRequest, body).body)) < 2000
    assert len(as_api_error(PromptError("\\" * 100_000)).body["error"]["message"]) < 1100


def test_brackets_and_commas_of_a_text_are_no_lists() -> None:
    text = '{"a": [1, 2]}, "\\\\" ' * 30_000
    assert parse(CompletionRequest, json.dumps({"prompt": text}).encode()).prompt == text
    ids = [7] * 100_000
    assert parse(CompletionRequest, json.dumps({"prompt": ids}).encode()).prompts == [ids]


_TEXTS = st.text(st.sampled_from('a\\"[{,\né'), max_size=6)


@given(
    st.recursive(
        _TEXTS | st.just(1), lambda inner: st.lists(inner) | st.dictionaries(_TEXTS, inner)
    ),
    st.booleans(),
)
def test_lists_and_objects_are_counted_outside_of_texts(value: Any, is_ascii: bool) -> None:
    """As many as a reader of JSON makes: the last that is allowed is, one less is not."""
    body = json.dumps({"x": [value] * 3}, ensure_ascii=is_ascii).encode()
    made = 0

    def count(found: Any) -> None:
        nonlocal made
        made += isinstance(found, list | dict)
        if isinstance(found, list | dict):
            for inner in found.values() if isinstance(found, dict) else found:
                count(inner)

    count(json.loads(body))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotcold.ui.api.schemas._MAX_NESTED", made)
        schemas._require_plain(body)
        patch.setattr("hotcold.ui.api.schemas._MAX_NESTED", made - 1)
        with pytest.raises(ApiError, match="lists and objects"):
            schemas._require_plain(body)


def test_tokenize_takes_one_of_two() -> None:
    refused(TokenizeRequest, {})
    refused(TokenizeRequest, {"prompt": "a", **CHAT})
    refused(DetokenizeRequest, {"tokens": [1, 1 << 40]})
    assert parse(TokenizeRequest, b'{"prompt": ""}').prompt == ""


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PromptTooLongError("long"), 400, "context_length_exceeded"),
        (PromptError("empty"), 400, None),
        (UsageError("wrong"), 400, None),
        (ServiceError("dead"), 503, None),
        (ApiError(404, "none", code="model_not_found"), 404, "model_not_found"),
        (RuntimeError("secret"), 500, None),
    ],
)
def test_errors_are_told_as_openai_does(error: Exception, status: int, code: str | None) -> None:
    told = as_api_error(error)
    assert told.status == status
    assert set(told.body["error"]) == {"message", "type", "param", "code"}
    assert told.body["error"]["code"] == code
    assert "secret" not in told.message
