"""The API's description of itself says what the schemas say."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from pydantic import BaseModel

from hotcold.ui.api.ollama.schemas import OllamaChat
from hotcold.ui.api.schemas import ChatRequest, CompletionRequest
from tests.unit.ollama_routes import Recording, send


@cache
def described() -> dict[str, Any]:
    found: dict[str, Any] = send(Recording(), "GET", "/openapi.json").json()
    return found


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        ("/v1/chat/completions", ChatRequest),
        ("/v1/completions", CompletionRequest),
        ("/api/chat", OllamaChat),
    ],
)
def test_every_field_is_there(path: str, schema: type[BaseModel]) -> None:
    route = described()["paths"][path]["post"]
    reference = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = described()["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    assert set(fields) == set(schema.model_fields) and route["description"]


def test_types_of_one_name_are_told_apart() -> None:
    """A custom tool has its name beside its type in responses, and within `custom` in chats."""
    parts = described()["components"]["schemas"]
    for schema, key in (("ResponsesRequest", "name"), ("ChatRequest", "custom")):
        refs = re.findall(r"[\w/]+CustomTool", json.dumps(parts[schema]["properties"]["tools"]))
        (name,) = {ref.rsplit("/", 1)[1] for ref in refs}
        assert key in parts[name]["properties"]


def test_the_page_runs_nothing() -> None:
    page = send(Recording(), "GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "<script" not in page.text and "https://" not in page.text
    assert "integer, 1 to 128" in page.text  # of `n`
    for name in ChatRequest.model_fields:
        assert f"<code>{name}</code>" in page.text
