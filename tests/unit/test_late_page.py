"""A page that is built at its first view, with a page that says when it is built."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import PlainTextResponse

pytest.importorskip("gradio")

from hotcold.model.errors import ServiceError
from hotcold.ui.api.errors import ApiError
from hotcold.ui.page import page as page_module
from hotcold.ui.page.late_page import LatePage
from hotcold.ui.page.routes import PageRoutes


class Building:
    """Builds "page" as long as `may_end` is not set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.problems: list[Exception] = []
        self.times = self.num_opened = 0
        monkeypatch.setattr(page_module, "mount_page", self.mount)

    def build(self) -> str:
        self.times += 1
        self.begun.set()
        assert self.may_end.wait(60)
        if self.problems:
            raise self.problems.pop()
        return "page"

    def mount(self, app: FastAPI, page: str, path: str) -> FastAPI:
        def opened() -> None:
            self.num_opened += 1

        app = FastAPI(on_startup=[opened])
        app.mount(path, PlainTextResponse(f"{page} at {path}"))
        return app


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch) -> Building:
    return Building(monkeypatch)


def server(building: Building, path: str = "/") -> httpx.AsyncClient:
    app = FastAPI()

    @app.get("/health")
    async def health() -> str:
        return "ok"

    app.mount(path.rstrip("/"), PageRoutes(LatePage(building.build, path)))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def test_other_requests_are_answered_while_it_is_built(building: Building) -> None:
    async def ask() -> list[Any]:
        async with server(building, "/model/2-b/") as client:
            views = [asyncio.create_task(client.get("/model/2-b/")) for _ in range(3)]
            await asyncio.to_thread(building.begun.wait, 60)
            assert (await client.get("/health")).json() == "ok"
            assert not any(view.done() for view in views)
            building.may_end.set()
            return [(await view).text for view in views]

    assert asyncio.run(ask()) == ["page at /model/2-b"] * 3
    assert building.times == building.num_opened == 1


def test_who_does_not_look_at_it_does_not_build_it(building: Building) -> None:
    async def ask() -> None:
        async with server(building) as client:
            assert (await client.head("/")).headers["content-type"].startswith("text/html")
            assert (await client.get("/favicon.ico")).headers["content-type"] == "image/svg+xml"
            for path in ("/robots.txt", "/gradio_api/file=/etc/passwd"):
                with pytest.raises(Exception, match="no such route"):
                    await client.get(path)

    asyncio.run(ask())
    assert building.times == 0


def test_the_view_after_an_error_tries_again(
    building: Building, caplog: pytest.LogCaptureFixture
) -> None:
    building.problems += [OSError("no\nmemory"), ServiceError("the system has ended")]
    building.may_end.set()
    told = "the chat page cannot be built: "

    async def refused(client: httpx.AsyncClient) -> str:
        with pytest.raises(ApiError) as found:
            await client.get("/")
        assert found.value.status == 503 and "Retry-After" in found.value.headers
        return found.value.message

    async def ask() -> str:
        async with server(building) as client:
            assert await refused(client) == f"{told}the system has ended"
            assert await refused(client) == f"{told}the server's log says how"
            return (await client.get("/")).text

    assert asyncio.run(ask()) == "page at /"
    assert building.times == 3
    assert [one.getMessage() for one in caplog.records if one.levelname == "ERROR"] == [
        f"{told}the system has ended", f"{told}the server's log says how"
    ]  # fmt: skip
