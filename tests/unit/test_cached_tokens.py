"""What clients may say of the KV cache, and what they are told: every API, over a stand-in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app
from hotcold.ui.gate import Gate
from tests.unit.test_server_limits import Client, Deliver, make_backend

_KEYS = ["a key of one client", "a key of another one"]
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a b"}]}
_ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", _CHAT),
    ("/v1/completions", {"prompt": "a b"}),
    ("/v1/responses", {"input": "a b"}),
]


class Finding(Client):
    """Has found `counts` tokens of the prompts, in turn, and remembers the requests."""

    def __init__(self, *counts: int) -> None:
        super().__init__()
        self.counts = list(counts)
        self.requests: list[GenerateRequest] = []

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        cached = self.counts[len(self.requests) % len(self.counts)]
        self.requests.append(request)
        size = len(request.prompt_ids or ())
        result = Generation("ab", [7, 8], "stop", size, 0.1, 0.1, num_cached_tokens=cached)
        deliver(TokenEvent("ab", result, 2))
        return str(len(self.requests))


def ask(
    client: Finding, path: str, body: dict[str, Any] | None, keys: tuple[str, ...] = ("",)
) -> list[str]:
    """The answers' texts; the last one is /metrics."""
    backend = make_backend(client)
    required = _KEYS if keys[0] else []
    app: Any = create_app(ServedModels([backend]))
    app = Gate(app, keys=required, local=True, max_body_bytes=1 << 20)

    async def send() -> AsyncIterator[str]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for key in keys:
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                answer = await http.post(path, json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                yield answer.text
            yield (await http.get("/metrics", headers=headers)).text

    async def texts() -> list[str]:
        return [text async for text in send()]

    return asyncio.run(texts())


def usage_of(text: str) -> dict[str, Any]:
    found = json.loads(text)["usage"]
    found["details"] = found.get("prompt_tokens_details") or found["input_tokens_details"]
    found["asked"] = found.get("prompt_tokens") or found["input_tokens"]
    return dict(found)


@pytest.mark.parametrize(("path", "body"), _ROUTES)
@pytest.mark.parametrize("count", [0, 64])
def test_usage_says_what_was_cached(path: str, body: dict[str, Any], count: int) -> None:
    client = Finding(count)
    text, metrics = ask(client, path, body)
    found, size = usage_of(text), len(client.requests[0].prompt_ids or ())
    assert found["details"]["cached_tokens"] == count and found["asked"] == size
    assert found["total_tokens"] == size + 2
    label = '{model_name="demo"}'
    assert f"vllm:prefix_cache_queries_total{label} {float(size)}" in metrics
    assert f"vllm:prefix_cache_hits_total{label} {float(count)}" in metrics


def test_a_prompt_of_several_answers_counts_once() -> None:
    """What the others found, the first one had computed."""
    text, metrics = ask(Finding(64, 128, 128), "/v1/chat/completions", _CHAT | {"n": 3})
    assert usage_of(text)["details"]["cached_tokens"] == 64
    assert 'vllm:prefix_cache_hits_total{model_name="demo"} 320.0' in metrics


@pytest.mark.parametrize(("path", "body"), _ROUTES)
def test_requests_may_ask_for_no_cache(path: str, body: dict[str, Any]) -> None:
    for given, uses in (({}, True), ({"cache": True}, True), ({"cache": False}, False)):
        client = Finding(0)
        _, metrics = ask(client, path, body | given)
        assert client.requests[0].use_cache is uses
        assert ('prefix_cache_queries_total{model_name="demo"} 0.0' in metrics) is not uses


@pytest.mark.parametrize(("path", "body"), _ROUTES)
def test_keys_and_salts_are_apart(path: str, body: dict[str, Any]) -> None:
    client = Finding(0)
    keys = (_KEYS[0], _KEYS[1], _KEYS[0])
    ask(client, path, body, keys)
    ask(client, path, body | {"cache_salt": "x"}, keys)
    ask(client, path, body)
    ask(client, path, body | {"cache_salt": "x"})
    salts = [request.cache_salt for request in client.requests]
    assert salts[0] == salts[2] and salts[3] == salts[5]
    assert len(set(salts)) == 6
    assert not any(key in salt for key in _KEYS for salt in salts)
