"""POST /v1/responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError

from hotcold.actors.protocol.messages import Generation, TokenEvent
from hotcold.ui.api import sse
from hotcold.ui.api.answer import first_then_rest
from hotcold.ui.api.backend import Answers, Backend
from hotcold.ui.api.errors import as_api_error, refusal
from hotcold.ui.api.requests import chat_requests
from hotcold.ui.api.responses.output import Event, Output
from hotcold.ui.api.responses.schemas import ResponsesRequest
from hotcold.ui.api.schemas import ChatRequest
from hotcold.ui.api.tools.thoughts import AnswerReader, Thoughts


class ResponsesRoute:
    """The answers of /v1/responses."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def whole(self, body: ResponsesRequest) -> dict[str, Any]:
        """The whole response. Errors: ApiError, HotcoldError."""
        response = _Response(self._backend, body)
        answers = await response.start()
        try:
            async with aclosing(answers.events()) as events:
                async for _, event in events:
                    for _event in response.take(event):
                        pass
        finally:
            answers.close()
        return response.content

    async def stream(self, body: ResponsesRequest) -> sse.EventStream:
        """The response as events; it has begun. Errors: ApiError, HotcoldError."""
        response = _Response(self._backend, body)
        answers = await response.start()
        events = await first_then_rest(answers)
        number = 0

        def sent(events: Iterable[Event]) -> Iterator[bytes]:
            nonlocal number
            for event in events:
                yield sse.event({**event, "sequence_number": number}, event["type"])
                number += 1

        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                for piece in sent(response.opening()):
                    yield piece
                async for _, event in events:
                    for piece in sent(response.take(event)):
                        yield piece
            except Exception as error:
                problem = as_api_error(error)
                failed = {"type": "error", "message": problem.message, "code": problem.code}
                for piece in sent([{**failed, "param": problem.param}]):
                    yield piece

        return sse.EventStream(pieces(), answers.deadline, answers.close)


class _Response:
    """One response; `content` is its object so far."""

    def __init__(self, backend: Backend, body: ResponsesRequest) -> None:
        """Errors:  ApiError 400"""
        self._backend = backend
        try:
            self._chat: ChatRequest = body.as_chat()
        except ValidationError as error:
            raise refusal(error) from None
        self._output = Output()
        self._syntax = None if self._chat.callable is None else backend.call_syntax
        drawn = body.drawn()
        self.content: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": backend.settings.model_name,
            "output": self._output.items,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": drawn["temperature"],
            "top_p": drawn["top_p"],
            "tools": [
                tool.model_dump() | {"strict": tool.strict is True} for tool in body.functions
            ],
            "tool_choice": body.model_dump()["tool_choice"] or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "metadata": body.metadata or {},
            "previous_response_id": None,
            "store": False,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    async def start(self) -> Answers:
        """Queue the request. Errors: ApiError, HotcoldError."""
        answers = await self._backend.start(1, lambda: chat_requests(self._backend, self._chat))
        prompt_ids = answers.requests[0].prompt_ids or ()
        self._num_prompt_tokens = len(prompt_ids)
        self._thoughts = Thoughts.of(self._backend.prompts.tokenizer, prompt_ids)
        self._reader = AnswerReader(self._thoughts, self._syntax)
        return answers

    def opening(self) -> Iterator[Event]:
        """The events before the answer's own."""
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": {**self.content, "output": []}}

    def take(self, event: TokenEvent) -> Iterator[Event]:
        """Add an event of the system; yields the events of the stream."""
        parts = self._reader.push(event.text, is_last=event.result is not None)
        yield from self._output.of(parts)
        if event.result is not None:
            status = "completed" if event.result.finish_reason == "stop" else "incomplete"
            yield from self._output.end(status)
            self._finish(status, event.result)
            yield {"type": f"response.{status}", "response": self.content}

    def _finish(self, status: str, result: Generation) -> None:
        asked, new = self._num_prompt_tokens, len(result.ids)
        num_thought = 0 if self._thoughts is None else self._thoughts.num_tokens(result.ids)
        self.content["status"] = status
        if status == "incomplete":
            self.content["incomplete_details"] = {"reason": "max_output_tokens"}
        self.content["usage"] = {
            "input_tokens": asked,
            "input_tokens_details": {
                "cached_tokens": result.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": num_thought},
            "total_tokens": asked + new,
        }
