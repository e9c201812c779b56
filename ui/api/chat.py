"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from hotcold.actors.protocol.messages import TokenEvent
from hotcold.ui.api import sse
from hotcold.ui.api.answer import Answer, collect, usage
from hotcold.ui.api.backend import Answers
from hotcold.ui.api.logprobs import ContentLogprobs
from hotcold.ui.api.requests import chat_requests
from hotcold.ui.api.route import Route
from hotcold.ui.api.schemas import ChatRequest
from hotcold.ui.api.tools.custom import InputReader
from hotcold.ui.api.tools.reader import (
    AnswerReader,
    ArgumentsPart,
    CallPart,
    Part,
    ReasoningPart,
    TextPart,
)

Logprobs = dict[str, Any] | None


class Deltas:
    """The deltas of one answer: reasoning, content and tool calls."""

    def __init__(
        self,
        reader: AnswerReader,
        as_functions: bool,
        customs: Collection[str],
        scored: ContentLogprobs | None,
    ) -> None:
        """`as_functions`: calls as OpenAI's older `function_call`; `customs`: custom tools.

        `scored` None: no logprobs.
        """
        self._reader = reader
        self._as_functions = as_functions
        self._customs = customs
        self._scored = scored
        self._inputs: dict[int, InputReader] = {}  # by the number of their call

    def of(self, event: TokenEvent) -> Iterator[tuple[dict[str, Any], Logprobs]]:
        """The deltas of one event, with the logprobs of content."""
        if self._scored is not None:
            self._scored.add(event)
        for part in self._reader.push(event):
            logprobs = None
            if self._scored is not None and isinstance(part, TextPart):
                logprobs = self._scored.of(part)
            if found := self._delta(part):
                yield _as_function(found) if self._as_functions else found, logprobs

    def _delta(self, part: Part) -> dict[str, Any]:
        """The delta of one part; empty where nothing of a custom tool's input is certain yet."""
        match part:
            case CallPart(index, call_id, name) if name in self._customs:
                self._inputs[index] = InputReader()
                custom = {"name": name, "input": ""}
                call = {"index": index, "id": call_id, "type": "custom", "custom": custom}
                return {"tool_calls": [call]}
            case ArgumentsPart(index, text) if index in self._inputs:
                more = self._inputs[index].push(text)
                return {"tool_calls": [{"index": index, "custom": {"input": more}}]} if more else {}
        return delta(part)

    def finish_reason(self, reason: str) -> str:
        """A call ends an answer as `tool_calls`, unless it was cut off."""
        if reason != "stop" or not self._reader.num_calls:
            return reason
        return "function_call" if self._as_functions else "tool_calls"


def delta(part: Part) -> dict[str, Any]:
    """The delta of one part."""
    match part:
        case ReasoningPart(text):
            return {"reasoning_content": text}
        case TextPart(text, _):
            return {"content": text}
        case CallPart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case ArgumentsPart(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _as_function(delta: dict[str, Any]) -> dict[str, Any]:
    calls = delta.get("tool_calls")
    return {"function_call": calls[0]["function"]} if calls else delta


def whole_message(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message of an answer, joined from its deltas."""
    content, thought, calls = "", "", []
    function: dict[str, str] = {}
    for delta in deltas:
        content += delta.get("content", "")
        thought += delta.get("reasoning_content", "")
        for key, text in delta.get("function_call", {}).items():
            function[key] = function.get(key, "") + text
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                kind = call["type"]
                calls.append({"id": call["id"], "type": kind, kind: dict(call[kind])})
            else:
                called = calls[-1][calls[-1]["type"]]
                for key, text in call[calls[-1]["type"]].items():
                    called[key] += text
    message: dict[str, Any] = {"content": content}
    if thought or calls or function:
        message["content"] = content or None
    found = {"reasoning_content": thought, "tool_calls": calls, "function_call": function}
    return message | {key: value for key, value in found.items() if value}


class ChatRoute(Route):
    """The answers of /v1/chat/completions."""

    prompt = "messages"

    async def whole(self, body: ChatRequest) -> dict[str, Any]:
        """The whole answer. Errors: ApiError, HotcoldError."""
        started = await self._start(body)
        answers = await collect(started)
        choices = await asyncio.to_thread(self._choices, body, answers)
        counts = self._usage(body, started, answers)
        return {**self._head("chatcmpl", "chat.completion"), "choices": choices, "usage": counts}

    def _choices(self, body: ChatRequest, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        return [self._choice(body, index, answer) for index, answer in enumerate(answers)]

    def _choice(self, body: ChatRequest, index: int, answer: Answer) -> dict[str, Any]:
        deltas = self._deltas(body)
        found = list(deltas.of(answer.event))
        message = whole_message(delta for delta, _ in found)
        content = [one for _, logprobs in found if logprobs for one in logprobs["content"]]
        return {
            "index": index,
            "message": {"role": "assistant", "refusal": None, **message},
            "logprobs": {"content": content, "refusal": None} if body.logprobs else None,
            "finish_reason": deltas.finish_reason(answer.finish_reason),
        } | ({"token_ids": answer.ids} if body.return_token_ids else {})

    async def stream(self, body: ChatRequest) -> sse.EventStream:
        """The answer as events; it is queued. Errors: ApiError, HotcoldError."""
        started = await self._start(body)

        def choice(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
            empty = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            return empty | more

        all_deltas = [self._deltas(body) for _ in range(body.n or 1)]

        def choices_of(index: int, event: TokenEvent) -> Iterator[dict[str, Any]]:
            for delta, logprobs in all_deltas[index].of(event):
                yield choice(index, delta, logprobs=logprobs)
            if event.result is not None:
                more = {"token_ids": event.result.ids} if body.return_token_ids else {}
                reason = all_deltas[index].finish_reason(event.result.finish_reason)
                yield choice(index, {}, finish_reason=reason, **more)

        return self._chunks(
            body,
            started,
            self._head("chatcmpl", "chat.completion.chunk"),
            choices_of,
            lambda answers: self._usage(body, started, answers),
            [choice(i, {"role": "assistant", "content": ""}) for i in range(body.n or 1)],
        )

    async def _start(self, body: ChatRequest) -> Answers:
        return await self._backend.start(body.n or 1, lambda: chat_requests(self._backend, body))

    def _deltas(self, body: ChatRequest) -> Deltas:
        syntax = self._backend.call_syntax if body.callable else None
        customs = [one.function.name for one in body.tools or () if one.type == "custom"]
        scored = ContentLogprobs(self._texts) if body.logprobs else None
        return Deltas(AnswerReader(syntax), bool(body.functions), customs, scored)

    def _usage(
        self, body: ChatRequest, started: Answers, answers: Sequence[Answer]
    ) -> dict[str, Any]:
        counts = usage(started.requests, answers, body.n or 1)
        tokenizer = self._backend.prompts.tokenizer
        if tokenizer is None or tokenizer.thinking is None:
            return counts
        num_thought = sum(answer.whole.num_thought_tokens for answer in answers)
        return {**counts, "completion_tokens_details": {"reasoning_tokens": num_thought}}
