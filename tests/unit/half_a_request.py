"""A client that goes away while it sends its request."""

from __future__ import annotations

import asyncio
from typing import Any


def answer_to_half(app: Any, path: str, begin: bytes) -> int:
    """The status that an ASGI app answers to a POST of which only `begin` comes."""
    coming = [
        {"type": "http.request", "body": begin, "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return coming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": path, "headers": [],
        "query_string": b"", "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    status: int = sent[0]["status"]
    return status
