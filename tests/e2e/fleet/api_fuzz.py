"""Malformed requests to a running server, beside a generation that they must not harm."""

from __future__ import annotations

import http.client
import json
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

_MESSAGES = [{"role": "user", "content": "What is a list?"}]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
_COMMON = {
    "model": "demo", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
    "n": 1, "seed": 1, "stop": ["x"], "stream": False, "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    "grammar": 'start: "yes" | "no"', "ignore_eos": False, "return_token_ids": True,
    "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {"5": 1.5}, "min_tokens": 1,
    "stop_token_ids": [7], "include_stop_str_in_output": True, "repetition_penalty": 1.1,
    "guided_choice": ["yes", "no"], "structured_outputs": {"regex": "a+"}, "best_of": 1,
}  # fmt: skip
_FUNCTION = {"name": "look_up", "description": "Looks up.", "parameters": _SCHEMA}
_CHOICE = {"type": "function", "function": {"name": "look_up"}}
_TOOLS = {"tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": _CHOICE}
_CHAT = {"messages": _MESSAGES, **_COMMON, "logprobs": True, "top_logprobs": 2, **_TOOLS,
         "reasoning_effort": "none", "chat_template_kwargs": {"a": 1}}  # fmt: skip
_COMPLETION = {"prompt": "Return the", **_COMMON, "logprobs": 2, "echo": True, "suffix": ""}
_RESPONSE = {
    "input": _MESSAGES, "model": "demo", "max_output_tokens": 2, "instructions": "Be brief.",
    "temperature": 0.5, "top_p": 0.9, "stream": False, "metadata": {"a": "b"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
    "tools": [{"type": "function", **_FUNCTION}], "tool_choice": "auto",
    "parallel_tool_calls": False, "previous_response_id": None, "store": True, "include": ["a"],
    "reasoning": {"effort": "low", "summary": "auto"},
}  # fmt: skip
_EMBEDDING = {
    "input": ["a list", "b"], "model": "demo", "encoding_format": "base64", "dimensions": None,
}  # fmt: skip
_OPTIONS = {
    "num_predict": 2, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 1,
    "stop": ["x"], "repeat_penalty": 1.0, "num_ctx": 512,
}  # fmt: skip
_OLLAMA = {
    "model": "demo", "options": _OPTIONS, "format": _SCHEMA, "stream": False, "keep_alive": "5m",
    "think": False, "logprobs": True, "top_logprobs": 2,
}  # fmt: skip
_OLLAMA_CHAT = {**_OLLAMA, "messages": _MESSAGES, "tools": _TOOLS["tools"]}
_OLLAMA_GENERATE = {
    **_OLLAMA, "prompt": "Return the", "system": "Be brief.", "raw": False, "suffix": "",
    "template": "", "context": [], "images": [],
}  # fmt: skip
_OLLAMA_EMBED = {
    "model": "demo", "input": ["a list", "b"], "truncate": True, "dimensions": 8, "keep_alive": -1,
    "options": _OPTIONS,
}  # fmt: skip
_ROUTES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/api/chat": (_OLLAMA_CHAT, ["model", "messages", "options"]),
    "/api/generate": (_OLLAMA_GENERATE, ["model", "prompt", "options"]),
    "/api/embed": (_OLLAMA_EMBED, ["model", "input"]),
    "/api/embeddings": ({"model": "demo", "prompt": "a list"}, ["model", "prompt"]),
    "/api/show": ({"model": "demo", "name": "demo", "verbose": False}, ["model"]),
    "/v1/chat/completions": (_CHAT, ["messages", "max_tokens"]),
    "/v1/responses": (_RESPONSE, ["input", "max_output_tokens"]),
    "/v1/responses/input_tokens": (_RESPONSE, ["input"]),
    "/v1/completions": (_COMPLETION, ["prompt", "max_tokens"]),
    "/v1/embeddings": (_EMBEDDING, ["input"]),
    "/tokenize": ({"prompt": "a b", "messages": _MESSAGES, "add_special_tokens": True}, ["prompt"]),
    "/detokenize": ({"tokens": [1, 2, 3], "model": "demo"}, ["tokens"]),
}

_texts = st.one_of(
    st.text(max_size=30),
    st.text("\x00\ud800\udfff\u202e\ufffd𐏿\n{}[]<|>eos", max_size=12),
    st.sampled_from(["", "a" * 5000, "<|eos|>", "{{7*7}}", "%s%n", "../../etc/passwd", "null"]),
)
_numbers = st.one_of(
    st.integers(),
    st.integers(-3, 140),
    st.floats(),
    st.sampled_from([10**400, -(10**400), 1e308, -0.0, 1 << 31, (1 << 63) - 1, 1 << 64]),
)
_values = st.recursive(
    st.one_of(st.none(), st.booleans(), _numbers, _texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(_texts, inner, max_size=4)
    ),
    max_leaves=12,
)
_likely = st.sampled_from(
    [
        [], {}, [[]], [[1], []], [1, -1], [1, 99999999], [True], ["a", 1], [None], "", 0, -1, 1e999,
        [{"role": "user"}], [{"role": "nobody", "content": "a"}], [{"content": "a"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}],
        [{"role": "assistant", "content": None}], ["a"] * 9, [""], {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1/"}}},
        {"type": "json_schema", "json_schema": {"schema": {"pattern": "(a+)+$(?=b)"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": {"schema": False}},
        [{"type": "function"}], [{"type": "function", "function": {"name": "a b"}}],
        [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}],
        [{"type": "function", "function": {"name": "a", "parameters": {"$ref": "#"}}}],
        [{"type": "function", "function": {"name": "a", "parameters": {"properties": 1}}}],
        [{"type": "function", "name": "a", "parameters": {"properties": {"\n\"%json": {}}}}],
        {"num_predict": -1e9}, {"repeat_penalty": 1.3}, {"stop": "a"}, {"top_k": 1e300}, "json",
        [{"role": "user", "images": ["a"]}], [{"function": {"name": "a", "arguments": "{}"}}],
        [{"type": "function_call", "call_id": "a", "name": "b", "arguments": "{"}],
        [{"type": "function_call_output", "call_id": "a", "output": "1"}], "required", "auto",
        [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a",
          "arguments": "[[["}}]}, {"role": "tool", "content": "b"}],
        [{"type": "item_reference", "id": "msg_a"}], [{"type": "item_reference"}], "resp_a",
        [{"type": "reasoning", "summary": [1]}], [{"type": "reasoning", "content": {"a": 1}}],
        'start: "a', 'start: start', 'start: /(/', 'start: nowhere', '%llguidance {', "{" * 900,
    ]
)  # fmt: skip


@st.composite
def _objects(draw: st.DrawFn, route: str) -> bytes:
    """A request of which some fields are there, and some of these are wrong."""
    whole, needed = _ROUTES[route]
    names = set(needed) | draw(st.sets(st.sampled_from(sorted(whole)), max_size=4))
    body: dict[str, Any] = {name: whole[name] for name in sorted(names)}
    for name in draw(st.sets(st.sampled_from(sorted(names)), min_size=1, max_size=2)):
        body[name] = draw(st.one_of(_values, _likely))
    if draw(st.integers(0, 9)) == 0:
        del body[draw(st.sampled_from(sorted(body)))]
    return json.dumps(body).encode()


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """Method, path and body."""
    route = draw(st.sampled_from(sorted(_ROUTES)))
    kind = draw(st.integers(0, 9))
    if kind < 7:
        return "POST", route, draw(_objects(route))
    if kind == 7:
        return "POST", route, draw(st.binary(max_size=60))
    if kind == 8:
        body = draw(_objects(route))
        cut = draw(st.integers(0, len(body)))
        return "POST", route, body[:cut] + draw(st.binary(max_size=3)) + body[cut:]
    method = draw(st.sampled_from(["GET", "PUT", "DELETE", "PATCH", "OPTIONS"]))
    others = [
        "/v1/models/x", "/v1/%00", "/v1/%ff/..", "/metrics", "/v1/responses/resp_x",
        "/v1/responses/%ff/input_items?limit=-1", "/v1/responses/resp_x/cancel", "/api/pull",
        "/api/%00", "/api/ps", "/api/tags", "/api/version", "/api/delete",
    ]  # fmt: skip
    path = draw(st.sampled_from([route, *others]))
    return method, path, b""


def _ask(
    url: str, headers: Mapping[str, str], method: str, path: str, body: bytes
) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def generation(url: str, headers: Mapping[str, str]) -> str:
    """A greedy one, or the status of what is no answer."""
    body = {"prompt": "Return the", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    status, answer = _ask(url, headers, "POST", "/v1/completions", json.dumps(body).encode())
    return json.loads(answer)["choices"][0]["text"] if status == 200 else f"status {status}"


def check(status: int, body: bytes, path: str) -> None:
    """Raise AssertionError for an answer that malformed requests must not have."""
    if status >= 500:
        raise AssertionError(f"answered {status}: {body[:300]!r}")
    if status >= 400:
        error = json.loads(body)["error"]
        if path.startswith("/api/"):
            error = {**dict.fromkeys(("type", "param", "code")), "message": str(error)}
        if set(error) != {"message", "type", "param", "code"} or not error["message"]:
            raise AssertionError(f"answered {status} with {body[:300]!r}")


def fuzz(url: str, headers: Mapping[str, str], num_requests: int) -> tuple[Counter[int], int]:
    """Send malformed requests: how many had which status, how many generations ran meanwhile.

    Errors:  AssertionError for an answer that is not OpenAI's or Ollama's error, or for a
             generation that is not what it was when the server was alone
    """
    statuses, expected = Counter[int](), generation(url, headers)
    generations, is_over = list[str](), threading.Event()

    def generate() -> None:
        while not is_over.is_set():
            generations.append(generation(url, headers))

    @settings(
        max_examples=num_requests, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(requests())
    def send(request: tuple[str, str, bytes]) -> None:
        status, body = _ask(url, headers, *request)
        statuses[status] += 1
        check(status, body, request[1])

    beside = threading.Thread(target=generate)
    beside.start()
    try:
        send()
    finally:
        is_over.set()
        beside.join(300)
    assert {*generations} == {expected}, {*generations}
    return statuses, len(generations)
