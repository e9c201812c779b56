"""/v1/responses: answers, kept so that later ones continue them."""

from __future__ import annotations

import asyncio
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from hotcold.actors.protocol.messages import GenerateRequest, Generation, TokenEvent
from hotcold.model.errors import PromptTooLongError
from hotcold.ui.api import sse
from hotcold.ui.api.backend import Answers, Backend
from hotcold.ui.api.errors import TOO_LONG, ApiError, as_api_error, refusal
from hotcold.ui.api.requests import chat_requests
from hotcold.ui.api.responses.kept import KeptResponses, Turn
from hotcold.ui.api.responses.output import Event, Output
from hotcold.ui.api.responses.schemas import ReasoningOptions, ResponsesRequest
from hotcold.ui.api.responses.tools import ForeignTool
from hotcold.ui.api.responses.truncation import shortened
from hotcold.ui.api.schemas import ChatRequest
from hotcold.ui.api.tools.reader import AnswerReader


class ResponsesRoute:
    """The answers of /v1/responses."""

    prompt = "input"

    def __init__(self, backend: Backend, kept: KeptResponses) -> None:
        self._backend = backend
        self._kept = kept

    async def whole(self, body: ResponsesRequest) -> dict[str, Any]:
        """The whole response. Errors: ApiError, HotcoldError."""
        response = await self._response(body)
        answers = await response.start()
        try:
            async with aclosing(answers.events()) as events:
                async for _, event in events:
                    for _event in response.take(event):
                        pass
        finally:
            answers.close()
        return response.content

    async def count(self, body: ResponsesRequest) -> dict[str, Any]:
        """How many tokens the input has. Errors: ApiError, HotcoldError."""
        response = await self._response(body)
        (request,) = await response.requests()
        return {"object": "response.input_tokens", "input_tokens": len(request.prompt_ids or ())}

    async def _response(self, body: ResponsesRequest) -> _Response:
        """The response, which has not begun. Errors: ApiError."""
        previous = None
        if body.previous_response_id is not None:
            previous = self._kept.continued(body.previous_response_id)
        holders = {self._kept.holder(item_id) for item_id in body.references}
        # A conversation may be long, and a turn is short.
        return await asyncio.to_thread(
            _Response, self._backend, body, self._kept, previous, holders
        )

    async def stream(self, body: ResponsesRequest) -> sse.EventStream:
        """The response as events; it is queued.

        A conversation that is too long for the context is told by `response.failed`, as OpenAI
        does: by that event alone agents know that they have to shorten it.

        Errors:  ApiError, HotcoldError
        """
        response = await self._response(body)
        try:
            answers = await response.start()
        except PromptTooLongError as error:
            answers, refused = None, error
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
                if answers is None:
                    raise refused
                async with aclosing(answers.events()) as events:
                    async for _, event in events:
                        for piece in sent(response.take(event)):
                            yield piece
            except Exception as error:
                for piece in sent(response.failing(as_api_error(error))):
                    yield piece

        if answers is None:
            return sse.EventStream(pieces())
        return sse.EventStream(pieces(), answers.deadline, answers.close)


class _Response:
    """One response; `content` is its object so far."""

    def __init__(
        self,
        backend: Backend,
        body: ResponsesRequest,
        kept: KeptResponses,
        previous: Turn | None,
        holders: set[Turn],
    ) -> None:
        """It continues `previous`; `holders`: of the items that the input refers to.

        Errors:  ApiError 400
        """
        self._backend = backend
        self._kept = kept
        # Held by who keeps it alone: it may be forgotten while this one is answered.
        self._previous = None if previous is None else weakref.ref(previous)
        found = {item["id"]: item for turn in holders for item in turn.output}
        items = body.own_items(found)
        self._given = to_json(items) if body.store is not False else None
        earlier = [] if previous is None else [*previous.input, *previous.output]
        try:
            if earlier or found:
                body = body.of_items([*earlier, *items])
            self._chat: ChatRequest = body.as_chat()
        except ValidationError as error:
            raise refusal(error) from None
        self._forgets = body.truncation == "auto"
        reasoning = body.reasoning or ReasoningOptions()
        summary = reasoning.told_summary
        is_encoded = "reasoning.encrypted_content" in (body.include or ())
        self._output = Output(body.offered, summary is not None, is_encoded)
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
                tool.told() for tool in body.tools or () if not isinstance(tool, ForeignTool)
            ],
            "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "metadata": body.metadata or {},
            "previous_response_id": body.previous_response_id,
            "store": self._given is not None,
            "truncation": body.truncation or "disabled",
            "text": {"format": _format(body)},
            "reasoning": {"effort": reasoning.effort, "summary": summary},
            "background": False,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    async def start(self) -> Answers:
        """Queue the request. Errors: ApiError, HotcoldError."""
        answers = await self._backend.start(1, self.requests)
        self._num_prompt_tokens = len(answers.requests[0].prompt_ids or ())
        self._reader = AnswerReader(self._syntax)
        return answers

    async def requests(self) -> list[GenerateRequest]:
        """The request of its answer. Errors: PromptError, UsageError."""
        try:
            return await chat_requests(self._backend, self._chat)
        except PromptTooLongError:
            if not self._forgets:
                raise
        return await shortened(self._backend, self._chat)

    def opening(self) -> Iterator[Event]:
        """The events before the answer's own."""
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": {**self.content, "output": []}}

    def take(self, event: TokenEvent) -> Iterator[Event]:
        """Add an event of the system; yields the events of the stream."""
        yield from self._output.of(self._reader.push(event))
        if event.result is not None:
            status = "completed" if event.result.finish_reason == "stop" else "incomplete"
            yield from self._output.end(status)
            self._finish(status, event.result)
            yield {"type": f"response.{status}", "response": self.content}

    def failing(self, error: ApiError) -> Iterator[Event]:
        """The events of an answer that ends by an error."""
        self.content["status"] = "failed"
        code = error.code if error.code == TOO_LONG else "server_error"
        self.content["error"] = {"code": code, "message": error.message}
        yield {"type": "response.failed", "response": self.content}

    def _finish(self, status: str, result: Generation) -> None:
        asked, new = self._num_prompt_tokens, len(result.ids)
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
            "output_tokens_details": {"reasoning_tokens": result.num_thought_tokens},
            "total_tokens": asked + new,
        }
        previous = None if self._previous is None else self._previous()
        if previous is None and self._previous is not None:
            self.content["store"] = False  # what it continues has been forgotten meanwhile
        elif self._given is not None:
            turn = Turn(previous, self._given, self.content)
            self._kept.add(self.content["id"], turn)


def _format(body: ResponsesRequest) -> dict[str, Any]:
    wanted = body.text.format if body.text is not None else None
    if wanted is None:
        return {"type": "text"}
    return wanted.model_dump(by_alias=True, exclude_none=True)
