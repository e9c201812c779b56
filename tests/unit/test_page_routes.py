"""What of the page's framework is reached from outside, and what browsers are told of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

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
    """Gradio's application, which `PageRoutes` keep mostly closed."""
    return next(route for route in page.routes if isinstance(route, Mount)).app


def test_of_gradios_routes_those_are_reached_that_the_page_needs() -> None:
    """A route of a later Gradio is refused until somebody has looked at it."""
    gradio = pytest.importorskip("gradio")
    from fastapi import FastAPI

    from hotcold.ui.page.page import mount_page

    with gradio.Blocks(analytics_enabled=False) as blocks:
        gradio.Markdown("a")
    found = set(routes_of(gradio_of(mount_page(FastAPI(openapi_url=None), blocks)).routes))
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


def page_in_front_of(gradio: Any) -> Any:
    """The server's whole application, with something else in Gradio's place."""
    backend = Backend(SystemConfig(str(DEMO_DIRECTORY)), ServerSettings("demo"))
    app = create_app(ServedModels([backend]))
    app.router.routes.append(Mount("", app=PageRoutes(gradio)))
    return Gate(app, keys=[], local=True, max_body_bytes=1000)


def test_what_leads_out_or_is_kept_is_refused() -> None:
    asked: list[str] = []

    async def gradio(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await PlainTextResponse("page")(scope, receive, send)

    client = TestClient(page_in_front_of(gradio), base_url="http://localhost")
    for path in (
        "/gradio_api/file=https://example.org/a.png", "/gradio_api/file=http://127.0.0.1:1/",
        "/gradio_api/file%3Dhttps://example.org/", "/gradio_api//file=https://example.org/",
        "/static/../gradio_api/file=https://example.org/", "/gradio_api/proxy=https://example.org/",
        "/static/%2e%2e/a", "/gradio_api/upload", "/gradio_api/deep_link", "/monitoring",
        "/gradio_api/vibe-code", "/gradio_api/run-history/buckets", "/login", "/logout",
    ):  # fmt: skip
        for method in ("GET", "HEAD", "POST", "PUT"):
            assert not is_allowed(method, path)
            assert client.request(method, path).status_code in (404, 405)
    assert asked == []
    assert client.get("/config").status_code == 200 and asked == ["/config"]


@pytest.mark.parametrize("place", ["", "/model/2-b"])
def test_pages_of_several_models_are_as_closed(place: str) -> None:
    marked: list[bool] = []

    async def gradio(scope: Any, receive: Any, send: Any) -> None:
        assert scope["method"] == "GET"
        marked.append(IS_STREAM in scope.get("state", {}))
        await PlainTextResponse("page " * 1000)(scope, receive, send)

    page = PageRoutes(gradio)
    app = Starlette(routes=[Mount("/model/2-b", app=page), Mount("", app=page)])
    client = TestClient(app)
    for path in ("/config", "/", "/gradio_api/heartbeat/abc", "/gradio_api/queue/data"):
        assert client.get(f"{place}{path}").text == "page " * 1000
    assert marked == [False, False, True, True]  # which give way where there are too many
    assert int(client.get(f"{place}/").headers["content-length"]) < 500  # compressed
    for path in ("/gradio_api/file=/etc/passwd", "/model/2-b/model/2-b/config", "/model/3-c/"):
        with pytest.raises(ApiError):
            client.get(f"{place}{path}")
    for body in (b"", b"{", b"[" * 100_000, b"--a\r\n\r\n"):
        with pytest.raises(ApiError, match="JSON"):
            client.post(f"{place}/gradio_api/component_server", content=body)


def test_an_event_brings_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def told(value: Any, encoding: str = "utf-8") -> Any:
        body = json.dumps({"data": [[{"a": value}]], "fn_index": 0, "session_hash": "a"})
        headers = {"host": "localhost", "content-type": "application/json"}
        content = body.encode(encoding)
        return client.post("/gradio_api/run/predict", content=content, headers=headers)

    for place in (str(file), "http://127.0.0.1:9/a", "/dev/zero"):
        for encoding in ("utf-8", "utf-16"):
            found = told({"path": place, "meta": {"_type": "gradio.FileData"}}, encoding)
            assert (found.status_code, found.json()["error"]["code"]) == (400, "file_refused")
    assert asked == [] and not list(kept.rglob("private.txt"))
    assert told("gradio.FileData, path and meta as words").status_code == 200
