"""Grammars of answers: JSON of a schema, or text and tool calls with JSON arguments."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from llguidance import LLMatcher

from hotcold.actors.protocol.messages import Grammar
from hotcold.model.errors import UsageError
from hotcold.model.text.tools import CallSyntax
from hotcold.ui.api.tools.json_schema import WHOLE, Enforced, enforced, problem_with

# Arguments are on one line: small models may write white space for ever.
_ARGUMENT_BLANKS = " ?"
_SCHEMA_BLANKS = r"(?: |\n {0,24})"
_GAP = r"[ \t\r\n]{0,4}"  # within a call
_SURE_CHARS = 1 << 17  # a grammar as long as this is within llguidance's limits


class Function(NamedTuple):
    """A function that an answer may call."""

    name: str
    parameters: Any = None  # a JSON schema of its arguments; None without any
    strict: bool | None = None  # whether all of the schema must be enforced


class Callable(NamedTuple):
    """The functions that the answer to a request may call."""

    functions: Sequence[Function]
    is_required: bool  # nothing but calls
    may_be_several: bool


def schema_grammar(given: Grammar | None, strict: bool | None) -> Grammar | None:
    """A JSON schema as llguidance can enforce it; other grammars unchanged.

    Unless `strict` is false, all of it must be enforced. An unknown `format` is an error only where
    `strict` is true: in JSON Schema it is an annotation.
    Errors:  UsageError that names the part that cannot be enforced
    """
    if given is None or given.kind != "json_schema":
        return given
    found = enforced(json.loads(given.text))
    for lost in found.lost:
        if strict or (strict is None and lost != "format"):
            raise _unable("the JSON schema", lost)
    return replace(given, text=found.text(_SCHEMA_BLANKS))


def choice_grammar(texts: Sequence[str]) -> Grammar:
    """The answer is one of the texts."""
    return Grammar("lark", f"start: {' | '.join(map(json.dumps, texts))}\n")


def calls_grammar(wanted: Callable, syntax: CallSyntax, schema: str | None) -> Grammar:
    """Calls in the model's own syntax; beside them any text, or JSON of `schema`.

    Errors:  UsageError for a strict tool whose schema cannot be enforced
    """
    schemas = [_of_arguments(function) for function in wanted.functions]
    text = _of_calls(wanted, syntax, schema, schemas)
    largest = sorted(range(len(schemas)), key=lambda number: -len(str(schemas[number].schema)))
    while len(text) > _SURE_CHARS and problem_with(LLMatcher.grammar_from_lark(text))[0]:
        if not largest:
            break
        half = len(largest) // 2 + 1
        for number in largest[:half]:
            if wanted.functions[number].strict:
                raise _unable(f"the tool {wanted.functions[number].name!a}", WHOLE)
            schemas[number] = enforced({}, is_object=True)
        del largest[:half]
        text = _of_calls(wanted, syntax, schema, schemas)
    return Grammar("calls", text)


def _of_arguments(function: Function) -> Enforced:
    """The schema enforced on arguments. Errors: UsageError for a strict tool's lost parts."""
    found = enforced(function.parameters, is_object=True)
    if function.strict and found.lost:
        raise _unable(f"the tool {function.name!a}", found.lost[0])
    return found


def _unable(whose: str, lost: str) -> UsageError:
    return UsageError(
        f"{whose}: answers cannot be held to {lost!a}; change it, or let strict be false"
    )


def _of_calls(
    wanted: Callable, syntax: CallSyntax, schema: str | None, schemas: Sequence[Enforced]
) -> str:
    """The Lark grammar of `calls_grammar`.

    Text is everything that does not begin a call: `head` is lazy, so it ends as soon as the text
    that begins a call is there, with its brace.
    """
    several = wanted.may_be_several and bool(syntax.end)
    calls = "call+" if several else "call"
    begin = _pattern(syntax.begin)
    rules = [f"call: /{begin}{_GAP if begin else ''}\\{{/ body"]
    if wanted.is_required:
        rules.append(f"start: {calls}")
    elif schema is not None:
        rules.append(f"start: {calls} | tail")
    elif syntax.begin:
        rules.append("start: (head body)* tail" if several else "start: head body | tail")
        rules.append(f"head[lazy]: /(.|\\n)*{begin}[ \\t\\r\\n]*\\{{/")
    else:
        rules.append("start: call | tail")
    if not wanted.is_required:
        any_text = r"/(.|\n)*/" if syntax.begin else r"/([^{](.|\n)*)?/"
        rules.append(f"tail: {any_text if schema is None else f'%json {schema}'}")
    if several and (wanted.is_required or schema is not None):
        rules[0] += f" /{_GAP}/"
    bodies = []
    for number, (function, arguments) in enumerate(zip(wanted.functions, schemas, strict=True)):
        words = ('"name"', ":", f'"{function.name}"', ",", f'"{syntax.arguments}"', ":")
        opening = "".join(f"{_GAP}{_pattern(word)}" for word in words)
        bodies.append(f"/{opening}{_GAP}/ arguments_{number}")
        rules.append(f"arguments_{number}: %json {arguments.text(_ARGUMENT_BLANKS)}")
    end = f"{_GAP}{_pattern(syntax.end)}" if syntax.end else ""
    rules.append(f"body: ({' | '.join(bodies)}) /{_GAP}\\}}{end}/")
    return "\n".join(rules) + "\n"


def _pattern(text: str) -> str:
    """A Lark regular expression of exactly this text."""
    return "".join(c if c.isalnum() or c in "_<> " else f"\\{c}" for c in text)
