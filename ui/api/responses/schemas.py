"""Schemas of /v1/responses: the items of a conversation, tools, and the request.

A session goes on whatever its history holds: items of other servers' tools, and those that nobody
here knows, are passed over.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, field_validator

from hotcold.ui.api.cached import Cached
from hotcold.ui.api.drawn import Drawn
from hotcold.ui.api.fields import MAX_TOOLS, AnyJson, NewTokens, StrictModel
from hotcold.ui.api.parts import Content
from hotcold.ui.api.schemas import Reasoning
from hotcold.ui.api.tools.schemas import Function, NamedFunction

MAX_ITEMS = 10_000
_MAX_METADATA = 16


class InputMessage(StrictModel):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class AgentMessage(StrictModel):
    """What one of Codex's agents tells another."""

    type: Literal["agent_message"]
    content: Content | None = None


class InputCall(StrictModel):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCall(StrictModel):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class InputResult(StrictModel):
    """A call's result."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str | None = None
    output: Content


class ReasoningItem(StrictModel):
    """Reasoning before the next item, or its summary."""

    type: Literal["reasoning"]
    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class Reference(StrictModel):
    """In place of an item of a kept response."""

    type: Literal["item_reference"]
    id: Annotated[str, Field(min_length=1)]


class Other(StrictModel):
    """An item that is passed over, or a tool that is not run here."""

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
    | Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[Reference, Tag("Reference")]
    | Annotated[Other, Tag("Other")],
    Discriminator(_kind_of_item),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class FunctionTool(Function):
    """A function that the answer may call."""

    type: Literal["function"]


class InputFormat(StrictModel):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(StrictModel):
    """A tool that the answer may call with a text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: InputFormat | None = None


def _kind_of_tool(given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", "function")
    return kind.capitalize() if kind in ("function", "custom", "namespace") else "Other"


_Named = (
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[CustomTool, Tag("Custom")]
    | Annotated[Other, Tag("Other")]
)
_InNamespace = Annotated[_Named, Discriminator(_kind_of_tool)]


class NamespaceTool(StrictModel):
    """Tools of one origin, such as an MCP server."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[list[_InNamespace], Field(max_length=MAX_TOOLS, fail_fast=True)]


Tool = Annotated[_Named | Annotated[NamespaceTool, Tag("Namespace")], Discriminator(_kind_of_tool)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedTool(NamedFunction):
    """A `tool_choice` that names a function or a custom tool."""

    type: Literal["function", "custom"]
    namespace: str | None = None


class TextFormat(StrictModel):
    """The form of an answer's text; its schema is beside its type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    content: dict[str, AnyJson] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @property
    def in_chat(self) -> dict[str, Any]:
        """The `response_format` of a chat completion."""
        if self.type != "json_schema" or self.content is None:
            return {"type": self.type}
        schema = {"schema": self.content, "strict": self.strict}
        return {"type": self.type, "json_schema": schema}


class TextOptions(StrictModel):
    """Options of an answer's text."""

    format: TextFormat | None = None


class ReasoningOptions(Reasoning):
    """Also whether thoughts are told as a summary; they are told whole."""

    summary: Literal["auto", "concise", "detailed", "none"] | None = None

    @property
    def told_summary(self) -> str | None:
        """The kind of summary that is asked for; None for none."""
        return None if self.summary == "none" else self.summary


_MetadataText = Annotated[str, Field(max_length=512)]


class ResponsesRequest(Drawn, Cached):
    """POST /v1/responses."""

    input: str | Items
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: NewTokens = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, _MetadataText], Field(max_length=_MAX_METADATA)] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _is_run_here(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind not in ("function", "custom"):
            raise ValueError(f"{kind[:50]!a} cannot be chosen here; name a tool that you declare")
        return given

    @field_validator("include")
    @classmethod
    def _has_no_logprobs(cls, given: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (given or ()):
            raise ValueError("message.output_text.logprobs is not supported here; leave it out")
        return given

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return self.input
