"""Schemas of tools, `tool_choice`, and calls in a conversation.

An answer calls a custom tool with any text, which the tool's own grammar may hold: the model is
offered a function of one string `input`.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from hotcold.actors.driver.grammars import grammar
from hotcold.actors.driver.grammars.grammar import Callable
from hotcold.model.text.call_syntax import NAME_CHARACTERS
from hotcold.model.text.tools import described
from hotcold.ui.api.fields import MAX_TOOLS, AnyJson, StrictModel
from hotcold.ui.api.tools.lark_regex import regex_of

_MAX_CALLS = 128
_MAX_GRAMMAR = 1 << 16  # characters
_MAX_NAME = 128
_Name = Annotated[str, Field(pattern=f"^{NAME_CHARACTERS}{{1,{_MAX_NAME}}}$")]
_ODD = re.compile(f"(?!{NAME_CHARACTERS}).", re.DOTALL)


def _in_calls(name: str) -> str:
    return _ODD.sub("_", name)[:_MAX_NAME] or "_"


# Of a call in a conversation, which another program or model may have named.
_CalledName = Annotated[str, AfterValidator(_in_calls)]


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
        """The tool for a chat template."""
        function = self.function
        parameters = function.parameters if isinstance(function.parameters, dict) else None
        return described(function.name, function.description, parameters)


class InputGrammar(StrictModel):
    """A grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: str


class InputFormat(StrictModel):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None


def arguments_of(text: str) -> str:
    """The arguments of a call with this input, as JSON."""
    return json.dumps({"input": text}, ensure_ascii=False)


def parameters_of(pattern: str | None = None) -> dict[str, Any]:
    """The schema of the arguments."""
    held = {} if pattern is None else {"pattern": pattern}
    return {
        "type": "object",
        "properties": {"input": {"type": "string", **held}},
        "required": ["input"],
        "additionalProperties": False,
    }


def pattern_of(syntax: str, definition: str) -> str | None:
    """What the input matches; None where it is not held: by a long, recursive or wrong grammar."""
    return None if len(definition) > _MAX_GRAMMAR else _pattern(syntax, definition)


@lru_cache(64)
def _pattern(syntax: str, definition: str) -> str | None:
    found = definition if syntax == "regex" else regex_of(definition)
    return None if found is None else f"^(?:{found})$"


class Custom(StrictModel):
    """A tool of any text."""

    name: _Name
    description: str | None = None
    format: InputFormat | None = None


class CustomTool(StrictModel):
    """One of `tools` that is called with a text."""

    type: Literal["custom"]
    custom: Custom

    @property
    def function(self) -> Function:
        """The function of one string that the answer may call."""
        held = self.custom.format and self.custom.format.grammar
        pattern = pattern_of(held.syntax, held.definition) if held else None
        return Function(name=self.custom.name, parameters=parameters_of(pattern))

    @property
    def for_template(self) -> dict[str, Any]:
        """As that of a `Tool`; the description says what the input has to be."""
        told, held = [self.custom.description], self.custom.format and self.custom.format.grammar
        if held:
            told.append(f"The input must match this {held.syntax} grammar:\n{held.definition}")
        return described(self.custom.name, "\n\n".join(filter(None, told)), parameters_of())


class NamedFunction(StrictModel):
    """The name in a `tool_choice`."""

    name: str


class NamedTool(StrictModel):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.function.name


class NamedCustom(StrictModel):
    """A `tool_choice` that names a custom tool."""

    type: Literal["custom"]
    custom: NamedFunction

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.custom.name


class CalledFunction(StrictModel):
    """A called function, with its arguments as JSON, which may be cut off."""

    name: _CalledName
    arguments: str


class ToolCall(StrictModel):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def for_template(self) -> dict[str, Any]:
        """The call for a chat template."""
        function = {"name": self.function.name, "arguments": self.function.arguments or "{}"}
        return {"id": self.id, "type": "function", "function": function}


class CalledCustom(StrictModel):
    """A called custom tool, with its text."""

    name: _CalledName
    input: str


class CustomCall(StrictModel):
    """A call of a custom tool in an earlier answer."""

    id: str
    type: Literal["custom"]
    custom: CalledCustom

    @property
    def for_template(self) -> dict[str, Any]:
        """As that of a `ToolCall`."""
        arguments = arguments_of(self.custom.input)
        called = CalledFunction(name=self.custom.name, arguments=arguments)
        return ToolCall(id=self.id, function=called).for_template


AnyTool = Tool | CustomTool
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolCalls = Annotated[list[ToolCall | CustomCall], Field(max_length=_MAX_CALLS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | NamedCustom


def callable_functions(
    tools: Sequence[AnyTool] | None, choice: ToolChoice | None, parallel: bool | None
) -> Callable | None:
    """The functions that an answer may call, or None. Errors: ValueError, for pydantic."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ValueError("tool_choice is for requests with tools")
        return None
    given = [tool.function for tool in tools]
    functions = [grammar.Function(one.name, one.parameters, one.strict) for one in given]
    if len({one.name for one in functions}) < len(functions):
        raise ValueError("two of the tools have the same name")
    if choice == "none":
        return None
    is_named = isinstance(choice, NamedTool | NamedCustom)
    if isinstance(choice, NamedTool | NamedCustom):
        functions = [one for one in functions if one.name == choice.name]
        if not functions:
            raise ValueError(f"tool_choice names {choice.name[:64]!a}, which is no tool")
    several = parallel is not False and not is_named
    return Callable(functions, choice == "required" or is_named, several)
