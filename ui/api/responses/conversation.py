"""The items of a conversation in /v1/responses, and the same as messages of a chat."""

import uuid
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from hotcold.ui.api.fields import StrictModel
from hotcold.ui.api.parts import Declined, LeftOut, text_of
from hotcold.ui.api.responses.foreign import ForeignItem, Message, called_by
from hotcold.ui.api.responses.tools import flat_name

MAX_ITEMS = 10_000


class InputText(StrictModel):
    """A part of a message or of a tool's result."""

    type: Literal["input_text", "output_text", "text"]
    text: str


_Text = str | Annotated[list[InputText | Declined | LeftOut], Field(fail_fast=True)]


class InputMessage(StrictModel):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Text


class InputCall(StrictModel):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class InputResult(StrictModel):
    """A call's result."""

    type: Literal["function_call_output"]
    call_id: str | None = None
    output: _Text


_TAGS = {"message": "Message", "function_call": "Call", "function_call_output": "Result"}


def _kind_of_item(given: Any) -> str:
    of = given.get if isinstance(given, dict) else lambda name, other: getattr(given, name, other)
    kind = of("type", "message")
    return _TAGS.get(kind, "Foreign") if isinstance(kind, str) else "Message"


_Item = Annotated[
    Annotated[InputCall, Tag("Call")]
    | Annotated[InputResult, Tag("Result")]
    | Annotated[InputMessage, Tag("Message")]
    | Annotated[ForeignItem, Tag("Foreign")],
    Discriminator(_kind_of_item),
]
Items = Annotated[list[_Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
ITEMS: TypeAdapter[list[_Item]] = TypeAdapter(Items)
_PREFIXES = {
    "custom_tool_call": "ctc", "function_call": "fc", "function_call_output": "fco",
    "message": "msg",
}  # fmt: skip


def as_json(item: _Item) -> dict[str, Any]:
    """An item as the API tells it."""
    prefix = _PREFIXES.get(item.type, "item")
    told = {"id": f"{prefix}_{uuid.uuid4().hex}", "status": "completed"}
    found = told | item.model_dump(by_alias=True, exclude_none=not isinstance(item, ForeignItem))
    if isinstance(item, InputMessage):
        is_answer = item.role == "assistant"
        more = {"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"}
        if isinstance(item.content, str):
            found["content"] = [{"type": "text", "text": item.content}]
        found["content"] = [part | more if "text" in part else part for part in found["content"]]
    return found


def messages_of(instructions: str | None, items: str | list[_Item]) -> list[Message]:
    """Instructions, then the conversation."""
    turns = _Turns()
    if instructions:
        turns.add({"role": "system", "content": instructions})
    if isinstance(items, str):
        turns.add({"role": "user", "content": items})
        return turns.messages
    thought = ""
    for item in items:
        for message in _of_item(item):
            turns.add(message, thought)
        thought = item.thought if isinstance(item, ForeignItem) else ""
    return turns.messages


class _Turn:
    """A message, which may come in parts, and the results of its calls."""

    def __init__(self, role: str) -> None:
        self._role = role
        self.parts: list[Message] = []
        self.thought = ""  # before it
        self.results: list[Message] = []

    def goes_on_with(self, message: Message) -> bool:
        """Whether the message is one more part."""
        return self._role == message["role"] == "assistant" and not self.results

    @property
    def messages(self) -> list[Message]:
        """The message, then the results."""
        found = self.parts[0] | {
            "content": "\n".join(one["content"] for one in self.parts if one["content"])
        }
        if calls := [call for one in self.parts for call in one.get("tool_calls", ())]:
            found["tool_calls"] = calls
        if self.thought and self._role == "assistant":
            found["reasoning_content"] = self.thought
        return [found, *self.results]


class _Turns:
    """Messages, each with the results of its calls.

    What an assistant says and calls until a result comes, or another's message, is one message.
    """

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._results: dict[str | None, list[Message]] = {}  # of the turn, by a call's id

    @property
    def messages(self) -> list[Message]:
        """All of them, in order."""
        return [one for turn in self._turns for one in turn.messages]

    def add(self, message: Message, thought: str = "") -> None:
        """Add the next message; `thought` came before it."""
        if message.get("tool_call_id") in self._results:
            self._results[message["tool_call_id"]].append(message)
            return
        if not self._turns or not self._turns[-1].goes_on_with(message):
            self._turns.append(_Turn(message["role"]))
        last = self._turns[-1]
        last.parts.append(message)
        last.thought = last.thought or thought
        for call in message.get("tool_calls", ()):
            self._results[call["id"]] = last.results


def _of_item(item: _Item) -> list[Message]:
    match item:
        case InputMessage():
            return [{"role": item.role, "content": text_of(item.content)}]
        case InputCall():
            name = flat_name(item.namespace, item.name)
            return [called_by(item.call_id, name, item.arguments)]
        case InputResult():
            text = text_of(item.output)
            return [{"role": "tool", "tool_call_id": item.call_id, "content": text}]
        case ForeignItem():
            return item.messages()
