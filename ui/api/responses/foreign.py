"""Items and tools of /v1/responses that OpenAI's servers or some clients run.

Agents add such tools, and conversations that began elsewhere have such items. The tools are left
out of those that an answer may call. Of the items, calls and their results become those of
functions, some are skipped, and those that the answer would miss are refused.
"""

import json
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.fields import StrictModel

Message = dict[str, Any]

# Kinds of calls -> the function's name (None: the item's own), fields of arguments and results.
_CALLS: dict[str, tuple[str | None, str, str | None]] = {
    "apply_patch_call": ("apply_patch", "operation", None),
    "code_interpreter_call": ("code_interpreter", "code", "outputs"),
    "custom_tool_call": (None, "input", None),
    "file_search_call": ("file_search", "queries", "results"),
    "local_shell_call": ("local_shell", "action", None),
    "mcp_call": (None, "arguments", "output"),
    "shell_call": ("shell", "action", None),
}
# Kinds of results -> the field of their call's id.
_RESULTS = {
    "apply_patch_call_output": "call_id",
    "custom_tool_call_output": "call_id",
    "local_shell_call_output": "id",
    "shell_call_output": "call_id",
}
# Reasoning goes with the item that follows.
_SKIPPED = ("mcp_list_tools", "reasoning", "web_search_call")
_REFERENCE = "item_reference"
_REFUSED = {
    "additional_tools": "give them as tools",
    "compaction": "its content can be read by OpenAI alone; send the conversation",
    "compaction_trigger": "nothing is compacted here",
    "computer_call": "no screen is used here",
    "computer_call_output": "images are not understood here",
    "configuration_update": "say it in the request",
    "image_generation_call": "images are not understood here",
    "mcp_approval_request": "no MCP server is asked from here",
    "mcp_approval_response": "no MCP server is asked from here",
    "program": "no programs are run here",
    "program_output": "no programs are run here",
    "tool_search_call": "give all tools with the request",
    "tool_search_output": "give all tools with the request",
}
KINDS = (*_CALLS, *_RESULTS, *_SKIPPED, _REFERENCE, *_REFUSED)


class ForeignItem(StrictModel):
    """An item that is no message, function call or result of one."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")

    type: Literal[KINDS]  # type: ignore[valid-type]

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
        parts = fields.get("content") or fields.get("summary")
        if self.type != "reasoning" or not isinstance(parts, list):
            return ""
        return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))

    @property
    def refers_to(self) -> str | None:
        """The id of the item that stands here, where this is a reference."""
        return str((self.model_extra or {})["id"]) if self.type == _REFERENCE else None

    def messages(self, place: int) -> list[Message]:
        """Its messages for a `ChatRequest`. Errors: ApiError 400 for a refused kind."""
        kind, fields = self.type, self.model_extra or {}
        if kind in _REFUSED:
            text = f"input.{place}: items of type {kind} are not supported: {_REFUSED[kind]}"
            raise ApiError(400, text, param=f"input.{place}.type")
        if kind in _RESULTS:
            return [_result(str(fields.get(_RESULTS[kind])), fields.get("output"))]
        if kind not in _CALLS:
            return []
        name, arguments_at, result_at = _CALLS[kind]
        call_id = str(fields.get("call_id") or fields.get("id"))
        result = fields.get(result_at) or fields.get("error") if result_at else None
        if result_at and not result:  # its server kept the result
            return []
        arguments = fields.get(arguments_at)
        if kind != "mcp_call" and not isinstance(arguments, dict):
            arguments = {arguments_at: arguments}
        function = {"name": name or str(fields.get("name")), "arguments": _text(arguments)}
        call = {"id": call_id, "type": "function", "function": function}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [called, _result(call_id, result)] if result else [called]


class ForeignTool(StrictModel):
    """A tool that is no function."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")

    type: str = Field(max_length=100)

    @field_validator("type")
    @classmethod
    def _is_foreign(cls, given: str) -> str:
        if given == "function":
            raise ValueError("must be a function")
        return given


class ForeignChoice(ForeignTool):
    """A `tool_choice` that names a tool that is no function."""

    name: str | None = None
    server_label: str | None = None

    @property
    def wanted(self) -> str:
        """The tool's name."""
        names = (self.type, self.server_label, self.name)
        return " ".join(ascii(name[:100]) for name in names if name)


def _result(call_id: str, output: Any) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": _text(output)}


def _text(value: Any) -> str:
    """Texts and text parts as text, all else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in value
    ):
        return "".join(part["text"] for part in value)
    return "" if value is None else json.dumps(value, ensure_ascii=False)
