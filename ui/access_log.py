"""A line for each answer: who asked for what, how it ended, how long it took."""

import json
import re
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# What programs and the page ask for again and again is told only where it is refused.
_QUIET = (
    "/health",
    "/metrics",
    "/own/state",
    "/gradio_api/",
    "/assets/",
    "/static/",
    "/config",
    "/theme.css",
)
_PAGE_OF_ONE = re.compile(r"^/model/[^/]+")  # one of several pages
_CUT_OFF = 499  # the client was gone before there was an answer


class AccessLog:
    """Passes everything on to `app`, and tells of each answer once it is sent or cut off."""

    def __init__(self, app: ASGIApp, kind: str, tell: Callable[[str], None]) -> None:
        """`kind` is "text" or "json"; `tell` gets a line without its end."""
        self._app = app
        self._is_json = kind == "json"
        self._tell = tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
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
            asked = _PAGE_OF_ONE.sub("", scope["path"])
            if status >= 400 or not asked.startswith(_QUIET):
                seconds = time.perf_counter() - started
                self._tell(self._line(scope, status, num_bytes, seconds))

    def _line(self, scope: Scope, status: int, num_bytes: int, seconds: float) -> str:
        """Without the query, in which some clients send keys. A route leaves the model's name."""
        address = (scope.get("client") or ("-",))[0]
        model = scope["state"].get("model")
        at = _now()
        if self._is_json:
            told = {
                "time": at, "client": address, "method": scope["method"], "path": scope["path"],
                "status": status, "bytes": num_bytes, "seconds": round(seconds, 3),
            }  # fmt: skip
            return json.dumps(told if model is None else {**told, "model": model})
        asked = ascii(f"{scope['method']} {scope['path']}")  # what is not plain is escaped
        line = f"{at} {address} {asked} {status} {num_bytes} bytes {seconds:.3f} s"
        return line if model is None else f"{line} {model!a}"


def event_line(kind: str, event: str, model: str) -> str:
    """What happened to a model, beside the lines of an `AccessLog` of this kind."""
    if kind == "json":
        return json.dumps({"time": _now(), "event": event, "model": model})
    return f"{_now()} {event} {model!a}"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
