"""Answers of /api/generate and /api/chat: JSON objects a line, the last with durations."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent
from hotcold.ui.api import sse
from hotcold.ui.api.answer import Answer, reader_of
from hotcold.ui.api.backend import Answers, Backend
from hotcold.ui.api.drawn import ollamas_sampling
from hotcold.ui.api.errors import LOADING_TOOK, ApiError, refusal, timed_out
from hotcold.ui.api.ollama.schemas import OllamaChat, OllamaGenerate
from hotcold.ui.api.requests import chat_requests, completion_requests
from hotcold.ui.api.schemas import ChatRequest, CompletionRequest
from hotcold.ui.api.tools.reader import (
    AnswerReader,
    ArgumentsPart,
    CallPart,
    ReasoningPart,
    TextPart,
)

Line = dict[str, Any]
Body = OllamaGenerate | OllamaChat


class _Lines(sse.LineStream):
    """Lines of an answer; before one JSON allows blanks."""

    keep_alive = b" "


class OllamaAnswer(Answer):
    """One answer: a line for each piece of text, and for each call once it is whole."""

    stream = _Lines

    def __init__(self, backend: Backend, body: Body) -> None:
        """Errors:  ApiError 400"""
        super().__init__(backend, stays=body.stays)
        self._body = body
        self._started_ns = time.monotonic_ns()
        self._load_ns = 0
        self._request = request = _request(backend, body)
        self._sampling = ollamas_sampling(body.options)
        if isinstance(request, ChatRequest):
            self._reader = reader_of(backend, request, body.logprobs)
        else:
            self._reader = AnswerReader(None)
        self._open: tuple[str, str] | None = None  # id and name of a call
        self._arguments = ""
        # All that was said, and the last line.
        self._text = self._thought = ""
        self._calls: list[Line] = []
        self._logprobs: list[Line] = []
        self._last: Line = {}

    async def requests(self) -> list[GenerateRequest]:
        """Its one request. Errors: PromptError, UsageError."""
        if isinstance(self._request, ChatRequest):
            made = await chat_requests(self._backend, self._request)
        else:
            made = await completion_requests(self._backend, self._request)
        given = self._sampling
        return [replace(one, sampling=replace(one.sampling, **given)) for one in made]

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
                    self._thought += text
                    yield self._piece(thought=text)
                case TextPart(text):
                    yield from self._end_call()
                    self._text += text
                    self._logprobs += part.logprobs
                    yield self._piece(text, logprobs=part.logprobs)
                case CallPart(_, call_id, name):
                    yield from self._end_call()
                    self._open, self._arguments = (call_id, name), ""
                case ArgumentsPart(_, text):
                    self._arguments += text
        if event.result is not None:
            yield from self._end_call()
            self._last = self._end(event.result)
            yield self._last | _said(self._body)

    def failing(self, error: ApiError) -> Iterable[Line]:
        """The last line of a stream that fails."""
        return [{"error": error.message}]

    def written(self, piece: Line) -> bytes:
        """A line."""
        return sse.line(piece)

    def whole(self) -> Line:
        """The last line with all that was said."""
        said = _said(self._body, self._text, self._thought, self._calls, self._logprobs)
        return self._last | said

    def _piece(self, *said: Any, **more: Any) -> Line:
        return {**_head(self._body), **_said(self._body, *said, **more), "done": False}

    def _end_call(self) -> Iterator[Line]:
        """The open call, unless it was cut off."""
        if self._open is None:
            return
        (call_id, name), self._open = self._open, None
        try:
            arguments = json.loads(self._arguments)
        except ValueError:
            return
        function = {"index": len(self._calls), "name": name, "arguments": arguments}
        self._calls.append({"id": call_id, "function": function})
        yield self._piece(calls=self._calls[-1:])

    def _end(self, result: Generation) -> Line:
        """The last line. Durations in nanoseconds; loading is all before the prompt is read."""
        queued_ns, prompt_ns, new_ns = (
            round(seconds * 1e9) for seconds in (result.queued_s, result.prefill_s, result.decode_s)
        )
        return {
            **_head(self._body),
            "done": True,
            "done_reason": result.finish_reason,
            "total_duration": time.monotonic_ns() - self._started_ns,
            "load_duration": self._load_ns + queued_ns,
            "prompt_eval_count": result.num_prompt_tokens,
            "prompt_eval_duration": prompt_ns,
            "eval_count": len(result.ids),
            "eval_duration": new_ns,
        }


async def loaded_or_ended(backend: Backend, body: Body) -> Line:
    """Load the model, or with `keep_alive` 0 unload it, and return that.

    Errors:  ApiError 503 and 504, HotcoldError
    """
    reason, limit_s = "load", backend.settings.request_timeout_s
    if not backend.keep(body.stays):
        reason = "unload"
    else:
        try:
            async with asyncio.timeout(limit_s):
                await backend.ready()
        except TimeoutError:
            raise timed_out(limit_s, LOADING_TOOK) from None
    return {**_head(body), **_said(body), "done": True, "done_reason": reason}


def _head(body: Body) -> Line:
    created_at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": body.wanted, "created_at": created_at}


def _said(
    body: Body,
    text: str = "",
    thought: str = "",
    calls: Iterable[Line] = (),
    logprobs: Iterable[Line] = (),
) -> Line:
    """The keys of a line that differ between the two routes."""
    is_chat = isinstance(body, OllamaChat)
    said: Line = {"role": "assistant", "content": text} if is_chat else {"response": text}
    if thought:
        said["thinking"] = thought
    if calls:
        said["tool_calls"] = calls
    if is_chat:
        said = {"message": said}
    if logprobs:
        said["logprobs"] = logprobs
    return said


def _request(backend: Backend, body: Body) -> ChatRequest | CompletionRequest:
    """The same request of OpenAI's API. Errors: ApiError 400."""
    tokenizer = backend.prompts.tokenizer
    if body.think and (tokenizer is None or tokenizer.thinking is None):
        raise body.unable("thinking", "think")
    try:
        if isinstance(body, OllamaChat):
            return ChatRequest.model_validate(body.asked())
        kind, fields = body.asked(tokenizer)
        if kind == "chat":
            return ChatRequest.model_validate(fields)
        return CompletionRequest.model_validate(
            {"max_tokens": backend.settings.max_tokens, **fields}
        )
    except ValidationError as error:
        raise refusal(error) from None
