"""The server's thread: it answers that the system is loading until there is an application."""

import asyncio
import contextlib
import gc
import html
import logging
import socket
import threading
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hotcold.actors.protocol.messages import LoadProgress
from hotcold.ui.access_log import AccessLog
from hotcold.ui.api.errors import unavailable
from hotcold.ui.connections import ConnectionLimits, Connections
from hotcold.ui.gate import Gate

_END_S = 10.0
OwnServer = tuple[uvicorn.Server, socket.socket]  # at a Unix socket
_PAGE = Path(__file__).with_name("page") / "loading.html"  # which asks again by itself


class LoadingGate:
    """Stands before the application, which does not exist before the system is loaded."""

    def __init__(self, model_name: str) -> None:
        """Nothing is loaded yet."""
        self.stage = "starting"
        self._model_name = model_name
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._loading(Request(scope))(scope, receive, send)

    def use(self, app: ASGIApp) -> None:
        """Hand requests to the application from now on."""
        self._app = app

    def show(self, progress: LoadProgress) -> None:
        """Say how far it is."""
        self.stage = progress.stage

    def _loading(self, request: Request) -> Response:
        error = unavailable(f"the model is loading ({self.stage}); try again soon", "loading")
        if request.url.path == "/" and "text/html" in request.headers.get("accept", ""):
            shown = {"model": self._model_name, "stage": self.stage}
            text = _PAGE.read_text()
            for name, value in shown.items():
                text = text.replace(f"{{{name}}}", html.escape(value))
            return HTMLResponse(text, error.status, error.headers)
        body: dict[str, Any] = error.body_for(request.url.path)
        if request.url.path == "/health":
            body = {"status": "loading", "stage": self.stage, "model": self._model_name}
        return JSONResponse(body, error.status, error.headers)


class ServerThread:
    """Uvicorn in a thread of its own, so that the main thread is free for loading and signals."""

    def __init__(
        self,
        listener: socket.socket | None,
        loading_gate: LoadingGate,
        keys: Sequence[str],
        local: bool,
        max_body_bytes: int,
        limits: ConnectionLimits,
        log: str = "none",
        own: tuple[socket.socket, ASGIApp] | None = None,
    ) -> None:
        """`listener` is bound, `log` "none" or a kind of `AccessLog`. Serves until `stop`.

        Without a `listener` it answers at `own` alone: a Unix socket in a folder of the user's
        own, and what answers there, without keys.
        """
        self.loading_gate = loading_gate
        self._connections = Connections(limits)
        self._settings = max_body_bytes, log
        self._servers: list[OwnServer] = []
        self._opened: set[asyncio.Future[None]] = set()  # what serves at more Unix sockets
        if listener is not None:
            self._servers.append((self._server(loading_gate, keys, local), listener))
        if own is not None:
            self._servers.append((self._server(own[1], (), True), own[0]))
        self._lifespan = contextlib.AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)
        self._thread.start()

    def _server(self, app: ASGIApp, keys: Sequence[str], local: bool) -> uvicorn.Server:
        """One that answers with `app` to those who may ask."""
        max_body_bytes, log = self._settings
        made: Any = self._connections  # where uvicorn's types have a class
        app = Gate(app, keys=keys, local=local, max_body_bytes=max_body_bytes)
        if log != "none":
            app = AccessLog(app, log, partial(click.echo, err=True))
        config = uvicorn.Config(
            app, http=made, ws="none", lifespan="off", log_level="warning", access_log=False,
            server_header=False, proxy_headers=False, timeout_keep_alive=30, backlog=512,
        )  # fmt: skip
        # Defects are logged where they become answers; uvicorn would tell of them again, and of
        # every answer that the end cuts off.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # `Config` sets it too
        return uvicorn.Server(config)

    def open_control_api(self, listener: socket.socket, app: ASGIApp) -> OwnServer:
        """Answer with `app`, without keys, at one Unix socket more, until `close_control_api`."""
        opened = self._server(app, (), True), listener
        self._servers.append(opened)

        async def serve() -> None:
            serving = asyncio.ensure_future(opened[0].serve([listener]))
            self._opened.add(serving)
            serving.add_done_callback(ended)

        def ended(serving: asyncio.Future[None]) -> None:
            self._opened.discard(serving)
            self._servers.remove(opened)
            listener.close()

        self.begin(serve())
        return opened

    def close_control_api(self, opened: OwnServer) -> None:
        """Take nothing more there; what runs goes on, until `stop` cuts it off too."""
        opened[0].should_exit = True

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Have `work` done in the server's loop."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, Any], timeout_s: float = 60.0) -> Any:
        """Run `work` in the server's loop. Errors: its own, TimeoutError."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def use(self, app: FastAPI) -> None:
        """Serve the application; what it does at its start is done before."""

        async def enter() -> None:
            await self._lifespan.enter_async_context(app.router.lifespan_context(app))
            self.loading_gate.use(app)

        self.call(enter())
        # All that stays is there: looking through it for garbage takes a fifth of a second in which
        # nothing is answered, and comes with every answer of many objects.
        gc.freeze()

    def refuse_new(self) -> None:
        """Stop listening; what runs goes on."""
        for server, _ in list(self._servers):
            server.should_exit = True

    def stop(self, timeout_s: float = 0.0) -> None:
        """End; what still runs after `timeout_s` is cut off. May be called again."""
        self.refuse_new()
        self._thread.join(timeout_s)
        for server, _ in list(self._servers):
            server.force_exit = True
        self._thread.join(_END_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        watching = self._loop.create_task(self._connections.watch())
        try:
            self._loop.run_until_complete(self._serve_all())
            watching.cancel()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0.05))
        finally:
            for _, listener in self._servers:
                listener.close()
            self._loop.close()

    async def _serve_all(self) -> None:
        await asyncio.gather(*(server.serve([listener]) for server, listener in self._servers))
        await asyncio.gather(*self._opened)
