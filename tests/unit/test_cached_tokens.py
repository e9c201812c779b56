"""What clients may say of the KV cache, and what they are told: every API, over a stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent
from hotcold.ui.gate import Gate
from tests.unit.ollama_routes import HELLO, Client, backend_of, over, post, server

KEYS = ["a key of one client", "a key of another one"]
_CHAT: dict[str, Any] = {"messages": HELLO}
_ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", _CHAT),
    ("/v1/completions", {"prompt": "a b"}),
    ("/v1/responses", {"input": "a b"}),
]


class Finding(Client):
    """Has found `counts` tokens of the prompts, in turn."""

    def __init__(self, *counts: int) -> None:
        super().__init__()
        self._counts = counts

    def answer(self, request: GenerateRequest) -> Sequence[TokenEvent]:
        cached = self._counts[(len(self.requests) - 1) % len(self._counts)]
        size = len(request.prompt_ids or ())
        result = Generation("ab", [7, 8], "stop", size, 0.1, 0.1, num_cached_tokens=cached)
        return [TokenEvent("ab", result, 2)]


def counted(client: Finding, path: str, **body: Any) -> tuple[dict[str, Any], tuple[int, int]]:
    """The usage of an answer, and how many tokens were looked for and found, by the metrics."""
    answer = post(client, path, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"], client.backend.metrics.prefix_cache


@pytest.mark.parametrize(("path", "body"), _ROUTES)
def test_usage_says_what_was_cached(path: str, body: dict[str, Any]) -> None:
    for count in (0, 64):
        client = Finding(count)
        usage, in_metrics = counted(client, path, **body)
        size = len(client.requests[0].prompt_ids or ())
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        assert details["cached_tokens"] == count
        assert (usage.get("prompt_tokens") or usage["input_tokens"]) == size
        assert usage["total_tokens"] == size + 2 and in_metrics == (size, count)


def test_a_prompt_of_several_answers_counts_once() -> None:
    """What the others found, the first one had computed."""
    usage, (_, found) = counted(Finding(64, 128, 128), "/v1/chat/completions", **_CHAT, n=3)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 64 and found == 320


@pytest.mark.parametrize(("path", "body"), _ROUTES)
def test_requests_may_ask_for_no_cache(path: str, body: dict[str, Any]) -> None:
    for given, uses in (({}, True), ({"cache": True}, True), ({"cache": False}, False)):
        client = Finding(0)
        _, (looked_for, _) = counted(client, path, **body, **given)
        assert client.requests[0].use_cache is uses and bool(looked_for) is uses


@pytest.mark.parametrize(("path", "body"), _ROUTES)
def test_keys_and_salts_are_apart(path: str, body: dict[str, Any]) -> None:
    client = Finding(0)
    backend_of(client)

    def ask(key: str, asked: dict[str, Any]) -> None:
        app = Gate(server()[1], keys=KEYS if key else [], local=True, max_body_bytes=1 << 20)
        headers = {"Authorization": f"Bearer {key}"}
        assert over(app, lambda http: http.post(path, json=asked, headers=headers)).is_success

    for key in (*KEYS, KEYS[0], ""):
        for more in ({}, {"cache_salt": "x"}):
            ask(key, body | more)
    salts = [request.cache_salt for request in client.requests]
    assert salts[:2] == salts[4:6] and len(set(salts)) == 6
    assert not any(key in salt for key in KEYS for salt in salts)
