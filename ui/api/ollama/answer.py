"""Answers of Ollama's API: JSON objects a line, the last with durations."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pydantic import ValidationError

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent
from hotcold.model.text.tools import CallSyntax
from hotcold.ui.api import sse
from hotcold.ui.api.backend import Answers, Backend
from hotcold.ui.api.drawn import ollamas_sampling
from hotcold.ui.api.errors import LOADING_TOOK, as_api_error, refusal, timed_out
from hotcold.ui.api.logprobs import ContentLogprobs
from hotcold.ui.api.ollama.schemas import OllamaChat, OllamaGenerate
from hotcold.ui.api.requests import chat_requests, completion_requests
from hotcold.ui.api.schemas import ChatRequest, CompletionRequest
from hotcold.ui.api.tools.reader import (
    AnswerReader,
    ArgumentsPart,
    CallPart,
    Part,
    ReasoningPart,
    TextPart,
)

Line = dict[str, Any]
Body = OllamaGenerate | OllamaChat


class _Lines(sse.LineStream):
    """Lines of an answer; before one JSON allows blanks."""

    keep_alive = b" "


class OllamaAnswer:
    """One answer of /api/generate or /api/chat."""

    def __init__(self, backend: Backend, body: Body) -> None:
        """Errors:  ApiError 400"""
        self._backend = backend
        self._body = body
        self._started_ns = time.monotonic_ns()
        self._load_ns = 0
        self._request = _request(backend, body)
        self._sampling = ollamas_sampling(body.options)
        syntax: CallSyntax | None = None
        if isinstance(self._request, ChatRequest) and self._request.callable is not None:
            syntax = backend.call_syntax
        scored = ContentLogprobs(backend.texts) if body.logprobs else None
        self._reader = _WholeCalls(AnswerReader(syntax), scored)

    async def whole(self) -> Line:
        """The whole answer in one object. Errors: ApiError, HotcoldError."""
        answers = await self._start()
        pieces: list[_Piece] = []
        last: Line = {}
        try:
            async with aclosing(answers.events()) as events:
                async for _, event in events:
                    pieces += self._reader.of(event)
                    if event.result is not None:
                        last = self._end(event.result)
        finally:
            answers.close()
        text = "".join(piece.text for piece in pieces)
        thought = "".join(piece.thought for piece in pieces)
        calls = [piece.call for piece in pieces if piece.call is not None]
        logprobs = [one for piece in pieces for one in piece.logprobs]
        return last | self._said(text, thought, calls, logprobs)

    async def stream(self) -> sse.LineStream:
        """The answer as lines; it is queued. Errors: ApiError, HotcoldError."""
        answers = await self._start()

        async def lines() -> AsyncGenerator[bytes, None]:
            try:
                async with aclosing(answers.events()) as events:
                    async for _, event in events:
                        for piece in self._reader.of(event):
                            calls = [] if piece.call is None else [piece.call]
                            said = self._said(piece.text, piece.thought, calls, piece.logprobs)
                            yield sse.line({**_head(self._body), **said, "done": False})
                        if event.result is not None:
                            yield sse.line(self._end(event.result) | self._said("", "", [], []))
            except Exception as error:
                yield sse.line({"error": as_api_error(error).message})

        return _Lines(lines(), answers.deadline, answers.close)

    async def _start(self) -> Answers:
        backend, request = self._backend, self._request

        async def make() -> list[GenerateRequest]:
            if isinstance(request, ChatRequest):
                made = await chat_requests(backend, request)
            else:
                made = await completion_requests(backend, request)
            given = self._sampling
            return [replace(one, sampling=replace(one.sampling, **given)) for one in made]

        answers = await backend.start(1, make, self._body.stays)
        self._load_ns = time.monotonic_ns() - self._started_ns
        return answers

    def _said(self, text: str, thought: str, calls: list[Line], logprobs: Sequence[Line]) -> Line:
        """The keys of a line that differ between the two routes."""
        said = _said(self._body, text)
        if thought:
            said.get("message", said)["thinking"] = thought
        if calls:
            said["message"]["tool_calls"] = calls
        return said | ({"logprobs": logprobs} if logprobs else {})

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
    if not backend.keep(body.stays):
        return _done(body, "unload")
    limit_s = backend.settings.request_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            await backend.ready()
    except TimeoutError:
        raise timed_out(limit_s, LOADING_TOOK) from None
    return _done(body, "load")


def _done(body: Body, reason: str) -> Line:
    return {**_head(body), **_said(body, ""), "done": True, "done_reason": reason}


def _head(body: Body) -> Line:
    created_at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": body.wanted, "created_at": created_at}


def _said(body: Body, text: str) -> Line:
    if isinstance(body, OllamaGenerate):
        return {"response": text}
    return {"message": {"role": "assistant", "content": text}}


class _Piece(NamedTuple):
    """A piece of an answer: text, or a whole call."""

    text: str = ""
    thought: str = ""
    call: Line | None = None
    logprobs: Sequence[Line] = ()


class _WholeCalls:
    """Parts of an answer as pieces; a call is one once it is complete, as in Ollama."""

    def __init__(self, reader: AnswerReader, scored: ContentLogprobs | None) -> None:
        """`scored` None: no logprobs."""
        self._reader = reader
        self._scored = scored
        self._open: tuple[str, str] | None = None  # id and name
        self._arguments = ""
        self._num_calls = 0

    def of(self, event: TokenEvent) -> Iterator[_Piece]:
        """The pieces after this further event."""
        if self._scored is not None:
            self._scored.add(event)
        yield from self._read(self._reader.push(event))
        if event.result is not None:
            yield from self._close()

    def _read(self, parts: Iterable[Part]) -> Iterator[_Piece]:
        for part in parts:
            match part:
                case ArgumentsPart(_, text):
                    self._arguments += text
                case CallPart(_, call_id, name):
                    yield from self._close()
                    self._open, self._arguments = (call_id, name), ""
                case ReasoningPart(text):
                    yield _Piece(thought=text)
                case TextPart(text, _):
                    yield from self._close()
                    scored = None if self._scored is None else self._scored.of(part)
                    yield _Piece(text, logprobs=scored["content"] if scored else ())

    def _close(self) -> Iterator[_Piece]:
        """The open call, unless it was cut off."""
        if self._open is None:
            return
        (call_id, name), self._open = self._open, None
        try:
            arguments = json.loads(self._arguments)
        except ValueError:
            return
        function = {"index": self._num_calls, "name": name, "arguments": arguments}
        self._num_calls += 1
        yield _Piece(call={"id": call_id, "function": function})


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
