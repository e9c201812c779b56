"""Server-sent events, and clients that go away."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_Result = TypeVar("_Result")

DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


def event(content: Any) -> bytes:
    """One event that carries JSON, which has no line break in it."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Do `work` while the client is there, whose request has been read.

    Errors:  ClientGoneError, after `work` was cancelled and has ended; those of `work`
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.wait({working, gone})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends what a generator yields, each piece at once; closes it in any case."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncGenerator[bytes, None]) -> None:
        """`content` yields whole events."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await unless_gone(receive, self._send(send))
        except ClientGoneError:
            pass
        finally:
            await self._content.aclose()

    async def _send(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        async for piece in self._content:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
