"""Tools of /v1/responses: functions and custom tools, alone or in a namespace.

A chat completion has one flat list of them, and a call tells the tool by its flat name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag

from hotcold.ui.api.fields import MAX_TOOLS, StrictModel
from hotcold.ui.api.tools.schemas import Function


class OtherTool(StrictModel):
    """A tool that is not run here."""

    type: str = Field(max_length=100)


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
    | Annotated[OtherTool, Tag("Other")]
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


class Offered(NamedTuple):
    """A tool that the answer may call."""

    tool: FunctionTool | CustomTool
    namespace: str | None = None
    about_namespace: str = ""  # with the first tool of each

    @property
    def flat_name(self) -> str:
        """The name that the model calls."""
        return flat_name(self.namespace, self.tool.name)

    @property
    def in_chat(self) -> dict[str, Any]:
        """The tool of a chat completion."""
        tool, kind = self.tool, self.tool.type
        told = "\n\n".join(filter(None, (self.about_namespace, tool.description)))
        named: dict[str, Any] = {"name": self.flat_name, "description": told}
        if isinstance(tool, FunctionTool):
            named |= {"parameters": tool.parameters, "strict": tool.strict}
        elif tool.format is not None and tool.format.type == "grammar":
            grammar = tool.format.model_dump(include={"syntax", "definition"})
            named["format"] = {"type": "grammar", "grammar": grammar}
        return {"type": kind, kind: named}


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a tool with its namespace's before it, as agents themselves join them."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}" if namespace else name


def offered(tools: Iterable[Any]) -> Iterator[Offered]:
    """The tools that an answer may call."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            about = tool.description or ""
            for one in offered(tool.tools):
                yield Offered(one.tool, tool.name, about)
                about = ""
        elif not isinstance(tool, OtherTool):
            yield Offered(tool)


def told(tools: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The tools as a response tells them."""
    for tool in tools:
        match tool:
            case FunctionTool():
                yield tool.model_dump() | {"strict": tool.strict is True}
            case CustomTool():
                yield tool.model_dump(exclude_none=True)
            case NamespaceTool():
                yield tool.model_dump(exclude={"tools"}) | {"tools": list(told(tool.tools))}
