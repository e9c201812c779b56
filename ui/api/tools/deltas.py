"""What a stream says of an answer, event by event, as OpenAI's clients put it together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hotcold.actors.protocol.messages import TokenEvent
from hotcold.ui.api.tools.reader import Argued, Called, Part, Said, Thought
from hotcold.ui.api.tools.thoughts import AnswerReader


class Deltas:
    """Of one answer: what is thought, said and called, as it comes."""

    def __init__(self, reader: AnswerReader, as_functions: bool = False) -> None:
        """`as_functions`: a call is told in OpenAI's older way."""
        self._reader = reader
        self._as_functions = as_functions

    def of(self, event: TokenEvent) -> list[dict[str, Any]]:
        """The deltas of one event."""
        parts = self._reader.push(event.text, is_last=event.result is not None)
        deltas = [delta(part) for part in parts]
        return [_as_function(delta) for delta in deltas] if self._as_functions else deltas

    def finish_reason(self, reason: str) -> str:
        """A call ends an answer as `tool_calls`, unless it was cut off."""
        if reason != "stop" or not self._reader.num_calls:
            return reason
        return "function_call" if self._as_functions else "tool_calls"


def delta(part: Part) -> dict[str, Any]:
    """One part of an answer, as a stream says it."""
    match part:
        case Thought(text):
            return {"reasoning_content": text}
        case Said(text):
            return {"content": text}
        case Called(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case Argued(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _as_function(delta: dict[str, Any]) -> dict[str, Any]:
    calls = delta.get("tool_calls")
    return {"function_call": calls[0]["function"]} if calls else delta


def whole_message(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message of an answer, from all its deltas."""
    content, thought, calls = "", "", []
    function: dict[str, str] = {}
    for delta in deltas:
        content += delta.get("content", "")
        thought += delta.get("reasoning_content", "")
        for key, text in delta.get("function_call", {}).items():
            function[key] = function.get(key, "") + text
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append(
                    {key: call[key] for key in ("id", "type")}
                    | {"function": dict(call["function"])}
                )
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"content": content}
    if thought or calls or function:
        message["content"] = content or None
    told = {"reasoning_content": thought, "tool_calls": calls, "function_call": function}
    return message | {key: value for key, value in told.items() if value}
