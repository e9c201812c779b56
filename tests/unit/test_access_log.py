"""A line for each answer."""

from __future__ import annotations

import json
import re

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from hotcold.ui.access_log import AccessLog
from hotcold.ui.server_thread import LoadingGate


async def answer(request: Request) -> Response:
    if "refused" in request.url.path:
        request.state.model = "a model"
        return PlainTextResponse("no", 400)
    if "stream" in request.url.path:
        return StreamingResponse(iter([b"one", b"two"]))
    if "broken" in request.url.path:
        raise ValueError
    return PlainTextResponse("yes!")


def lines_of(kind: str, *paths: str) -> list[str]:
    told: list[str] = []
    app = AccessLog(Starlette(routes=[Route("/{path:path}", answer)]), kind, told.append)
    client = TestClient(app, raise_server_exceptions=False)
    for path in paths:
        client.get(path)
    return told


def test_text() -> None:
    (line,) = lines_of("text", "/v1/models?key=secret")
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\S+ testclient 'GET /v1/models' 200 4 bytes \d+\.\d{3} s", line
    )


@pytest.mark.parametrize(
    "path",
    ["/health", "/metrics", "/gradio_api/queue/data", "/assets/a.js", "/model/2-b/assets/a.js"],
)
def test_what_is_asked_again_and_again_is_told_only_where_refused(path: str) -> None:
    assert lines_of("text", path) == []
    (line,) = lines_of("text", f"{path}/refused")
    assert " 400 " in line and line.endswith(" s 'a model'")


def test_questions_whether_it_has_loaded_are_not_told() -> None:
    """A client that waits asks often; what somebody wants of it is told."""
    told: list[str] = []
    gate = LoadingGate("a model")
    client = TestClient(AccessLog(gate, "text", told.append))
    for path in ("/health", "/v1/models", "/"):
        assert client.get(path).status_code == client.head(path).status_code == 503
    assert told == []
    assert client.post("/v1/chat/completions", json={}).status_code == 503
    (line,) = told
    assert "'POST /v1/chat/completions' 503 " in line
    gate.use(Starlette(routes=[Route("/{path:path}", answer)]))
    assert client.get("/health/refused").status_code == 400 and len(told) == 2


def test_json() -> None:
    (line,) = lines_of("json", "/v1/x")
    told = json.loads(line)
    assert told.pop("seconds") >= 0 and told.pop("time")
    assert told == {
        "client": "testclient", "method": "GET", "path": "/v1/x", "status": 200, "bytes": 4,
    }  # fmt: skip
    (line,) = lines_of("json", "/v1/refused")
    assert json.loads(line)["model"] == "a model"


@pytest.mark.parametrize("kind", ["text", "json"])
def test_no_path_makes_a_line_of_its_own(kind: str) -> None:
    (line,) = lines_of(kind, "/a%0a2026-01-01 forged%1b[31m")
    assert line.isprintable() and line.isascii()
