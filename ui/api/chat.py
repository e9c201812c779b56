"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from starlette.responses import Response

from hotcold.actors.protocol.messages import TokenEvent
from hotcold.ui.api.answer import answer_of
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.completions import Choice, ChoicesAnswer
from hotcold.ui.api.schemas import ChatRequest
from hotcold.ui.api.tools.reader import AnswerReader, CallPart, Part, ReasoningPart, TextPart

_GIVEN = {"function": "arguments", "custom": "input"}  # what calls of each kind give


async def chat(backend: Backend, body: ChatRequest) -> Response:
    """Answer a conversation, as OpenAI's chat completions do."""
    return await answer_of(ChatAnswer(backend, body), body.stream)


class ChatAnswer(ChoicesAnswer):
    """The answer to a request of /v1/chat/completions."""

    kinds = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def __init__(self, backend: Backend, body: ChatRequest) -> None:
        super().__init__(backend, body)
        self._body = body

    def opening(self) -> Iterable[Any]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return [self.chunk([_choice(index, delta)]) for index in range(self._count)]

    def choices(self, index: int, event: TokenEvent) -> Iterator[Choice]:
        """The deltas of one event."""
        reader = self._readers[index]
        for part in reader.push(event):
            scored = self._logprobs(part.logprobs) if isinstance(part, TextPart) else None
            yield _choice(index, _delta(part, reader), logprobs=scored)
        if event.result is not None:
            yield _choice(index, {}, **self._end(index))

    def whole_choice(self, index: int) -> Choice:
        """A choice of the whole answer."""
        reader = self._readers[index]
        message: dict[str, Any] = {"role": "assistant", "refusal": None, "content": reader.said}
        if reader.thought or reader.calls:
            message["content"] = reader.said or None
        if reader.thought:
            message["reasoning_content"] = reader.thought
        if reader.calls:
            message["tool_calls"] = [_call(call, call.arguments) for call in reader.calls]
        logprobs = self._logprobs(reader.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs, **self._end(index)}

    def _logprobs(self, content: Any) -> dict[str, Any] | None:
        return {"content": content, "refusal": None} if self._body.logprobs else None

    def _end(self, index: int) -> dict[str, Any]:
        """How a choice ended. A call ends an answer as `tool_calls`, unless it was cut off."""
        result = self._results[index]
        is_call = result.finish_reason == "stop" and self._readers[index].calls
        more = {"token_ids": result.ids} if self._body.return_token_ids else {}
        return {"finish_reason": "tool_calls" if is_call else result.finish_reason, **more}

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts of all, with those of thoughts where the model thinks."""
        counts = super().usage
        if not self._backend.thinks:
            return counts
        num_thought = sum(result.num_thought_tokens for result in self._results.values())
        return {**counts, "completion_tokens_details": {"reasoning_tokens": num_thought}}


def _delta(part: Part, reader: AnswerReader) -> dict[str, Any]:
    """What a stream tells of a part."""
    match part:
        case ReasoningPart(text):
            return {"reasoning_content": text}
        case TextPart(text):
            return {"content": text}
        case CallPart():
            call = _call(part, "")
        case _:
            kind = _kind(reader.calls[part.number])
            call = {kind: {_GIVEN[kind]: part.text}}
    return {"tool_calls": [{"index": part.number, **call}]}


def _kind(call: CallPart) -> str:
    return "custom" if call.is_custom else "function"


def _call(call: CallPart, given: str) -> dict[str, Any]:
    kind = _kind(call)
    return {"id": call.id, "type": kind, kind: {"name": call.name, _GIVEN[kind]: given}}


def _choice(index: int, delta: dict[str, Any], **more: Any) -> Choice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
