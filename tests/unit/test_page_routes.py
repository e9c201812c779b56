"""What of the page's framework is reached from outside, and what browsers are told of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount
from starlette.testclient import TestClient

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.ui.api.backend import Backend, ServerSettings
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app
from hotcold.ui.connections import IS_STREAM
from hotcold.ui.gate import Gate
from hotcold.ui.page.routes import PageRoutes, is_allowed

# What the page asks of the installed Gradio. Who adds a line here knows what it does.
NEEDED = {
    "/gradio_api/app_id",
    "/", "/assets/{path:path}", "/config", "/favicon.ico", "/static/{path:path}", "/theme.css",
    "/gradio_api/component_server", "/gradio_api/component_server/",
    "/gradio_api/heartbeat/{session_hash}", "/gradio_api/queue/data", "/gradio_api/queue/join",
    "/gradio_api/run/{api_name}",
}  # fmt: skip


@pytest.fixture(scope="module")
def page() -> Any:
    """A FastAPI application with a page that is mounted as the chat page is."""
    gradio = pytest.importorskip("gradio")
    from fastapi import FastAPI

    from hotcold.ui.page.page import mount_page

    with gradio.Blocks(analytics_enabled=False) as blocks:
        gradio.Markdown("a")
    return mount_page(FastAPI(openapi_url=None, docs_url=None, redoc_url=None), blocks)


def routes_of(routes: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Method and path of each route, of those in routers within routers too."""
    for route in routes:
        path = prefix + getattr(route, "path", "")
        inner = getattr(getattr(route, "original_router", route), "routes", None)
        if inner:
            yield from routes_of(inner, path)
        else:
            for method in getattr(route, "methods", None) or ():
                yield method, path


def gradio_of(page: Any) -> Any:
    """Gradio's application, behind what keeps most of it closed."""
    mounted = next(route for route in page.routes if isinstance(route, Mount))
    assert isinstance(mounted.app, PageRoutes)
    return mounted.app._app


def test_of_gradios_routes_those_are_reached_that_the_page_needs(page: Any) -> None:
    """A route of a later Gradio is refused until somebody has looked at it."""
    found = set(routes_of(gradio_of(page).routes))
    paths = {path for _, path in found}
    outward = {"/gradio_api/file={path_or_url:path}", "/gradio_api/proxy={url_path:path}"}
    assert outward | {"/gradio_api/upload", "/gradio_api/deep_link"} <= paths
    open_paths = set()
    for method, path in found:
        values = ("a", "a/b.js", "https://example.org/a", "../a", "/etc/passwd")
        for value in values:
            if is_allowed(method, re.sub(r"\{[^}]*\}", value, path)):
                open_paths.add(path)
    assert open_paths == NEEDED


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=https://example.org/a.png", "/gradio_api/file=http://127.0.0.1:1/",
        "/gradio_api/file%3Dhttps://example.org/", "/gradio_api//file=https://example.org/",
        "/static/../gradio_api/file=https://example.org/", "/gradio_api/proxy=https://example.org/",
        "/static/%2e%2e/a", "/gradio_api/upload", "/gradio_api/deep_link", "/monitoring",
        "/gradio_api/vibe-code", "/gradio_api/run-history/buckets", "/login", "/logout",
    ],
)  # fmt: skip
def test_what_leads_out_or_is_kept_is_refused(path: str) -> None:
    asked: list[str] = []

    async def gradio(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    for method in ("GET", "HEAD", "POST", "PUT"):
        assert not is_allowed(method, path)
        assert get(page_in_front_of(gradio), path, method).status_code in (404, 405)
    assert asked == []
    assert get(page_in_front_of(gradio), "/config").status_code == 200 and asked == ["/config"]


@pytest.mark.parametrize("place", ["", "/model/2-b"])
def test_pages_of_several_models_are_as_closed(place: str) -> None:
    async def gradio(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("page")(scope, receive, send)

    page = PageRoutes(gradio)
    app = Starlette(routes=[Mount("/model/2-b", app=page), Mount("", app=page)])
    client = TestClient(app)
    assert client.get(f"{place}/config").text == client.get(f"{place}/").text == "page"
    for path in ("/gradio_api/file=/etc/passwd", "/model/2-b/model/2-b/config", "/model/3-c/"):
        with pytest.raises(ApiError):
            client.get(f"{place}{path}")


def test_the_page_itself_is_sent_compressed() -> None:
    text = "page " * 1000

    async def gradio(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse(text)(scope, receive, send)

    client = TestClient(Starlette(routes=[Mount("", app=PageRoutes(gradio))]))
    found = client.get("/")
    assert found.text == text and int(found.headers["content-length"]) < len(text) / 10
    assert client.get("/", headers={"accept-encoding": "identity"}).text == text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("place", ["{file}", "http://127.0.0.1:9/a", "/dev/zero"])
def test_an_event_brings_no_file(
    place: str, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradio would copy this host's files into its folder, or fetch what is at an address."""
    gradio = pytest.importorskip("gradio")
    from fastapi import FastAPI

    from hotcold.ui.page.page import mount_page

    kept, asked = tmp_path / "kept", []

    async def moved(block: Any, found: Any) -> str:
        asked.append(found)
        return str(found)

    file = tmp_path / "private.txt"
    file.write_text("private")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(kept))
    monkeypatch.setattr(gradio.blocks.Block, "async_move_resource_to_block_cache", moved)
    with gradio.Blocks(analytics_enabled=False) as blocks:
        box = gradio.JSON()
        box.change(lambda found: None, box, None, queue=False)
    client = TestClient(page_in_front_of(gradio_of(mount_page(FastAPI(), blocks))))
    file_data = {"path": place.format(file=file), "meta": {"_type": "gradio.FileData"}}

    def told(value: Any) -> Any:
        body = json.dumps({"data": [[{"a": value}]], "fn_index": 0, "session_hash": "a"})
        headers = {"host": "localhost", "content-type": "application/json"}
        content = body.encode(encoding)
        return client.post("/gradio_api/run/predict", content=content, headers=headers)

    found = told(file_data)
    assert asked == [] and not list(kept.rglob("private.txt"))
    assert (found.status_code, found.json()["error"]["code"]) == (400, "file_refused")
    assert told("gradio.FileData, path and meta as words").status_code == 200


def test_an_event_that_is_no_json_does_not_reach_gradio() -> None:
    async def gradio(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it was asked")

    client = TestClient(Starlette(routes=[Mount("", app=PageRoutes(gradio))]))
    for body in (b"", b"{", b"[" * 100_000, b"--a\r\n\r\n"):
        with pytest.raises(ApiError, match="JSON"):
            client.post("/gradio_api/component_server", content=body)


def page_in_front_of(gradio: Any) -> Any:
    """The server's whole application, with something else in Gradio's place."""
    system: Any = object()  # nobody asks it
    backend = Backend(system, SystemConfig(str(DEMO_DIRECTORY)), ServerSettings("demo"))
    app = create_app(ServedModels([backend]))
    app.router.routes.append(Mount("", app=PageRoutes(gradio)))
    return Gate(app, keys=[], local=True, max_body_bytes=1000)


def get(app: Any, path: str, method: str = "GET") -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path)

    return asyncio.run(send())


def test_streams_of_events_are_marked() -> None:
    """Where there are too many connections, these give way."""
    marked: list[bool] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        marked.append(IS_STREAM in scope["state"])

    for path in ("/gradio_api/heartbeat/abc", "/gradio_api/queue/data", "/config"):
        scope: Any = {"type": "http", "method": "GET", "path": path, "headers": [], "state": {}}
        asyncio.run(PageRoutes(app)(scope, None, None))  # type: ignore[arg-type]
    assert marked == [True, True, False]
