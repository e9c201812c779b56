"""The API's description of itself says what the schemas say."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.testclient import TestClient

from hotcold.ui.api.schemas import ChatRequest, CompletionRequest
from hotcold.ui.openapi import add_description, body_of
from tests.unit.ollama_routes import Recording, send

SCHEMAS: list[type[BaseModel]] = [ChatRequest, CompletionRequest]


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI(openapi_url=None)

    @app.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
    async def chat(request: Request) -> None:
        """Answer <all>."""

    @app.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
    async def complete(request: Request) -> None: ...

    add_description(app, SCHEMAS)
    return TestClient(app)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_field_is_there(client: TestClient, schema: Any) -> None:
    described = client.get("/openapi.json").json()
    assert set(described["components"]["schemas"][schema.__name__]["properties"]) == set(
        schema.model_fields
    )
    page = client.get("/docs").text
    for name in schema.model_fields:
        assert f"<code>{name}</code>" in page


def test_types_of_one_name_are_told_apart() -> None:
    """A custom tool has its name beside its type in responses, and within `custom` in chats."""
    parts = send(Recording(), "GET", "/openapi.json")[0].json()["components"]["schemas"]
    for schema, key in (("ResponsesRequest", "name"), ("ChatRequest", "custom")):
        refs = re.findall(r"[\w/]+CustomTool", json.dumps(parts[schema]["properties"]["tools"]))
        (name,) = {ref.rsplit("/", 1)[1] for ref in refs}
        assert key in parts[name]["properties"]


def test_the_page_runs_nothing(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "<script" not in page.text and "https://" not in page.text
    assert "Answer &lt;all&gt;." in page.text
    assert "integer, 1 to 128" in page.text  # of `n`
