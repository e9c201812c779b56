"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hotcold.actors.protocol.messages import GenerateRequest, TokenEvent
from hotcold.ui.api.answer import reader_of, usage
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.completions import Choice, ChoicesAnswer
from hotcold.ui.api.requests import chat_requests
from hotcold.ui.api.schemas import ChatRequest
from hotcold.ui.api.tools.reader import (
    AnswerReader,
    ArgumentsPart,
    CallPart,
    Part,
    ReasoningPart,
    TextPart,
)

_GIVEN = {"function": "arguments", "custom": "input"}  # what calls of each kind give


class ChatAnswer(ChoicesAnswer):
    """The answer to a request of /v1/chat/completions."""

    prompt = "messages"
    kinds = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def __init__(self, backend: Backend, body: ChatRequest) -> None:
        """Errors:  PromptError without a tokenizer for its tools"""
        super().__init__(backend, body, body.n or 1)
        self._body = body
        self._messages = [
            _Message(reader_of(backend, body, body.logprobs)) for _ in range(self._count)
        ]

    async def requests(self) -> list[GenerateRequest]:
        """A request for each answer. Errors: PromptError, UsageError."""
        self._requests = made = await chat_requests(self._backend, self._body)
        return made

    def opening(self) -> Iterable[Any]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return [self.chunk([_choice(index, delta)]) for index in range(self._count)]

    def choices(self, index: int, event: TokenEvent) -> Iterator[Choice]:
        """The deltas of one event."""
        message = self._messages[index]
        for part in message.reader.push(event):
            delta, scored = message.delta(part), None
            if self._body.logprobs and isinstance(part, TextPart):
                scored = {"content": part.logprobs, "refusal": None}
            yield _choice(index, delta, logprobs=scored)
        if event.result is not None:
            yield _choice(index, {}, **self._end(index))

    def whole_choice(self, index: int) -> Choice:
        """A choice of the whole answer."""
        message = self._messages[index]
        return {
            "index": index,
            "message": message.whole,
            "logprobs": (
                {"content": message.logprobs, "refusal": None} if self._body.logprobs else None
            ),
            **self._end(index),
        }

    def _end(self, index: int) -> dict[str, Any]:
        """How a choice ended. A call ends an answer as `tool_calls`, unless it was cut off."""
        result, message = self._results[index], self._messages[index]
        reason = result.finish_reason
        if reason == "stop" and message.reader.num_calls:
            reason = "tool_calls"
        more = {"token_ids": result.ids} if self._body.return_token_ids else {}
        return {"finish_reason": reason, **more}

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts of all, with those of thoughts where the model thinks."""
        results, tokenizer = self._in_order, self._backend.prompts.tokenizer
        counts = usage(self._requests, results, self._count)
        if tokenizer is None or tokenizer.thinking is None:
            return counts
        num_thought = sum(result.num_thought_tokens for result in results)
        return {**counts, "completion_tokens_details": {"reasoning_tokens": num_thought}}


class _Message:
    """The message of one choice so far."""

    def __init__(self, reader: AnswerReader) -> None:
        self.reader = reader
        self.logprobs: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def delta(self, part: Part) -> dict[str, Any]:
        """Add a part; returns what a stream tells of it."""
        match part:
            case ReasoningPart(text):
                self._thoughts.append(text)
                return {"reasoning_content": text}
            case TextPart(text):
                self._texts.append(text)
                self.logprobs += part.logprobs
                return {"content": text}
            case CallPart(number, call_id, name, is_custom):
                kind = "custom" if is_custom else "function"
                called = {"name": name, _GIVEN[kind]: ""}
                call: dict[str, Any] = {"id": call_id, "type": kind, kind: called}
                self._calls.append({**call, kind: dict(called)})
            case ArgumentsPart(number, text):
                kind = self._calls[number]["type"]
                call = {kind: {_GIVEN[kind]: text}}
                self._calls[number][kind][_GIVEN[kind]] += text
        return {"tool_calls": [{"index": number, **call}]}

    @property
    def whole(self) -> dict[str, Any]:
        """All of it."""
        content, thought = "".join(self._texts), "".join(self._thoughts)
        message = {"role": "assistant", "refusal": None, "content": content}
        if thought or self._calls:
            message["content"] = content or None
        found = {"reasoning_content": thought, "tool_calls": self._calls}
        return message | {key: value for key, value in found.items() if value}


def _choice(index: int, delta: dict[str, Any], **more: Any) -> Choice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
