"""An answer of any API: what it tells of the events of its requests, in a stream and as a whole."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import chain
from typing import Any, ClassVar

from pydantic_core import to_json
from starlette.responses import Response

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent
from hotcold.ui.api import sse
from hotcold.ui.api.backend import Answers, Backend
from hotcold.ui.api.errors import ApiError, as_api_error
from hotcold.ui.api.logprobs import ContentLogprobs
from hotcold.ui.api.requests import requests_of
from hotcold.ui.api.schemas import ChatRequest, CompletionRequest
from hotcold.ui.api.tools.reader import AnswerReader

_FEW = 256  # items of a list that are themselves written in pieces


class Answer(ABC):
    """The answer to one HTTP request.

    A stream tells its pieces: `opening`, those of each event, `closing`. The whole answer is made
    by the same steps, and `whole` gives it after them.
    """

    stream: ClassVar[type[sse.EventStream]] = sse.EventStream
    end: ClassVar[bytes] = b""  # of a stream that did not fail

    def __init__(
        self,
        backend: Backend,
        asked: ChatRequest | CompletionRequest,
        stays: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`asked`: what any API's request comes to; `stays` as in `Backend.start`.

        `options`: fields of `SamplingParams` in place of those that are asked for.
        Errors:  PromptError without a tokenizer for its tools
        """
        self.prompt = asked.prompt_field
        self._backend = backend
        self._asked = asked
        self._count = len(asked.prompts) * (asked.n or 1)
        self._stays = stays
        self._options = options or {}
        self._readers = [_reader(backend, asked) for _ in range(self._count)]

    async def start(self) -> Answers:
        """Queue its requests. Errors: ApiError, HotcoldError."""
        return await self._backend.start(self._count, self.requests, self._stays)

    async def requests(self) -> list[GenerateRequest]:
        """A request for each of its answers. Errors: PromptError, UsageError."""
        return await requests_of(self._backend, self._asked, self._options)

    def opening(self) -> Iterable[Any]:
        """The pieces before all events."""
        return ()

    @abstractmethod
    def take(self, index: int, event: TokenEvent) -> Iterator[Any]:
        """Take the next event of the request at `index`; yields what a stream tells of it."""

    def closing(self) -> Iterable[Any]:
        """The pieces after all events."""
        return ()

    def failing(self, error: ApiError) -> Iterable[Any]:
        """The last pieces of a stream that fails."""
        return [error.body]

    def written(self, piece: Any) -> bytes:
        """A piece as the stream has it."""
        return sse.event(piece)

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The whole answer, once all events were taken."""


async def answer_of(answer: Answer, is_streamed: bool | None) -> Response:
    """The answer as a stream, which is queued, or whole. Errors: ApiError, HotcoldError."""
    if is_streamed:
        started = await answer.start()
        return answer.stream(_pieces(answer, started), started.deadline, started.close)
    return await json_answer(await whole(answer))


async def whole(answer: Answer) -> dict[str, Any]:
    """The whole answer. Errors: ApiError, HotcoldError."""
    events = await collect(await answer.start())

    def take_all() -> None:
        for index, event in enumerate(events):
            for _piece in answer.take(index, event):
                pass

    await asyncio.to_thread(take_all)
    for _piece in answer.closing():
        pass
    return answer.whole()


async def _pieces(answer: Answer, started: Answers) -> AsyncGenerator[bytes, None]:
    try:
        for piece in answer.opening():
            yield answer.written(piece)
        async with aclosing(started.events()) as events:
            async for index, event in events:
                for piece in answer.take(index, event):
                    yield answer.written(piece)
        for piece in answer.closing():
            yield answer.written(piece)
        if answer.end:
            yield answer.end
    except Exception as error:
        for piece in answer.failing(as_api_error(error, answer.prompt)):
            yield answer.written(piece)


async def collect(answers: Answers) -> list[TokenEvent]:
    """Wait for all answers: each as one event. Errors: ApiError, HotcoldError."""
    found: list[list[TokenEvent]] = [[] for _ in answers.requests]
    async with aclosing(answers.events()) as events:
        async for index, event in events:
            found[index].append(event)
    return list(map(_joined, found))


def _joined(events: Sequence[TokenEvent]) -> TokenEvent:
    """What the events of a whole answer are together; adding them up would copy each many times."""
    return TokenEvent(
        "".join(event.text for event in events),
        events[-1].result,
        logprobs=tuple(chain.from_iterable(event.logprobs for event in events)),
        prompt_logprobs=tuple(chain.from_iterable(event.prompt_logprobs for event in events)),
        parts=tuple(chain.from_iterable(event.told_parts for event in events)),
    )


def _reader(backend: Backend, asked: ChatRequest | CompletionRequest) -> AnswerReader:
    """What reads one answer. Errors: PromptError without a tokenizer for its tools."""
    if not isinstance(asked, ChatRequest):
        return AnswerReader(None)
    return AnswerReader(
        backend.call_syntax if asked.callable is not None else None,
        asked.callable.schemas if asked.callable is not None else None,
        [tool.custom.name for tool in asked.tools or () if tool.type == "custom"],
        ContentLogprobs(backend.texts) if asked.logprobs else None,
    )


def usage(results: Sequence[Generation], copies: int, most: int = 1 << 31) -> dict[str, Any]:
    """Token counts: a prompt of `copies` answers counts once, an answer `most` tokens at most.

    Of a prompt that counts once, what its first answer found in the KV cache.
    """
    prompt = sum(result.num_prompt_tokens for result in results[::copies])
    new = sum(min(len(result.ids), most) for result in results)
    cached = sum(result.num_cached_tokens for result in results[::copies])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def json_answer(content: dict[str, Any]) -> Response:
    """A JSON answer of any length, written in another thread."""
    written = await asyncio.to_thread(lambda: b"".join(_written(content)))
    return Response(written, media_type="application/json")


def _written(content: Any) -> Iterator[bytes]:
    """Its JSON in pieces: what writes one holds the GIL."""
    if isinstance(content, dict) and content:
        for place, (key, value) in enumerate(content.items()):
            yield (b"," if place else b"{") + to_json(key) + b":"
            yield from _written(value)
        yield b"}"
    elif isinstance(content, list) and content and isinstance(content[0], dict):
        for place, one in enumerate(content):
            yield b"," if place else b"["
            yield from _written(one) if len(content) < _FEW else (_json(one),)
        yield b"]"
    else:
        yield _json(content)


def _json(content: Any) -> bytes:
    return to_json(content, inf_nan_mode="null")
