"""Server-sent events, lines of JSON, and clients that disconnect."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

_Result = TypeVar("_Result")

KEEP_ALIVE_S = 3.0  # some proxies and clients give up after five seconds of silence
DONE = b"data: [DONE]\n\n"
# Unicode's other line ends, where some clients split; JSON escapes control characters itself.
_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


class ClientGoneError(Exception):
    """The client has disconnected before its answer was complete."""


def event(content: Any, name: str | None = None) -> bytes:
    """One event of JSON without line breaks, optionally with a `name`."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.translate(_LINE_ENDS)
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Do `work` unless the client disconnects; its request must have been read.

    Errors:  ClientGoneError, once `work` was cancelled and has ended; those of `work`
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
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def line(content: Any) -> bytes:
    """One line of JSON in ASCII: some clients split at Unicode's other line ends."""
    return json.dumps(content, allow_nan=False).encode() + b"\n"


class EventStream(Response):
    """Sends its head, then what a generator yields, each piece at once, and closes it in any case.

    While nothing comes, `keep_alive` is sent every few seconds. Once a client that reads nothing
    has filled the buffers, sending waits, `deadline` at most.
    """

    media_type = "text/event-stream"
    keep_alive = b": still working\n\n"  # a comment

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        deadline: float | None = None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`content` yields whole events; `deadline` is by the loop's clock.

        `at_end` is called in any case: a generator that has not begun cannot clean up.
        """
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._content = content
        self.deadline = deadline
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        try:
            await unless_gone(receive, self._send(send))
        except (ClientGoneError, TimeoutError):
            pass  # the connection ends with the incomplete answer
        finally:
            self._at_end()
            await self._content.aclose()

    async def _send(self, send: Send) -> None:
        headers = self.raw_headers
        sent_at = time.monotonic()

        async def in_time(message: Message) -> None:
            nonlocal sent_at
            async with asyncio.timeout_at(self.deadline):
                await send(message)
            sent_at = time.monotonic()

        async def keep_alive() -> None:
            while self.keep_alive:
                await asyncio.sleep(max(0.0, sent_at + KEEP_ALIVE_S - time.monotonic()))
                if time.monotonic() >= sent_at + KEEP_ALIVE_S:
                    await in_time(_body(self.keep_alive))

        start = {"type": "http.response.start", "status": self.status_code, "headers": headers}
        await in_time(start)
        keeping = asyncio.ensure_future(keep_alive())
        try:
            async for piece in self._content:
                await in_time(_body(piece))
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await in_time({"type": "http.response.body", "body": b"", "more_body": False})


def _body(piece: bytes) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": True}


class LineStream(EventStream):
    """Lines of JSON, each at once."""

    media_type = "application/x-ndjson"
    keep_alive = b""
