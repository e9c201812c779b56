"""The items of one response, and the events of its stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hotcold.ui.api.responses.foreign import encoded
from hotcold.ui.api.responses.tools import FunctionTool, Offered
from hotcold.ui.api.tools.custom import InputReader
from hotcold.ui.api.tools.reader import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart

Event = dict[str, Any]


class _CallKind(NamedTuple):
    """How calls of one kind of tool are told."""

    item: str
    prefix: str  # of its id
    text: str  # the field of what the call gives
    event: str  # what its events begin with
    done: tuple[str, ...]  # fields of the last one


_CALLS = {
    "function": _CallKind(
        "function_call", "fc", "arguments", "response.function_call_arguments",
        ("arguments", "name"),
    ),
    "custom": _CallKind(
        "custom_tool_call", "ctc", "input", "response.custom_tool_call_input", ("input",)
    ),
}  # fmt: skip


class Output:
    """Reasoning, messages and calls, in order."""

    def __init__(
        self, tools: Mapping[str, Offered], is_summary: bool = False, is_encoded: bool = False
    ) -> None:
        """`tools` by flat name; `is_summary`: reasoning is told as its summary.

        `is_encoded`: also as `encrypted_content`, which clients send back.
        """
        self._tools = tools
        self._call = _CALLS["function"]  # the kind of the last one
        self._input = InputReader()  # of the last one
        self.items: list[dict[str, Any]] = []
        self._is_summary = is_summary
        self._is_encoded = is_encoded
        self._is_open = False  # the last item

    def of(self, parts: Iterable[Part]) -> Iterator[Event]:
        """Add the next parts; yields their events."""
        for part in parts:
            match part:
                case ReasoningPart(text):
                    if not self._is_open or self._last["type"] != "reasoning":
                        yield from self._begin_thoughts()
                    self._part["text"] += text
                    yield self._event(f"{self._thoughts}_text.delta", delta=text)
                case TextPart(text, _):
                    if not self._is_open or self._last["type"] != "message":
                        yield from self._begin_message()
                    self._part["text"] += text
                    yield self._event("response.output_text.delta", delta=text, logprobs=[])
                case CallPart(_, call_id, name):
                    called = self._tools.get(
                        name, Offered(FunctionTool(type="function", name=name))
                    )
                    yield from self._begin_call(call_id, called)
                case ArgumentsPart(_, text):
                    more = self._input.push(text) if self._call.text == "input" else text
                    self._last[self._call.text] += more
                    if more:
                        yield self._event(f"{self._call.event}.delta", delta=more)

    def end(self, status: str) -> Iterator[Event]:
        """End the answer; `status` of the last item: completed or incomplete."""
        if not self.items or (self._last["type"] == "reasoning" and status == "completed"):
            yield from self._begin_message()
        yield from self._close(status)

    @property
    def _last(self) -> dict[str, Any]:
        return self.items[-1]

    @property
    def _part(self) -> dict[str, Any]:
        """The one part of the last item."""
        part: dict[str, Any] = (self._last.get("content") or self._last["summary"])[0]
        return part

    @property
    def _thoughts(self) -> str:
        return "response.reasoning_summary" if self._is_summary else "response.reasoning"

    def _begin_thoughts(self) -> Iterator[Event]:
        if not self._is_summary:
            yield from self._begin("reasoning", "rs", {"summary": [], "content": []})
            self._last["content"].append({"type": "reasoning_text", "text": ""})
            return
        yield from self._begin("reasoning", "rs", {"summary": []})
        self._last["summary"].append({"type": "summary_text", "text": ""})
        yield self._event("response.reasoning_summary_part.added", part=dict(self._part))

    def _begin_message(self) -> Iterator[Event]:
        yield from self._begin("message", "msg", {"role": "assistant", "content": []})
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.content_part.added", part=dict(part))
        self._last["content"].append(part)

    def _begin_call(self, call_id: str, called: Offered) -> Iterator[Event]:
        yield from self._close("completed")  # by the kind of the one before
        self._call, self._input = _CALLS[called.tool.type], InputReader()
        call = {"call_id": call_id, "name": called.tool.name, self._call.text: ""}
        if called.namespace is not None:
            call["namespace"] = called.namespace
        yield from self._begin(self._call.item, self._call.prefix, call)

    def _begin(self, kind: str, prefix: str, fields: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        item_id = f"{prefix}_{uuid.uuid4().hex}"
        self.items.append({"type": kind, "id": item_id, "status": "in_progress", **fields})
        self._is_open = True
        yield {**self._item_event("response.output_item.added")}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        last = self._last
        last["status"] = status
        if last["type"] == "message":
            yield self._event("response.output_text.done", text=self._part["text"], logprobs=[])
            yield self._event("response.content_part.done", part=dict(self._part))
        elif last["type"] == "reasoning":
            yield self._event(f"{self._thoughts}_text.done", text=self._part["text"])
            if self._is_summary:
                yield self._event("response.reasoning_summary_part.done", part=dict(self._part))
            if self._is_encoded:
                last["encrypted_content"] = encoded(self._part["text"])
        else:
            done = {field: last[field] for field in self._call.done}
            yield self._event(f"{self._call.event}.done", **done)
        yield self._item_event("response.output_item.done")

    def _event(self, kind: str, **fields: Any) -> Event:
        """An event about the last item, or about the one part of a message."""
        about: Event = {"output_index": len(self.items) - 1, "item_id": self._last["id"]}
        if "call_id" not in self._last:
            about["summary_index" if "summary" in kind else "content_index"] = 0
        return {"type": kind, **about, **fields}

    def _item_event(self, kind: str) -> Event:
        item = dict(self._last)
        for parts in item.keys() & {"content", "summary"}:
            item[parts] = [dict(part) for part in item[parts]]
        return {"type": kind, "output_index": len(self.items) - 1, "item": item}
