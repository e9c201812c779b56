"""What both completion routes share: JSON answers, their first keys, streams of chunks."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotcold.actors.protocol.messages import TokenEvent
from hotcold.ui.api import sse
from hotcold.ui.api.answer import Answer
from hotcold.ui.api.backend import Answers, Backend
from hotcold.ui.api.errors import as_api_error
from hotcold.ui.api.schemas import SamplingRequest

_FEW = 256


async def answered(request: Request, work: Coroutine[Any, Any, Any], prompt: str = "prompt") -> Any:
    """The result of `work`; its errors as ApiError. `prompt`: the field that holds it."""
    try:
        return await sse.unless_gone(request.receive, work)
    except sse.ClientGoneError:
        raise
    except Exception as error:
        raise as_api_error(error, prompt) from error


class JsonAnswer(Response):
    """A JSON answer of any length, encoded in another thread and in pieces that release the GIL."""

    def __init__(self, content: Any) -> None:
        super().__init__()
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        whole = await asyncio.to_thread(lambda: "".join(_written(self._content)).encode())
        await Response(whole, media_type="application/json")(scope, receive, send)


def _written(content: Any) -> Iterator[str]:
    """The JSON of `content` in pieces."""
    if isinstance(content, dict):
        separator = "{"
        for key, value in content.items():
            yield f"{separator}{_dumped(key)}:"
            yield from _written(value)
            separator = ","
        yield "}" if content else "{}"
    elif isinstance(content, list) and content and isinstance(content[0], dict | list):
        separator = "["
        for value in content:
            yield separator
            yield from _written(value) if len(content) < _FEW else (_dumped(value),)
            separator = ","
        yield "]"
    else:
        yield _dumped(content)


def _dumped(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Route:
    """A completion route for one model."""

    prompt: ClassVar[str]  # the request's field that holds it

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._texts = backend.texts

    def _head(self, prefix: str, kind: str) -> dict[str, Any]:
        """The first keys of every answer and chunk."""
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self._backend.settings.model_name,
            "system_fingerprint": None,
        }

    def _chunks(
        self,
        body: SamplingRequest,
        answers: Answers,
        head: dict[str, Any],
        choices_of: Callable[[int, TokenEvent], Iterable[dict[str, Any]]],
        usage_of: Callable[[Sequence[Answer]], dict[str, Any]],
        opening: Iterable[dict[str, Any]] = (),
    ) -> sse.EventStream:
        """A chunk a choice: those of `opening`, then those that `choices_of` makes of each event.

        An error is the last event.
        """
        if body.has_usage_chunk:
            head = {**head, "usage": None}

        def chunks(choices: Iterable[dict[str, Any]]) -> Iterator[bytes]:
            return (sse.event({**head, "choices": [choice]}) for choice in choices)

        async def pieces() -> AsyncGenerator[bytes, None]:
            done = [Answer() for _ in answers.requests]
            try:
                for chunk in chunks(opening):
                    yield chunk
                async with aclosing(answers.events()) as events:
                    async for index, event in events:
                        done[index].add(event)
                        for chunk in chunks(choices_of(index, event)):
                            yield chunk
                if body.has_usage_chunk:
                    counts = await asyncio.to_thread(usage_of, done)
                    yield sse.event({**head, "choices": [], "usage": counts})
                yield sse.DONE
            except Exception as error:
                yield sse.event(as_api_error(error, self.prompt).body)

        return sse.EventStream(pieces(), answers.deadline, answers.close)
