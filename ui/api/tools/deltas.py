"""What a stream says of an answer, event by event, as OpenAI's clients put it together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actors.protocol.messages import TokenEvent
from model.text.tools import CallSyntax
from ui.api.tools.reader import Argued, Called, CallReader, Part, Said


class Deltas:
    """Of an answer that may call nothing: its text."""

    def of(self, event: TokenEvent) -> list[dict[str, Any]]:
        """The deltas of one event."""
        return [{"content": event.text}] if event.text else []

    def finish_reason(self, reason: str) -> str:
        """Why the answer ended, given what the system says."""
        return reason


class CallDeltas(Deltas):
    """Of an answer that may call tools: its text and its calls, as they come."""

    def __init__(self, syntax: CallSyntax) -> None:
        self._reader = CallReader(syntax)

    def of(self, event: TokenEvent) -> list[dict[str, Any]]:
        """The deltas of one event."""
        parts = self._reader.push(event.text, is_last=event.result is not None)
        return [delta(part) for part in parts]

    def finish_reason(self, reason: str) -> str:
        """A call ends an answer as `tool_calls`, unless it was cut off."""
        return "tool_calls" if reason == "stop" and self._reader.num_calls else reason


def delta(part: Part) -> dict[str, Any]:
    """One part of an answer, as a stream says it."""
    match part:
        case Said(text):
            return {"content": text}
        case Called(index, call_id, name):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call]}
        case Argued(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def whole_message(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """`content` and `tool_calls` of an answer, from all its deltas."""
    content, calls = "", []
    for delta in deltas:
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append(
                    {key: call[key] for key in ("id", "type")}
                    | {"function": dict(call["function"])}
                )
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    if not calls:
        return {"content": content}
    return {"content": content or None, "tool_calls": calls}
