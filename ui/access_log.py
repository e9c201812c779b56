"""The access log: a line for each answer with its client, path, status and time."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Set in `state` by who answers that the model is loading: clients ask until it has.
IS_LOADING = "is_loading"
# Paths that programs and the page poll are logged only where the request fails.
_QUIET = (
    "/health",
    "/v1/health",
    "/metrics",
    "/v1/hotcold/state",
    "/gradio_api/",
    "/assets/",
    "/static/",
    "/config",
    "/theme.css",
)
_MODEL_PAGE = re.compile(r"^/model/[^/]+")  # of a server with several models
_CUT_OFF = 499  # the client disconnected before there was an answer


class AccessLog:
    """Passes requests on to `app`, and logs each answer once it is sent or cut off."""

    def __init__(self, app: ASGIApp, kind: str, tell: Callable[[str], None]) -> None:
        """`kind` is "text" or "json"; `tell` gets a line without its end."""
        self._app = app
        self._is_json = kind == "json"
        self._tell = tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})
        started, status, num_bytes = time.perf_counter(), _CUT_OFF, 0

        async def counted(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, counted)
        finally:
            path = _MODEL_PAGE.sub("", scope["path"])
            is_asked_again = scope["state"].get(IS_LOADING) and scope["method"] in ("GET", "HEAD")
            if not is_asked_again and (status >= 400 or not path.startswith(_QUIET)):
                seconds = time.perf_counter() - started
                self._tell(self._line(scope, status, num_bytes, seconds))

    def _line(self, scope: Scope, status: int, num_bytes: int, seconds: float) -> str:
        """Without the query, in which some clients send keys. Routes set `state.model`."""
        address = (scope.get("client") or ("-",))[0]
        model = scope["state"].get("model")
        at = _now()
        if self._is_json:
            fields: dict[str, Any] = {
                "time": at, "client": address, "method": scope["method"], "path": scope["path"],
                "status": status, "bytes": num_bytes, "seconds": round(seconds, 3),
            }  # fmt: skip
            fields |= {} if model is None else {"model": model}
            return json.dumps(fields)
        request = ascii(f"{scope['method']} {scope['path']}")
        line = f"{at} {address} {request} {status} {num_bytes} bytes {seconds:.3f} s"
        return line if model is None else f"{line} {model!a}"


def event_line(kind: str, event: str, model: str) -> str:
    """A line for an event of a model, in the format of an `AccessLog` of this kind."""
    if kind == "json":
        return json.dumps({"time": _now(), "event": event, "model": model})
    return f"{_now()} {event} {model!a}"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
