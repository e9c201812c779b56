"""Tools of /v1/responses: functions and custom tools, alone or in a namespace.

A chat completion has one flat list of them, and a call tells the tool by its flat name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError

from hotcold.ui.api.fields import MAX_TOOLS, AnyJson, StrictModel


class ForeignTool(StrictModel):
    """A tool that is not run here."""

    type: str = Field(max_length=100)


class FunctionTool(StrictModel):
    """A function that the answer may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: AnyJson = None
    strict: bool | None = None

    def in_chat(self, name: str, before: str) -> dict[str, Any]:
        """The tool of a chat completion; `before` its description."""
        function = self.model_dump(exclude={"type"})
        told = _joined(before, self.description)
        return {"type": "function", "function": {**function, "name": name, "description": told}}

    def told(self) -> dict[str, Any]:
        """The tool as a response tells it."""
        return self.model_dump() | {"strict": self.strict is True}


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

    def in_chat(self, name: str, before: str) -> dict[str, Any]:
        """The tool of a chat completion; `before` its description."""
        custom: dict[str, Any] = {"name": name, "description": _joined(before, self.description)}
        if self.format is not None and self.format.type == "grammar":
            grammar = self.format.model_dump(include={"syntax", "definition"})
            custom["format"] = {"type": "grammar", "grammar": grammar}
        return {"type": "custom", "custom": custom}

    def told(self) -> dict[str, Any]:
        """The tool as a response tells it."""
        return self.model_dump(exclude_none=True)


def _kind_of_tool(given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", "function")
    return kind.capitalize() if kind in ("function", "custom", "namespace") else "Foreign"


_Named = (
    Annotated[FunctionTool, Tag("Function")]
    | Annotated[CustomTool, Tag("Custom")]
    | Annotated[ForeignTool, Tag("Foreign")]
)
_InNamespace = Annotated[_Named, Discriminator(_kind_of_tool)]


class NamespaceTool(StrictModel):
    """Tools of one origin, such as an MCP server."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[list[_InNamespace], Field(max_length=MAX_TOOLS, fail_fast=True)]

    def told(self) -> dict[str, Any]:
        """The tool as a response tells it."""
        tools = [one.told() for one in self.tools if not isinstance(one, ForeignTool)]
        return {**self.model_dump(exclude={"tools"}), "tools": tools}


Tool = Annotated[_Named | Annotated[NamespaceTool, Tag("Namespace")], Discriminator(_kind_of_tool)]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
_TOOLS: TypeAdapter[list[Tool]] = TypeAdapter(Tools)


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
        return self.tool.in_chat(self.flat_name, self.about_namespace)


def flat_name(namespace: str | None, name: str) -> str:
    """The name of a tool with its namespace's before it, as agents themselves join them."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}" if namespace else name


def offered(tools: Iterable[Any]) -> Iterator[Offered]:
    """The tools that an answer may call."""
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            about = tool.description or ""
            for one in tool.tools:
                if not isinstance(one, ForeignTool):
                    yield Offered(one, tool.name, about)
                    about = ""
        elif not isinstance(tool, ForeignTool):
            yield Offered(tool)


def tools_in(item: dict[str, Any]) -> list[Any]:
    """The tools that an item adds; none where it has no right ones."""
    try:
        return list(_TOOLS.validate_python(item.get("tools")))
    except ValidationError:
        return []


def _joined(*texts: str | None) -> str:
    return "\n\n".join(filter(None, texts))
