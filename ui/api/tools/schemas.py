"""Schemas of tools, `tool_choice`, and calls in a conversation."""

import json
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field

from hotcold.ui.api.fields import MAX_TOOLS, AnyJson, StrictModel
from hotcold.ui.api.tools.grammar import Callable
from hotcold.ui.api.tools.reader import NAME_CHARACTERS

_MAX_CALLS = 128
_Name = Annotated[str, Field(pattern=f"^{NAME_CHARACTERS}{{1,128}}$")]


class Function(StrictModel):
    """A function that an answer may call; `parameters` is a JSON schema of its arguments.

    Parts of it that cannot be enforced are dropped, or an error where `strict`.
    """

    name: _Name
    description: str | None = None
    parameters: AnyJson = None
    strict: bool | None = None


class Tool(StrictModel):
    """One of `tools`."""

    type: Literal["function"]
    function: Function

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool for a chat template, with every key that one may read."""
        function = self.function
        described: dict[str, Any] = {
            "name": function.name,
            "description": function.description or "",
            "parameters": {"type": "object", "properties": {}},
        }
        if isinstance(function.parameters, dict) and function.parameters:
            described["parameters"] = function.parameters
        return {"type": "function", "function": described}


class NamedFunction(StrictModel):
    """The name in a `tool_choice`."""

    name: str


class NamedTool(StrictModel):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedNames(StrictModel):
    """Some of the tools, and whether one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(StrictModel):
    """A `tool_choice` of some of the tools; the prompt has all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


class CalledFunction(StrictModel):
    """A called function, with its arguments as JSON, which may be cut off."""

    name: _Name
    arguments: str


class ToolCall(StrictModel):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def for_template(self) -> dict[str, Any]:
        """The call for a chat template; complete arguments as an object."""
        arguments: Any = self.function.arguments or "{}"
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
Functions = Annotated[list[Function], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolCalls = Annotated[list[ToolCall], Field(max_length=_MAX_CALLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


def callable_functions(
    tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> Callable | None:
    """The functions that an answer may call, or None. Errors: ValueError, for pydantic."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ValueError("tool_choice is for requests with tools")
        return None
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ValueError("two of the tools have the same name")
    if choice == "none":
        return None
    functions = [tool.function for tool in tools]
    if isinstance(choice, AllowedTools):
        allowed = {tool.function.name for tool in choice.allowed_tools.tools}
        functions = [one for one in functions if one.name in allowed]
        if not functions:
            raise ValueError("tool_choice allows none of the tools")
        choice = choice.allowed_tools.mode
    if isinstance(choice, NamedTool):
        functions = [one for one in functions if one.name == choice.function.name]
        if not functions:
            raise ValueError(f"tool_choice names {choice.function.name[:64]!a}, which is no tool")
    several = parallel is not False and not isinstance(choice, NamedTool)
    return Callable(functions, choice == "required" or isinstance(choice, NamedTool), several)
