"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from hotcold.actors.protocol.messages import TokenEvent
from hotcold.ui.api import sse
from hotcold.ui.api.answer import Answer, collect, usage
from hotcold.ui.api.backend import Answers
from hotcold.ui.api.logprobs import chat_logprobs, content_tokens
from hotcold.ui.api.requests import chat_requests
from hotcold.ui.api.route import Route
from hotcold.ui.api.schemas import ChatRequest
from hotcold.ui.api.tools.custom import InputReader
from hotcold.ui.api.tools.reader import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart
from hotcold.ui.api.tools.thoughts import AnswerReader, Thoughts


class Deltas:
    """The deltas of one answer: reasoning, content and tool calls."""

    def __init__(
        self, reader: AnswerReader, as_functions: bool = False, customs: Collection[str] = ()
    ) -> None:
        """`as_functions`: calls as OpenAI's older `function_call`; `customs`: custom tools."""
        self._reader = reader
        self._as_functions = as_functions
        self._customs = customs
        self._inputs: dict[int, InputReader] = {}  # by the number of their call

    def of(self, event: TokenEvent) -> list[dict[str, Any]]:
        """The deltas of one event."""
        parts = self._reader.push(event.text, is_last=event.result is not None)
        deltas = [found for part in parts if (found := self._delta(part))]
        return [_as_function(delta) for delta in deltas] if self._as_functions else deltas

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
        case TextPart(text):
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
        choices = await asyncio.to_thread(self._choices, body, started, answers)
        counts = await asyncio.to_thread(self._usage, body, started, answers)
        return {**self._head("chatcmpl", "chat.completion"), "choices": choices, "usage": counts}

    def _choices(
        self, body: ChatRequest, started: Answers, answers: Sequence[Answer]
    ) -> list[dict[str, Any]]:
        silent = self._silent(body)
        return [
            {
                "index": index,
                "message": {"role": "assistant", "refusal": None, **message},
                "logprobs": self._logprobs(body, silent, answer),
                "finish_reason": finish_reason,
            }
            | ({"token_ids": answer.ids} if body.return_token_ids else {})
            for index, answer in enumerate(answers)
            for message, finish_reason in [self._message(body, started, answer)]
        ]

    async def stream(self, body: ChatRequest) -> sse.EventStream:
        """The answer as events; it is queued. Errors: ApiError, HotcoldError."""
        started = await self._start(body)

        def choice(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
            empty = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            return empty | more

        all_deltas = [self._deltas(body, started) for _ in range(body.n or 1)]
        silent = self._silent(body)

        def choices_of(index: int, event: TokenEvent) -> Iterator[dict[str, Any]]:
            logprobs = self._logprobs(body, silent, event)
            deltas = all_deltas[index].of(event)
            if event.logprobs and not deltas:
                deltas = [{"content": ""}]
            for delta in deltas:
                yield choice(index, delta, logprobs=logprobs)
                logprobs = None
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

    def _thoughts(self, started: Answers) -> Thoughts | None:
        prompt_ids = started.requests[0].prompt_ids or ()
        return Thoughts.of(self._backend.prompts.tokenizer, prompt_ids)

    def _deltas(self, body: ChatRequest, started: Answers) -> Deltas:
        syntax = self._backend.call_syntax if body.callable else None
        customs = [one.function.name for one in body.tools or () if one.type == "custom"]
        reader = AnswerReader(self._thoughts(started), syntax)
        return Deltas(reader, bool(body.functions), customs)

    def _usage(
        self, body: ChatRequest, started: Answers, answers: Sequence[Answer]
    ) -> dict[str, Any]:
        counts = usage(started.requests, answers, body.n or 1)
        if (thoughts := self._thoughts(started)) is None:
            return counts
        num_thought = sum(thoughts.num_tokens(answer.ids) for answer in answers)
        return {**counts, "completion_tokens_details": {"reasoning_tokens": num_thought}}

    def _message(
        self, body: ChatRequest, started: Answers, answer: Answer
    ) -> tuple[dict[str, Any], str]:
        """The message and its finish reason."""
        deltas = self._deltas(body, started)
        message = whole_message(deltas.of(TokenEvent(text=answer.text, result=answer.result)))
        return message, deltas.finish_reason(answer.finish_reason)

    def _silent(self, body: ChatRequest) -> frozenset[int]:
        """The tokens that end an answer and are no content."""
        drawn = body.drawn()
        stops = () if drawn["include_stop_str_in_output"] else drawn["stop_token_ids"] or ()
        return self._backend.eos_ids.union(stops)

    def _logprobs(
        self, body: ChatRequest, silent: frozenset[int], event: TokenEvent | Answer
    ) -> dict[str, Any] | None:
        if not body.logprobs:
            return None
        return chat_logprobs(self._texts, content_tokens(event, silent))
