"""Answers of /v1/responses, stored so that later ones continue them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic_core import to_json

from hotcold.actors.protocol.messages import Generation, TokenEvent
from hotcold.model.errors import PromptTooLongError
from hotcold.ui.api import sse
from hotcold.ui.api.answer import Answer, answer_of, usage
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.errors import TOO_LONG, ApiError, as_api_error
from hotcold.ui.api.responses.conversation import as_chat, offered, told
from hotcold.ui.api.responses.output import Event, Output
from hotcold.ui.api.responses.schemas import (
    ITEMS,
    MAX_ITEMS,
    Item,
    ReasoningOptions,
    Reference,
    ResponsesRequest,
    TextFormat,
)
from hotcold.ui.api.responses.stored import StoredResponse, StoredResponses
from hotcold.ui.api.routes import Route

# Fields of a request that its response tells again.
_SAID = (
    "instructions", "max_output_tokens", "temperature", "top_p", "tool_choice",
    "previous_response_id",
)  # fmt: skip


class Responses:
    """The routes, and the responses that are stored."""

    def __init__(self) -> None:
        self._stored = StoredResponses()
        self.routes = (
            Route("/v1/responses", ResponsesRequest, self.respond),
            Route("/v1/responses/input_tokens", ResponsesRequest, self.count),
        )

    async def respond(self, backend: Backend, body: ResponsesRequest) -> Response:
        """Answer a conversation of items, or the next turn of one, as OpenAI's responses do."""
        answer = await self._answer(backend, body)
        try:
            return await answer_of(answer, body.stream)
        except PromptTooLongError as error:
            if not body.stream:
                raise
            # As OpenAI does: by that event alone agents know that they have to shorten it.
            return sse.EventStream(answer.refused(error))

    async def count(self, backend: Backend, body: ResponsesRequest) -> dict[str, Any]:
        """How many tokens the input of such a request has; nothing is answered."""
        (one,) = await (await self._answer(backend, body)).requests()
        return {"object": "response.input_tokens", "input_tokens": len(one.prompt_ids or ())}

    async def _answer(self, backend: Backend, body: ResponsesRequest) -> ResponseAnswer:
        stored, last = self._stored, body.previous_response_id
        previous = None if last is None else stored.continued(last)
        referred = stored.own() if any(isinstance(one, Reference) for one in body.items) else []

        def made() -> ResponseAnswer:
            items = _conversation(previous, body.items, referred)
            return ResponseAnswer(backend, body, items, stored)

        return await asyncio.to_thread(made)  # a conversation may be long

    def add_stored(self, app: FastAPI) -> None:
        """Add the routes of stored responses to `app`."""

        @app.get("/v1/responses/{response_id}")
        async def stored_response(request: Request, response_id: str) -> Response:
            """A response that is stored."""
            for name in ("stream", "starting_after"):
                if request.query_params.get(name, "false") != "false":
                    raise ApiError(400, f"{name} is not supported here; leave it out", param=name)
            found = self._stored.found(response_id)
            return Response(found.response, media_type="application/json")

        @app.delete("/v1/responses/{response_id}")
        async def forget_response(response_id: str) -> dict[str, Any]:
            """Forget a response; those that continue it stay."""
            self._stored.remove(response_id)
            return {"id": response_id, "object": "response", "deleted": True}


class ResponseAnswer(Answer):
    """One response; `content` is its object so far."""

    def __init__(
        self, backend: Backend, body: ResponsesRequest, items: list[Item], stored: StoredResponses
    ) -> None:
        """`items`: the whole conversation; `stored`: where the response goes.

        Errors:  ApiError 400, ValidationError, PromptError without a tokenizer for its tools
        """
        tools = offered(body)
        super().__init__(backend, as_chat(body, items, tools))
        self.prompt = body.prompt_field
        self._stored = stored
        self._given = ITEMS.dump_json(items, by_alias=True, exclude_none=True)
        is_summary = body.reasoning is not None and body.reasoning.told_summary is not None
        is_encoded = "reasoning.encrypted_content" in (body.include or ())
        self._output = Output(tools, is_summary, is_encoded)
        self._num_written = 0
        self.content: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": backend.settings.model_name,
            "output": self._output.items,
            **_said_again(body),
            "truncation": "disabled",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    def opening(self) -> Iterable[Event]:
        """That it has begun."""
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": {**self.content, "output": []}}

    def take(self, index: int, event: TokenEvent) -> Iterator[Event]:
        """Take the next event of the system."""
        yield from self._output.of(self._readers[0].push(event))
        if event.result is not None:
            is_cut = event.result.finish_reason != "stop"
            self.content |= {
                "status": "incomplete" if is_cut else "completed",
                "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
                "usage": _usage(event.result),
            }
            yield from self._output.end(self.content["status"])

    def closing(self) -> Iterable[Event]:
        """The whole response, which is stored now."""
        if self.content["store"]:
            ids = frozenset(item["id"] for item in self._output.items)
            one = StoredResponse(self._given, to_json(self.content), ids)
            self._stored.add(self.content["id"], one)
        return [{"type": f"response.{self.content['status']}", "response": self.content}]

    def failing(self, error: ApiError) -> Iterable[Event]:
        """The last event of an answer that fails."""
        self.content["status"] = "failed"
        code = error.code if error.code == TOO_LONG else "server_error"
        self.content["error"] = {"code": code, "message": error.message}
        return [{"type": "response.failed", "response": self.content}]

    async def refused(self, error: Exception) -> AsyncGenerator[bytes, None]:
        """The stream of a response that cannot begin."""
        for event in (*self.opening(), *self.failing(as_api_error(error))):
            yield self.written(event)

    def written(self, piece: Event) -> bytes:
        """An event with its number."""
        self._num_written += 1
        numbered = {**piece, "sequence_number": self._num_written - 1}
        return sse.event(numbered, piece["type"])

    def whole(self) -> dict[str, Any]:
        """The response."""
        return self.content


def _said_again(body: ResponsesRequest) -> dict[str, Any]:
    """The fields of a request that its response tells, with what holds where they are missing."""
    shape = (body.text and body.text.format) or TextFormat(type="text")
    reasoning = body.reasoning or ReasoningOptions()
    said = body.model_dump(include=set(_SAID))
    return {
        **said,
        "tools": list(told(body.tools or ())),
        "tool_choice": said["tool_choice"] or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "metadata": body.metadata or {},
        "store": body.store is not False,
        "text": {"format": shape.model_dump(by_alias=True, exclude_none=True)},
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.told_summary},
    }


def _usage(result: Generation) -> dict[str, Any]:
    """Token counts by the names that they have here."""
    counts = usage([result], 1)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": result.num_thought_tokens},
        "total_tokens": counts["total_tokens"],
    }


def _conversation(
    previous: StoredResponse | None, own: Sequence[Item], referred: Sequence[StoredResponse]
) -> list[Item]:
    """All items: those of earlier turns, and the request's own with what they refer to.

    Errors:  ApiError 400 for too many, 404 for a reference to none; ValidationError
    """
    found: list[Item] = []
    if previous is not None:
        found += ITEMS.validate_json(previous.items)
        found += ITEMS.validate_python(previous.output)
    wanted = {item.id for item in own if isinstance(item, Reference)}
    stored = {item["id"]: item for one in referred if wanted & one.item_ids for item in one.output}
    for item in own:
        if isinstance(item, Reference):
            if item.id not in stored:
                text = f"Item with id {item.id[:100]!a} not found; send the item itself."
                raise ApiError(404, text, param="input")
            found += ITEMS.validate_python([stored[item.id]])
        else:
            found.append(item)
    if len(found) > MAX_ITEMS:
        text = f"the conversation has {len(found)} items; send at most {MAX_ITEMS}"
        raise ApiError(400, text, param="input")
    return found
