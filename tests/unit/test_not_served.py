"""What no route answers: wrong methods, routes of other servers, and the rest."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.ollama_routes import Recording, send, with_openai


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("GET", "/api/chat", "POST"),
        ("DELETE", "/v1/models/demo", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("POST", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_the_right_one(method: str, path: str, allowed: str) -> None:
    answer = send(Recording(), method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    right = allowed.replace(", HEAD", "").replace(", ", " or ")
    told = answer.json()["error"]
    told = told if path.startswith("/api/") else told["message"]
    assert told == f"{method} is not for {path}; send {right}"


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/messages", "/v1/chat/completions"),
        ("/v1/rerank", "/v1/embeddings"),
        ("/rerank", "/v1/embeddings"),
        ("/infill", "/v1/completions"),
        ("/completion", "/v1/completions"),
        ("/slots", "/metrics"),
        ("/v1/responses/compact", "sum it up"),
        ("/generate", "/v1/completions"),
        ("/v1/images/generations", "text alone"),
        ("/v1/responses/resp_1/input_items", "send what you need"),
        ("/v1/none/at/all", "there is no POST /v1/none/at/all here"),
    ],
)
def test_routes_of_other_servers_name_what_is_here(path: str, instead: str) -> None:
    answer = send(Recording(), "POST", path, {})
    told = answer.json()["error"]["message"]
    assert answer.status_code == 404 and path in told and instead in told


def test_the_list_of_models_may_end_with_a_slash() -> None:
    """As clients ask whose base URL does."""

    async def ask(client: Any) -> None:
        listed = await client.get("/models/", cast_to=object)
        plain = [one.id async for one in client.models.list()]
        assert [one["id"] for one in listed["data"]] == plain == ["demo"]

    with_openai(Recording(), ask)
