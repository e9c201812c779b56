"""The server's thread: it answers that the system is loading until the application is there."""

import asyncio
import contextlib
import gc
import html
import logging
import socket
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hotcold.actors.processes.child_process import trim_heap
from hotcold.actors.protocol.messages import LoadProgress
from hotcold.ui.access_log import IS_LOADING, AccessLog
from hotcold.ui.api.errors import unavailable
from hotcold.ui.connections import ConnectionLimits, Connections
from hotcold.ui.gate import Gate

_END_S = 10.0
_CANCELLED_S = 5.0  # in which tasks that are cut off end
_DATE_S = 1.0  # between two looks at the clock, for the dates of answers
_ASKED_WHILE_LOADING = ("/health", "/v1/health", "/v1/hotcold/state")
_PAGE = Path(__file__).with_name("page") / "loading.html"  # reloads itself


class LoadingGate:
    """Passes requests on to the application, which exists once the system has loaded."""

    def __init__(self, model_name: str) -> None:
        self.stage = "starting"
        self._progress: LoadProgress | None = None
        self._model_name = model_name
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            scope.setdefault("state", {})[IS_LOADING] = True
            await self._loading(Request(scope))(scope, receive, send)

    def use(self, app: ASGIApp) -> None:
        """Pass requests on to the application from now on."""
        self._app = app

    def show(self, progress: LoadProgress) -> None:
        """Answer requests meanwhile with this progress."""
        self.stage, self._progress = progress.stage, progress

    def _loading(self, request: Request) -> Response:
        error = unavailable(f"the model is loading ({self.stage}); try again soon", "loading")
        if request.url.path == "/" and "text/html" in request.headers.get("accept", ""):
            shown = {"model": self._model_name, "stage": self.stage}
            text = _PAGE.read_text()
            for name, value in shown.items():
                text = text.replace(f"{{{name}}}", html.escape(value))
            return HTMLResponse(text, error.status, error.headers)
        body: dict[str, Any] = error.body_for(request.url.path)
        if request.url.path in _ASKED_WHILE_LOADING:
            body = {"status": "loading", "stage": self.stage, "model": self._model_name}
            body |= {} if self._progress is None else {"progress": asdict(self._progress)}
        return JSONResponse(body, error.status, error.headers)


class QuietServer(uvicorn.Server):
    """Sleeps until `end`; uvicorn looks ten times a second whether it should end."""

    def __init__(self, config: uvicorn.Config, loop: asyncio.AbstractEventLoop) -> None:
        """`loop`: in which it will serve."""
        super().__init__(config)
        self._loop = loop
        self._ending = asyncio.Event()

    async def main_loop(self) -> None:
        """Return once it should end."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _DATE_S)

    def end(self) -> None:
        """Stop listening; requests that run go on. From any thread."""
        self.should_exit = True
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._ending.set)


class ServerThread:
    """Uvicorn in a thread, so that the main thread is free for loading and signals."""

    def __init__(
        self,
        listener: socket.socket | None,
        loading_gate: LoadingGate,
        keys: Sequence[str],
        local: bool,
        max_body_bytes: int,
        limits: ConnectionLimits,
        log: str = "none",
        own: socket.socket | None = None,
        origins: Sequence[str] = (),
    ) -> None:
        """`listener` is bound, `log` "none" or a kind of `AccessLog`. Serves until `stop`.

        `own`: a Unix socket that only this user can reach, who needs no key there; without a
        `listener` there is only that one. `origins`: of pages elsewhere that may ask.
        """
        self.loading_gate = loading_gate
        self._connections = Connections(limits)
        self._settings = max_body_bytes, log
        self._servers: list[tuple[QuietServer, socket.socket]] = []
        self._loop = asyncio.new_event_loop()
        if listener is not None:
            self._servers.append((self._server(loading_gate, keys, local, origins), listener))
        if own is not None:
            self._servers.append((self._server(loading_gate, (), True), own))
        self._lifespan = contextlib.AsyncExitStack()
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._thread.start()

    def _server(
        self, app: ASGIApp, keys: Sequence[str], local: bool, origins: Sequence[str] = ()
    ) -> QuietServer:
        """A server of `app` behind a `Gate` and an `AccessLog`."""
        max_body_bytes, log = self._settings
        made: Any = self._connections  # where uvicorn's types have a class
        app = Gate(app, keys=keys, local=local, max_body_bytes=max_body_bytes, origins=origins)
        if log != "none":
            app = AccessLog(app, log, partial(click.echo, err=True))
        config = uvicorn.Config(
            app, http=made, ws="none", lifespan="off", log_level="warning", access_log=False,
            server_header=False, proxy_headers=False, timeout_keep_alive=30, backlog=512,
        )  # fmt: skip
        # Defects are logged where they become answers; uvicorn would log them again, and every
        # answer that the server's end cuts off.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # `Config` sets it too
        # It warns of a client that leaves while several pieces of its answer are written.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        return QuietServer(config, self._loop)

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start `work` in the server's loop."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, Any], timeout_s: float = 60.0) -> Any:
        """Run `work` in the server's loop. Errors: its own, TimeoutError."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def use(self, app: FastAPI) -> None:
        """Serve the application, once its startup is done."""

        async def enter() -> None:
            await self._lifespan.enter_async_context(app.router.lifespan_context(app))
            self.loading_gate.use(app)

        self.call(enter())
        # All objects that stay exist now. Collecting them takes 0.2 s without any answer,
        # and every answer of many objects would start it.
        gc.freeze()
        trim_heap()  # of what was read to make tokenizers

    def refuse_new(self) -> None:
        """Stop listening; requests that run go on."""
        for server, _ in self._servers:
            server.end()

    def stop(self, timeout_s: float = 0.0) -> None:
        """End; requests that still run after `timeout_s` are cut off. May be called again."""
        self.refuse_new()
        self._thread.join(timeout_s)
        for server, _ in self._servers:
            server.force_exit = True
        self._thread.join(_END_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        watching = self._loop.create_task(self._connections.watch())
        try:
            self._loop.run_until_complete(self._serve_all())
            watching.cancel()
            cancelled = asyncio.all_tasks(self._loop)
            for task in cancelled:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(cancelled, timeout=_CANCELLED_S))
        finally:
            for _, listener in self._servers:
                listener.close()
            self._loop.close()

    async def _serve_all(self) -> None:
        await asyncio.gather(*(server.serve([listener]) for server, listener in self._servers))
