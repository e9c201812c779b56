"""Fields of requests that change answers: done or refused, by each route, and none in silence."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
import tokenizers
from pydantic import BaseModel, ValidationError, create_model
from pydantic.fields import FieldInfo
from starlette.testclient import TestClient

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.ui.access_log import AccessLog
from hotcold.ui.api import fields as read_over
from hotcold.ui.api.embeddings import EmbeddingsRequest
from hotcold.ui.api.errors import ApiError, refusal
from hotcold.ui.api.fields import CHANGING, INSTEAD, Request
from hotcold.ui.api.ollama.schemas import OllamaChat, OllamaEmbed, OllamaGenerate
from hotcold.ui.api.responses.schemas import ResponsesRequest
from hotcold.ui.api.schemas import ChatRequest, CompletionRequest, TokenizeRequest, parse
from tests.unit.ollama_routes import HELLO, TOOL, Recording, backend_of, post, server

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
    "safety_identifier": "a", "prompt_cache_key": "a", "nobody_knows_this": [1],
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
        neutral = schema.unchanging.get(name, CHANGING[name])
        for nothing in (None, "", [], {}, *neutral):
            assert said_of(schema, **{name: nothing}) is None, name
    for name, value in HARMLESS.items():
        assert name not in CHANGING
        assert said_of(schema, **{name: value}) is None, name


def test_the_names_of_all_clients_are_known() -> None:
    """Each is read by some route, or in the table."""
    known = set(CHANGING) | {name for schema in BODIES for name in schema.model_fields}
    assert {
        "chat_template_kwargs", "reasoning_effort", "think", "guided_json", "guided_regex",
        "guided_choice", "guided_grammar", "structured_outputs", "stop_token_ids", "min_tokens",
        "functions", "function_call", "continue_final_message", "add_generation_prompt",
        "logit_bias", "repetition_penalty", "bad_words", "allowed_token_ids", "prompt_logprobs",
        "truncate_prompt_tokens", "min_p", "n", "best_of", "skip_special_tokens", "lora",
        "include_stop_str_in_output", "use_beam_search", "length_penalty", "add_special_tokens",
        "echo", "modalities", "audio", "web_search_options", "logprobs", "n_predict",
        "json_schema", "mirostat", "typical_p", "dry_multiplier", "xtc_probability", "samplers",
        "image_data", "suffix", "template", "system", "context", "raw", "images", "keep_alive",
    } <= known  # fmt: skip
    assert set(INSTEAD) <= set(CHANGING)
    assert set(INSTEAD.values()) <= known
    for name in INSTEAD:
        seen: list[str] = []
        while name in INSTEAD:
            assert name not in seen, "they go round"
            seen.append(name)
            name = INSTEAD[name]


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("num_predict", 8, "max_tokens"), ("max_length", 8, "max_tokens"),
        ("stop_sequences", ["a"], "stop"), ("do_sample", False, "temperature"),
        ("penalty_last_n", 8, "repeat_last_n"), ("json_mode", True, "response_format"),
        ("random_seed", 1, "seed"), ("thinking_budget", 8, "thinking_token_budget"),
        ("reasoning_budget", 8, "thinking_token_budget"),
        ("return_tokens_as_token_ids", True, "return_token_ids"), ("num_return_sequences", 2, "n"),
    ],
)  # fmt: skip
def test_a_field_of_another_server_names_the_one_to_give(
    name: str, value: Any, instead: str
) -> None:
    assert said_of(ChatRequest, **{name: value}) == f"{name} is not known here; give {instead}"


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 7},
        {"thinking": {"type": "enabled", "budget_tokens": 7}},
        {"reasoning": {"max_tokens": 7}},
    ],
)
def test_a_budget_of_thoughts_by_any_name(fields: dict[str, Any]) -> None:
    found = asked("/v1/chat/completions", **fields).sampling
    assert found.thinking_token_budget == 7


def test_names_lead_to_what_a_route_has() -> None:
    told: dict[type[Request], tuple[str, str]] = {
        ResponsesRequest: ("num_predict", "max_output_tokens"),
        OllamaChat: ("thinking", "think"),
    }
    for schema, (name, instead) in told.items():
        assert said_of(schema, **{name: 3}) == f"{name} is not known here; give {instead}"
    assert said_of(ResponsesRequest, thinking=3) == "thinking is not known here; give reasoning"
    for name in ("num_beams", "lora_request", "extra_body"):
        assert said_of(ChatRequest, **{name: 3}) == f"{name} is not supported here; leave it out"
    excluding = {"effort": "low", "exclude": True}
    assert str(said_of(ChatRequest, reasoning=excluding)).startswith("reasoning: exclude is not")
    assert said_of(ChatRequest, reasoning={"effort": "low", "exclude": False}) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("repeat_penality", "repeat_penalty"), ("response_fromat", "response_format"),
        ("tool_choise", "tool_choice"), ("max_completion_token", "max_completion_tokens"),
        ("maxTokens", "max_tokens"), ("topP", "top_p"), ("logprob", "logprobs"),
    ],
)  # fmt: skip
def test_a_name_that_is_nearly_one_is_refused(name: str, meant: str) -> None:
    assert said_of(ChatRequest, **{name: 1}) == f"'{name}' is not known here; did you mean {meant}?"
    assert said_of(ChatRequest, **{name: None}) is None


def test_fields_of_vendors_pass_and_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_over, "_told", set())
    theirs: dict[str, Any] = {
        "conversation_id": "a", "chat_id": "a", "session_id": "a", "user_id": "a", "usage": {},
        "transforms": [], "route": "fallback", "plugins": [], "models": ["a"], "provider": {},
        "safe_prompt": True, "keepalive": "5m", "min_output_tokens": 1, "x" * 200_000: 1,
    }  # fmt: skip
    many: dict[str, Any] = {f"of_vendor_{number}": 1 for number in range(200)}
    nothing: dict[str, Any] = dict.fromkeys(read_over.HARMLESS)
    requests = (theirs, theirs, nothing, *[many | {"last": 1}] * 5)
    told: list[str] = []

    def lines(kind: str) -> list[str]:
        told.clear()
        app = AccessLog(server()[1], kind, told.append)
        backend_of(Recording())
        with TestClient(app, base_url="http://localhost") as client:
            for fields in requests:
                body = {"messages": HELLO, **fields, "model": "demo", "stream_options": None}
                answer = client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
        return told

    first, second, *_ = lines("text")
    assert "'demo', unknown fields: 'conversation_id', 'chat_id', 'session_id'" in first
    assert "models" not in first and "provider" not in first
    assert second.endswith("'demo'")
    assert max(map(len, told)) < 2000
    assert not any("unknown" in line for line in lines("text"))
    monkeypatch.setattr(read_over, "_told", set())
    found = [json.loads(line).get("ignored_fields", []) for line in lines("json")]
    assert found[0][0] == "conversation_id" and not found[1] and not found[2]
    assert sum(map(len, found)) <= 100


def asked(path: str = "/v1/chat/completions", **fields: Any) -> GenerateRequest:
    client = Recording()
    prompt = {} if "prompt" in fields or path == "/v1/responses" else {"messages": HELLO}
    answer = post(client, path, **{"max_tokens": 20, **prompt, **fields})
    assert answer.status_code == 200, answer.text
    return client.requests[0]


def test_fields_of_sampling_reach_the_system() -> None:
    sampling = asked(
        stop=[str(number) for number in range(64)], stop_token_ids=[5, 7], min_tokens=3,
        include_stop_str_in_output=True, logit_bias={"12": -100, "3": 1.5}, repetition_penalty=1.5,
    ).sampling  # fmt: skip
    assert len(sampling.stop) == 64 and sampling.stop_token_ids == (5, 7)
    assert (sampling.min_tokens, sampling.include_stop_str_in_output) == (3, True)
    assert dict(sampling.logit_bias) == {12: -100, 3: 1.5}
    assert (sampling.repeat_penalty, sampling.repeat_last_n) == (1.5, -1)
    theirs = asked(repeat_penalty=1.5, repeat_last_n=9, presence_penalty=1).sampling
    assert (theirs.repeat_penalty, theirs.repeat_last_n) == (1.5, 9)
    assert theirs.presence_penalty == 1 and theirs.penalize_prompt
    of_answer = asked(repetition_penalty=1.5, presence_penalty=1).sampling
    assert (of_answer.repeat_last_n, of_answer.penalize_prompt) == (-1, False)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"min_tokens": 21}, "min_tokens is 21; give a whole number from 0 to 20"),
        ({"mirostat": 3}, "mirostat"),
        ({"mirostat": True}, "mirostat"),
        ({"xtc_probability": 1.5}, "xtc_probability"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"typical_p": -0.5}, "typical_p"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"stop_token_ids": [1 << 20]}, "token id 1048576 is not in the vocabulary"),
        ({"logit_bias": {"1048576": 1}}, "token id 1048576 is not in the vocabulary"),
        ({"guided_json": "{"}, "the JSON schema is no JSON"),
        ({"structured_outputs": {"structural_tag": {}}}, "structural_tag is not supported"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "were both given"),
        ({"tools": [TOOL], "guided_regex": "a"}, "tools and grammar were both given"),
        ({"functions": [TOOL["function"]], "tools": [TOOL]}, "functions and tools were both"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
    ],
)
def test_what_cannot_be_done_is_told(fields: dict[str, Any], told: str) -> None:
    answer = post(Recording(), "/v1/chat/completions", max_tokens=20, messages=HELLO, **fields)
    assert answer.status_code == 400 and told in answer.json()["error"]["message"]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SHAPE = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
LARK = 'start: "a"'


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"guided_json": SCHEMA}, SHAPE),
        ({"guided_json": json.dumps(SCHEMA)}, SHAPE),
        ({"json_schema": SCHEMA}, SHAPE),
        ({"structured_outputs": {"json": SCHEMA}}, SHAPE),
        ({"structured_outputs": {"json_object": True}}, {"type": "json_object"}),
        ({"guided_grammar": LARK}, LARK),
        ({"structured_outputs": {"grammar": LARK}}, LARK),
        ({"guided_choice": ["a", 'b"\n']}, 'start: "a" | "b\\"\\n"\n'),
        ({"structured_outputs": {"choice": ["a"]}}, 'start: "a"\n'),
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


def test_ollama_may_be_asked_not_to_think(monkeypatch: pytest.MonkeyPatch) -> None:
    asks: list[tuple[str, dict[str, Any]]] = [
        ("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "a"}),
    ]  # fmt: skip
    for path, fields in asks:
        assert variables_of(monkeypatch, path, think=False, **fields) == THINKS_NOT


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


def unions() -> Iterator[Any]:
    """Each field of a request that is a union of several kinds: its schema, name and members."""
    for schema in BODIES:
        for name, field in schema.model_fields.items():
            members = [one for one in members_of(field.annotation) if one is not type(None)]
            if len(members) > 1:
                yield pytest.param(field, members, id=f"{schema.__name__}.{name}")


def members_of(annotation: Any) -> tuple[Any, ...]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return members_of(get_args(annotation)[0]) if is_union(annotation) else (annotation,)
    return get_args(annotation) if is_union(annotation) else (annotation,)


def is_union(annotation: Any) -> bool:
    return type(annotation).__name__ == "UnionType" or get_origin(annotation) is Union


def told(schema: type[BaseModel], value: Any) -> str | None:
    try:
        schema.model_validate_json(json.dumps({"field": value}))
    except ValidationError as error:
        return refusal(error).message
    return None


# Of each kind, many wrong in one thing.
VALUES: list[Any] = [
    "", "x", "x" * 300_000, 3, -1, True, 2.5, {},
    [], ["a"] * 5000, ["a", ""], ["a", "b", 3], [1, -1], [1, 2, "a"], [1, 2, 3.5], [True],
    [[1], [2, -1]], [[1], [1, "a"]], [[1], []], [[1], 2], [{}], [{"type": "text"}],
    {"type": "function"}, {"type": "function", "function": {}}, {"type": "function", "name": 4},
]  # fmt: skip


@pytest.mark.parametrize(("field", "members"), list(unions()))
def test_a_union_is_refused_as_the_member_that_was_meant_would_be(
    field: FieldInfo, members: list[Any]
) -> None:
    strict: Any = functools.partial(create_model, __base__=Request)
    whole = strict("Whole", field=(field.annotation, ...))
    alone = [strict("Alone", field=(member, ...)) for member in members]
    num_meant = 0
    for value in VALUES:
        said, each = told(whole, value), [told(one, value) for one in alone]
        if None in each:
            assert said is None
            continue
        problems = [one for one in each if one is not None]
        of_type = [one for one in problems if not one.startswith("field must be ")]
        furthest = max(map(indices, of_type), default=())
        meant = [one for one in of_type if indices(one) == furthest] or problems
        kinds = [one.partition(" must be ")[2] for one in meant]
        assert said is not None
        assert said in meant or all(kind and kind in said for kind in kinds), (value, said, each)
        assert said.split()[0] in [one.split()[0] for one in meant], (value, said, each)
        num_meant += bool(of_type)
    assert num_meant > 2 or not any(list in (one, get_origin(one)) for one in members)


def indices(problem: str) -> tuple[int, ...]:
    """The places in lists that a refusal names."""
    return tuple(int(part) for part in problem.split()[0].rstrip(":").split(".") if part.isdigit())
