"""Answers of /api/generate and /api/chat: JSON objects a line, the last with durations."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from hotcold.actors.protocol.messages import Generation, TokenEvent
from hotcold.ui.api import sse
from hotcold.ui.api.answer import Answer, answer_of
from hotcold.ui.api.backend import Answers, Backend
from hotcold.ui.api.drawn import ollamas_sampling
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.ollama.schemas import OllamaChat, OllamaGenerate, written
from hotcold.ui.api.tools.reader import CallPart, ReasoningPart, TextPart

Line = dict[str, Any]
Body = OllamaGenerate | OllamaChat


class _Lines(sse.LineStream):
    """Lines of an answer; before one JSON allows blanks."""

    keep_alive = b" "


async def answer(backend: Backend, body: Body) -> Response | Line:
    """Answer as Ollama does: a line of JSON a piece, or all at once where `stream` is false."""
    if not body.is_load:
        return await answer_of(OllamaAnswer(backend, body), body.stream is not False)
    stays = backend.keep(body.stays)
    if stays:
        await backend.ready()
    return _line(body) | {"done": True, "done_reason": "load" if stays else "unload"}


class OllamaAnswer(Answer):
    """One answer: a line for each piece of text, and for each call once it is whole."""

    stream = _Lines

    def __init__(self, backend: Backend, body: Body) -> None:
        """Errors:  ApiError 400, ValidationError"""
        if body.think and not backend.thinks:
            raise body.unable("thinking", "think")
        asked, options = body.asked(backend.has_chat_template), ollamas_sampling(body.options)
        super().__init__(backend, asked, body.stays, options)
        self._body = body
        self._started_ns = time.monotonic_ns()
        self._load_ns = 0
        (self._reader,) = self._readers
        self._num_ended = 0  # calls of the reader
        self._calls: list[Line] = []
        self._end: Line = {}

    async def start(self) -> Answers:
        """Queue its request; the model is loaded then. Errors: ApiError, HotcoldError."""
        answers = await super().start()
        self._load_ns = time.monotonic_ns() - self._started_ns
        return answers

    def take(self, index: int, event: TokenEvent) -> Iterator[Line]:
        """Take the next event."""
        for part in self._reader.push(event):
            match part:
                case ReasoningPart(text):
                    yield _line(self._body, thinking=text)
                case TextPart(text):
                    yield from self._called()
                    yield _line(self._body, text, part.logprobs)
                case CallPart(number):
                    yield from self._called(number)
        if event.result is not None:
            yield from self._called()
            self._end = self._told_of(event.result)
            yield _line(self._body) | self._end

    def failing(self, error: ApiError) -> Iterable[Line]:
        """The last line of a stream that fails."""
        return [{"error": error.message}]

    def written(self, piece: Line) -> bytes:
        """A line."""
        return sse.line(piece)

    def whole(self) -> Line:
        """The last line with all that was said."""
        said, more = self._reader, {"thinking": self._reader.thought, "tool_calls": self._calls}
        return _line(self._body, said.said, said.logprobs, **more) | self._end

    def _called(self, before: int | None = None) -> Iterator[Line]:
        """The calls that have ended since, but for one that was cut off."""
        for call in self._reader.calls[self._num_ended : before]:
            self._num_ended += 1
            try:
                arguments = json.loads(call.arguments)
            except ValueError:
                continue
            function = {"index": len(self._calls), "name": call.name, "arguments": arguments}
            self._calls.append({"id": call.id, "function": function})
            yield _line(self._body, tool_calls=self._calls[-1:])

    def _told_of(self, result: Generation) -> Line:
        """The end. Durations in nanoseconds; loading is all before the prompt is read."""
        queued_ns, prompt_ns, new_ns = (
            round(seconds * 1e9) for seconds in (result.queued_s, result.prefill_s, result.decode_s)
        )
        return {
            "done": True,
            "done_reason": result.finish_reason,
            "total_duration": time.monotonic_ns() - self._started_ns,
            "load_duration": self._load_ns + queued_ns,
            "prompt_eval_count": result.num_prompt_tokens,
            "prompt_eval_duration": prompt_ns,
            "eval_count": len(result.ids),
            "eval_duration": new_ns,
        }


def _line(body: Body, text: str = "", logprobs: Sequence[Line] = (), **more: Any) -> Line:
    """A line of an answer that goes on; what is empty in it but `text` is left out."""
    said = {name: part for name, part in more.items() if part}
    if isinstance(body, OllamaChat):
        said = {"message": {"role": "assistant", "content": text, **said}}
    else:
        said["response"] = text
    if logprobs:
        said["logprobs"] = logprobs
    created_at = written(datetime.now(UTC))
    return {"model": body.wanted, "created_at": created_at, **said, "done": False}
