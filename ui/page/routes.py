"""The routes of Gradio that the page needs; all others are refused, those of later versions too.

Some would let requests reach files or other hosts: `file=https://…` fetches any address, `proxy=`
forwards requests, uploads become files. So would event data that names a file: Gradio copies that
file of this host, or fetches that address.
"""

import json
import re
from typing import Any

from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotcold.ui.api.errors import ApiError
from hotcold.ui.connections import IS_STREAM
from hotcold.ui.page import ASSETS

_FILE = r"[\w@.-]+(/[\w@.-]+)*"
_STREAM = re.compile(r"/gradio_api/(queue/data|heartbeat/\w+)")
_ALLOWED = {
    "GET": re.compile(
        rf"/|/config|/theme\.css|/favicon\.ico|/(assets|static)/{_FILE}|{_STREAM.pattern}"
        # Which server this is: a page that lost one in the middle loads again once it is back.
        r"|/gradio_api/app_id"
    ),
    "HEAD": re.compile("/"),
    "POST": re.compile(r"/gradio_api/(component_server/?|queue/join|run/\w+)"),
}


def is_allowed(method: str, path: str) -> bool:
    """Whether the page needs this route."""
    allowed = _ALLOWED.get(method)
    return allowed is not None and allowed.fullmatch(path) is not None and "/.." not in path


def names_a_file(value: Any) -> bool:
    """Whether an event's JSON holds a file of Gradio's: an object with path and meta."""
    found = [value]
    while found:
        one = found.pop()
        if isinstance(one, dict):
            if "path" in one and "meta" in one:
                return True
            found += one.values()
        elif isinstance(one, list):
            found += one
    return False


class PageRoutes:
    """Passes the page's requests on to Gradio's application."""

    def __init__(self, app: ASGIApp) -> None:
        """`app` is Gradio's, or makes that at the first of these requests."""
        self._app = app
        # Gradio compresses scripts and styles, but not the page, which is large.
        self._compressed = GZipMiddleware(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request. Errors: ApiError 404."""
        path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or not is_allowed(scope["method"], path):
            text = "there is no such route; /openapi.json lists those of the API"
            raise ApiError(404, text, code="route_refused")
        if scope["method"] == "HEAD":  # of a monitor
            return await HTMLResponse()(scope, receive, send)
        if path == "/favicon.ico":  # of a browser that shows /health
            return await FileResponse(ASSETS / "favicon.svg")(scope, receive, send)
        app = self._compressed if path == "/" else self._app
        if _STREAM.fullmatch(path):
            scope.setdefault("state", {})[IS_STREAM] = True
        if scope["method"] == "POST":
            receive = await _without_files(scope, receive)
        return await app(scope, receive, send)


async def _without_files(scope: Scope, receive: Receive) -> Receive:
    """The same request, its body checked. Errors: ApiError 400."""
    body = await Request(scope, receive).body()
    try:
        is_refused = names_a_file(json.loads(body))
    except (ValueError, RecursionError):
        raise ApiError(400, "the page takes JSON alone") from None
    if is_refused:
        raise ApiError(400, "the page takes no files", code="file_refused")
    read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return read.pop() if read else await receive()

    return again
