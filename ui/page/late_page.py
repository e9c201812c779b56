"""A page that is built at its first view: Gradio takes two seconds, and 80 MB, to import."""

import asyncio
import gc
import importlib.util
import logging
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from contextvars import Context
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from hotcold.model.errors import HotcoldError
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.errors import unavailable
from hotcold.ui.api.served_models import ServedModels

_LOGGER = logging.getLogger("hotcold.serve")
_BUILDING = threading.Lock()  # what Gradio builds a page of is the process's, not the thread's


def late_pages(models: ServedModels) -> dict[str, Callable[[], Any]]:
    """What makes the chat pages, by their paths; nothing where Gradio is not installed."""
    if importlib.util.find_spec("gradio") is None:
        return {}
    paths = models.page_paths

    def build(backend: Backend) -> Any:
        from hotcold.ui.page.page import build_page

        return build_page(backend, paths)

    return {paths[backend.name]: partial(build, backend) for backend in models.backends}


class LatePage:
    """Serves what `build` returns, a gradio.Blocks, as `mount_page` adds it to a server.

    `PageRoutes` stand before it.
    """

    def __init__(self, build: Callable[[], Any], path: str) -> None:
        """`path`: where the page is mounted."""
        self._build, self._path = build, path
        self._page: ASGIApp | None = None
        self._one_at_a_time = asyncio.Lock()
        self._opened = AsyncExitStack()  # what the page does meanwhile, until the server's end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; others are answered meanwhile.

        Errors:  ApiError 503 where it cannot be built; the next view tries again
        """
        async with self._one_at_a_time:
            self._page = self._page or await self._built()
        await self._page(scope, receive, send)

    async def _built(self) -> ASGIApp:
        try:
            return await self._begin()
        except Exception as error:
            known = isinstance(error, HotcoldError)
            text = " ".join(str(error).split()) if known else "the server's log says how"
            problem = f"the chat page cannot be built: {text}"
            _LOGGER.error(problem, exc_info=None if known else error)
            raise unavailable(problem, "page_failed") from None

    async def _begin(self) -> ASGIApp:
        app = await asyncio.to_thread(self._mounted)
        opening = self._opened.enter_async_context(app.router.lifespan_context(app))
        # Its tasks are nobody's: in this context they would be those of the first viewer.
        await asyncio.create_task(opening, context=Context())
        gc.freeze()  # as `ServerThread.use`
        page: ASGIApp = app.routes[-1].app  # type: ignore[attr-defined]
        return page

    def _mounted(self) -> FastAPI:
        """An application of which the last route is the page."""
        from hotcold.ui.page.page import mount_page

        with _BUILDING:
            app: FastAPI = mount_page(FastAPI(), self._build(), self._path.rstrip("/") or "/")
        return app
