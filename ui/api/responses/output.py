"""The items of one response, and the events of its stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hotcold.ui.api.responses.conversation import Offered, encoded
from hotcold.ui.api.responses.schemas import FunctionTool
from hotcold.ui.api.tools.reader import ArgumentsPart, CallPart, Part, ReasoningPart, TextPart

Event = dict[str, Any]


class _Kind(NamedTuple):
    """How items of one kind are told."""

    item: str
    prefix: str  # of its id
    field: str  # of the item: its text, or the list of the part that has it
    events: str  # what those of its text begin with
    part: Event | None = None  # the part, without its text
    part_events: str = ""  # what those of the part begin with
    place: str = ""  # the events' field that tells the part's place


_TEXT = {"type": "output_text", "annotations": [], "logprobs": []}
_KINDS = {
    "message": _Kind(
        "message", "msg", "content", "output_text", _TEXT, "content_part", "content_index"
    ),
    "reasoning": _Kind(
        "reasoning", "rs", "content", "reasoning_text", {"type": "reasoning_text"}, "",
        "content_index",
    ),
    "summary": _Kind(
        "reasoning", "rs", "summary", "reasoning_summary_text", {"type": "summary_text"},
        "reasoning_summary_part", "summary_index",
    ),
    "function": _Kind("function_call", "fc", "arguments", "function_call_arguments"),
    "custom": _Kind("custom_tool_call", "ctc", "input", "custom_tool_call_input"),
}  # fmt: skip


class Output:
    """Reasoning, messages and calls, in order."""

    def __init__(self, tools: Mapping[str, Offered], is_summary: bool, is_encoded: bool) -> None:
        """`tools` by flat name; `is_summary`: reasoning is told as its summary.

        `is_encoded`: also as `encrypted_content`, which clients send back.
        """
        self.items: list[dict[str, Any]] = []
        self._tools = tools
        self._thoughts = "summary" if is_summary else "reasoning"
        self._is_encoded = is_encoded
        self._kind: _Kind | None = None  # of the last item while it is open
        self._texts: list[str] = []  # of that item

    def of(self, parts: Iterable[Part]) -> Iterator[Event]:
        """Add the next parts; yields their events."""
        for part in parts:
            match part:
                case ReasoningPart(text):
                    if self._kind is not _KINDS[self._thoughts]:
                        yield from self._begin(self._thoughts, summary=[])
                case TextPart(text):
                    if self._kind is not _KINDS["message"]:
                        yield from self._begin("message", role="assistant")
                case CallPart(_, call_id, name):
                    other = Offered(FunctionTool(type="function", name=name))
                    called = self._tools.get(name, other)
                    about = {"call_id": call_id, "name": called.tool.name}
                    if called.namespace is not None:
                        about["namespace"] = called.namespace
                    yield from self._begin(called.tool.type, **about)
                    continue
                case ArgumentsPart(_, text):
                    pass
            self._texts.append(text)
            yield self._event("delta", delta=text)

    def end(self, status: str) -> Iterator[Event]:
        """End the answer; `status` of the last item: completed or incomplete."""
        is_thought = bool(self.items) and self.items[-1]["type"] == "reasoning"
        if not self.items or (is_thought and status == "completed"):
            yield from self._begin("message", role="assistant")
        yield from self._close(status)

    def _begin(self, which: str, **about: Any) -> Iterator[Event]:
        yield from self._close("completed")
        self._kind = kind = _KINDS[which]
        item_id = f"{kind.prefix}_{uuid.uuid4().hex}"
        item = {"type": kind.item, "id": item_id, "status": "in_progress", **about}
        self._texts = []
        item[kind.field] = "" if kind.part is None else []
        self.items.append(item)
        yield self._item_event("added")
        if kind.part_events:
            yield self._about(f"{kind.part_events}.added", part={**(kind.part or {}), "text": ""})

    def _close(self, status: str) -> Iterator[Event]:
        if self._kind is None:
            return
        kind, item, text = self._kind, self.items[-1], "".join(self._texts)
        part = None if kind.part is None else {**kind.part, "text": text}
        item |= {"status": status, kind.field: text if part is None else [part]}
        if kind.item == "reasoning" and self._is_encoded:
            item["encrypted_content"] = encoded(text)
        done = {kind.field if part is None else "text": text}
        yield self._event("done", **done, **({"name": item["name"]} if kind.prefix == "fc" else {}))
        if kind.part_events:
            yield self._about(f"{kind.part_events}.done", part=part)
        yield self._item_event("done")
        self._kind = None

    def _event(self, kind: str, **fields: Any) -> Event:
        """An event about the text of the last item."""
        if self._kind is _KINDS["message"]:
            fields["logprobs"] = []
        return self._about(f"{self._kind.events if self._kind else ''}.{kind}", **fields)

    def _about(self, kind: str, **fields: Any) -> Event:
        place = {self._kind.place: 0} if self._kind and self._kind.place else {}
        about = {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"], **place}
        return {"type": f"response.{kind}", **about, **fields}

    def _item_event(self, kind: str) -> Event:
        place = len(self.items) - 1
        return {"type": f"response.output_item.{kind}", "output_index": place,
                "item": dict(self.items[-1])}  # fmt: skip
