"""The items of a conversation in /v1/responses, and the same as messages of a chat.

A session goes on whatever its history holds: items of other servers' tools, and those that nobody
here knows, are passed over.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from hotcold.ui.api.fields import StrictModel
from hotcold.ui.api.parts import Declined, LeftOut, text_of
from hotcold.ui.api.responses.tools import flat_name
from hotcold.ui.api.tools.schemas import arguments_of

MAX_ITEMS = 10_000
_ENCODED = "text:"  # what `encrypted_content` of this server begins with
Message = dict[str, Any]


class _Item(StrictModel):
    """An item of a conversation."""

    def message(self) -> Message | None:
        """The message of a chat; None where it has none of its own."""
        return None


class InputText(StrictModel):
    """A part of a message or of a tool's result."""

    type: Literal["input_text", "output_text", "text"]
    text: str


_Text = str | Annotated[list[InputText | Declined | LeftOut], Field(fail_fast=True)]


class InputMessage(_Item):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Text

    def message(self) -> Message | None:
        """The message of a chat."""
        return {"role": self.role, "content": text_of(self.content)}


class AgentMessage(_Item):
    """What one of Codex's agents tells another."""

    type: Literal["agent_message"]
    content: _Text | None = None

    def message(self) -> Message | None:
        """The message of a chat: the user's."""
        return {"role": "user", "content": text_of(self.content)}


class InputCall(_Item):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str

    def message(self) -> Message | None:
        """The message of a chat."""
        name = flat_name(self.namespace, self.name)
        function = {"name": name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class CustomCall(_Item):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str

    def message(self) -> Message | None:
        """As that of the function by which models call it."""
        return InputCall(
            type="function_call", call_id=self.call_id, name=self.name, namespace=self.namespace,
            arguments=arguments_of(self.input),
        ).message()  # fmt: skip


class InputResult(_Item):
    """A call's result."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    output: _Text

    def message(self) -> Message | None:
        """The message of a chat."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": text_of(self.output)}


class Reasoning(_Item):
    """Reasoning before the next item, or its summary."""

    type: Literal["reasoning"]
    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None

    @property
    def thought(self) -> str:
        """Its text, of whichever field has it."""
        if not self.content and (own := decoded(self.encrypted_content)):
            return own
        parts = self.content or self.summary or ()
        return "".join(str(part.get("text", "")) for part in parts)


class Reference(_Item):
    """In place of an item of a kept response."""

    type: Literal["item_reference"]
    id: Annotated[str, Field(min_length=1)]


class OtherItem(_Item):
    """An item that is passed over."""

    type: str = Field(max_length=100)


_TAGS = {
    "message": "Message", "agent_message": "Agent", "function_call": "Call",
    "custom_tool_call": "Custom", "function_call_output": "Result",
    "custom_tool_call_output": "Result", "reasoning": "Reasoning", "item_reference": "Reference",
}  # fmt: skip


def _kind_of_item(given: Any) -> str:
    of = given.get if isinstance(given, dict) else lambda name, other: getattr(given, name, other)
    kind = of("type", "message")
    return _TAGS.get(kind, "Other") if isinstance(kind, str) else "Message"


Item = Annotated[
    Annotated[InputMessage, Tag("Message")]
    | Annotated[AgentMessage, Tag("Agent")]
    | Annotated[InputCall, Tag("Call")]
    | Annotated[CustomCall, Tag("Custom")]
    | Annotated[InputResult, Tag("Result")]
    | Annotated[Reasoning, Tag("Reasoning")]
    | Annotated[Reference, Tag("Reference")]
    | Annotated[OtherItem, Tag("Other")],
    Discriminator(_kind_of_item),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def encoded(thought: str) -> str:
    """Reasoning as `encrypted_content`: so written that it comes back whole, but not secret."""
    return _ENCODED + base64.b64encode(thought.encode(errors="replace")).decode()


def decoded(content: str | None) -> str:
    """The reasoning in `encrypted_content`; empty where another server wrote it."""
    if content is None or not content.startswith(_ENCODED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_ENCODED), validate=True).decode()
    except ValueError:
        return ""


def messages_of(instructions: str | None, items: list[Item]) -> list[Message]:
    """Instructions, then the conversation.

    What an assistant says and calls until a result comes, or another's message, is one message. The
    results of its calls follow it, wherever they stand.
    """
    turns: list[list[Message]] = []  # a message, and the results of its calls
    turn_of: dict[str | None, list[Message]] = {}  # by a call's id
    thought = ""
    for item in items:
        message, thought_before = item.message(), thought
        thought = item.thought if isinstance(item, Reasoning) else ""
        if message is None:
            continue
        if message.get("tool_call_id") in turn_of:
            turn_of[message["tool_call_id"]].append(message)
            continue
        texts, calls = [message["content"]], message.get("tool_calls", [])
        is_answer = message["role"] == "assistant"
        if is_answer and turns and len(turns[-1]) == 1 and turns[-1][0]["role"] == "assistant":
            message = turns[-1][0]
            message["content"] += texts
            message["tool_calls"] += calls
        else:
            message |= {"content": texts} | ({"tool_calls": calls} if is_answer else {})
            turns.append([message])
        if is_answer and thought_before:
            message.setdefault("reasoning_content", thought_before)
        turn_of |= {call["id"]: turns[-1] for call in calls}
    for message, *_ in turns:
        message["content"] = "\n".join(filter(None, message["content"]))
        if not message.get("tool_calls", True):
            del message["tool_calls"]
    opening = [{"role": "system", "content": instructions}] if instructions else []
    return [*opening, *(message for turn in turns for message in turn)]
