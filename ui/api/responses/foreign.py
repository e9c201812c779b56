"""Items and tools of /v1/responses that OpenAI's servers, some clients or other models have.

Agents add such tools, and conversations that began elsewhere have such items. The tools are left
out of those that an answer may call. Of the items, calls and their results become those of
functions, what cannot be read is told in a line, and all others are passed over: a session goes on.
"""

import base64
import json
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, Field, model_validator

from hotcold.ui.api.fields import StrictModel
from hotcold.ui.api.parts import ContentPart, LeftOut, left_out, text_of
from hotcold.ui.api.responses.tools import Offered, flat_name, offered, tools_in
from hotcold.ui.api.tools.custom import arguments_of

Message = dict[str, Any]

# Kinds of calls -> the function's name (None: the item's own), fields of arguments and results.
_CALLS: dict[str, tuple[str | None, str, str | None]] = {
    "apply_patch_call": ("apply_patch", "operation", None),
    "code_interpreter_call": ("code_interpreter", "code", "outputs"),
    "computer_call": ("computer", "action", None),
    "custom_tool_call": (None, "input", None),
    "file_search_call": ("file_search", "queries", "results"),
    "local_shell_call": ("local_shell", "action", None),
    "mcp_call": (None, "arguments", "output"),
    "shell_call": ("shell", "action", None),
    "tool_search_call": ("tool_search", "arguments", None),
}
# Kinds of results -> the field of their call's id.
_RESULTS = {
    "apply_patch_call_output": "call_id",
    "computer_call_output": "call_id",
    "custom_tool_call_output": "call_id",
    "local_shell_call_output": "id",
    "shell_call_output": "call_id",
    "tool_search_output": "call_id",
}
# Kinds of which the model is told that they were there.
_LINES = {
    "compaction": ("user", "earlier conversation"),  # OpenAI alone can read it
    "image_generation_call": ("assistant", "image"),
}
_ADDING = ("additional_tools", "tool_search_output")  # their tools may be called from then on
_REFERENCE = "item_reference"
_ENCODED = "text:"  # what `encrypted_content` of this server begins with


class ForeignItem(StrictModel):
    """An item that is no message, function call or result of one."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    type: str = Field(max_length=100)

    @model_validator(mode="after")
    def _refers_to_something(self) -> Self:
        found = (self.model_extra or {}).get("id")
        if self.type == _REFERENCE and not (isinstance(found, str) and found):
            raise ValueError("an item_reference needs the id of an item")
        return self

    @property
    def thought(self) -> str:
        """The reasoning before the next item, or its summary."""
        fields = self.model_extra or {}
        if self.type != "reasoning":
            return ""
        if not fields.get("content") and (own := decoded(fields.get("encrypted_content"))):
            return own
        parts = fields.get("content") or fields.get("summary")
        if not isinstance(parts, list):
            return ""
        return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))

    @property
    def refers_to(self) -> str | None:
        """The id of the item that stands here, where this is a reference."""
        return str((self.model_extra or {})["id"]) if self.type == _REFERENCE else None

    @property
    def offered(self) -> list[Offered]:
        """The tools that may be called from here on."""
        return list(offered(tools_in(self.model_extra or {}))) if self.type in _ADDING else []

    def messages(self) -> list[Message]:
        """Its messages for a `ChatRequest`."""
        kind, fields = self.type, self.model_extra or {}
        if kind in _LINES:
            role, what = _LINES[kind]
            return [{"role": role, "content": left_out(what)}]
        if kind in _RESULTS:
            names = ", ".join(one.flat_name for one in self.offered)
            return [_result(str(fields.get(_RESULTS[kind])), names or fields.get("output"))]
        if kind == "agent_message":  # what one of Codex's agents tells another
            return [{"role": "user", "content": _text(fields.get("content"))}]
        if kind not in _CALLS:
            return []
        name, arguments_at, result_at = _CALLS[kind]
        call_id = str(fields.get("call_id") or fields.get("id"))
        result = fields.get(result_at) or fields.get("error") if result_at else None
        if result_at and not result:  # its server kept the result
            return []
        arguments = fields.get(arguments_at)
        if kind == "custom_tool_call":
            arguments = arguments_of(str(arguments))
        elif kind != "mcp_call" and not isinstance(arguments, dict):
            arguments = {arguments_at: arguments}
        namespace = fields.get("namespace")
        name = name or flat_name(namespace and str(namespace), str(fields.get("name")))
        called = called_by(call_id, name, _text(arguments))
        return [called, _result(call_id, result)] if result else [called]


def encoded(thought: str) -> str:
    """Reasoning as `encrypted_content`: so written that it comes back whole, but not secret."""
    return _ENCODED + base64.b64encode(thought.encode(errors="replace")).decode()


def decoded(content: Any) -> str:
    """The reasoning in `encrypted_content`; empty where another server wrote it."""
    if not isinstance(content, str) or not content.startswith(_ENCODED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_ENCODED), validate=True).decode()
    except ValueError:
        return ""


def called_by(call_id: str, name: str, arguments: str) -> Message:
    """The message of a call."""
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(call_id: str, output: Any) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": _text(output)}


def _text(value: Any) -> str:
    """Texts, and parts of text and of what is left out, as text; all else as JSON."""
    if isinstance(value, str):
        return value
    parts = [_part(one) for one in (value if isinstance(value, list) else [value])]
    known = [part for part in parts if part is not None]
    if len(known) == len(parts):
        return text_of(known)
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _part(value: Any) -> ContentPart | LeftOut | None:
    if not isinstance(value, dict):
        return None
    text = value.get("text")
    return (
        ContentPart(type="text", text=text)
        if isinstance(text, str)
        else LeftOut.of(value.get("type"))
    )
