"""Grammars of answers: JSON of a schema, or text and tool calls with JSON arguments."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from llguidance import LLMatcher

from hotcold.actors.driver.grammars.argument_grammars import Rules, argument_rules, exactly
from hotcold.actors.driver.grammars.json_schema import WHOLE, enforced, problem_with
from hotcold.actors.protocol.messages import Grammar
from hotcold.model.errors import UsageError
from hotcold.model.text.call_syntax import CallSyntax
from hotcold.model.text.channels import BEFORE_IN_LARK, FINAL_IN_LARK, call_in_lark

_SCHEMA_BLANKS = r"(?: |\n {0,24})"
_GAP = r"([ \t\r\n]{0,4}|\n {4})"  # within a call
_ANY_GAP = r"[ \t\r\n]*"
_ANY_TEXT = r"/(.|\n)*/"
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

    @property
    def schemas(self) -> dict[str, Any]:
        """The schemas of their arguments, by name."""
        return {function.name: function.parameters for function in self.functions}


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
    kept = [_of_arguments(function, syntax) for function in wanted.functions]
    text = _of_calls(wanted, syntax, schema, kept)
    largest = sorted(range(len(kept)), key=lambda number: -len(kept[number]("0")))
    while len(text) > _SURE_CHARS and problem_with(LLMatcher.grammar_from_lark(text))[0]:
        if not largest:
            break
        half = len(largest) // 2 + 1
        for number in largest[:half]:
            if wanted.functions[number].strict:
                raise _unable(f"the tool {wanted.functions[number].name!a}", WHOLE)
            kept[number] = _of_arguments(Function("", {}), syntax)
        del largest[:half]
        text = _of_calls(wanted, syntax, schema, kept)
    return Grammar("calls", text)


def _of_arguments(function: Function, syntax: CallSyntax) -> Rules:
    """Rules of the arguments. Errors: UsageError for a strict tool's lost parts."""
    rules, lost = argument_rules(syntax.form, function.parameters)
    if function.strict and lost:
        raise _unable(f"the tool {function.name!a}", lost[0])
    return rules


def _unable(whose: str, lost: str) -> UsageError:
    return UsageError(
        f"{whose}: answers cannot be held to {lost!a}; change it, or let strict be false"
    )


def _of_calls(
    wanted: Callable, syntax: CallSyntax, schema: str | None, kept: Sequence[Rules]
) -> str:
    """The Lark grammar of `calls_grammar`."""
    rules = [one(str(number)) for number, one in enumerate(kept)]
    names = [exactly(function.name) for function in wanted.functions]
    frame = _in_channels if syntax.has_channels else _in_text
    return "\n".join([*frame(wanted, syntax, schema, names), *rules]) + "\n"


def _in_channels(
    wanted: Callable, syntax: CallSyntax, schema: str | None, names: Sequence[str]
) -> list[str]:
    """The answer is messages, of which the last is a call or else the answer itself."""
    last = [f"{call_in_lark(name)} arguments_{at}" for at, name in enumerate(names)]
    rules = [BEFORE_IN_LARK % "analysis|commentary"]
    if not wanted.is_required:
        last.append(f"{FINAL_IN_LARK} tail")
        rules.append(f"tail: {_ANY_TEXT if schema is None else f'%json {schema}'}")
    return [f"start: before* ({' | '.join(last)})", *rules]


def _in_text(
    wanted: Callable, syntax: CallSyntax, schema: str | None, names: Sequence[str]
) -> list[str]:
    """Text is everything that does not begin a call.

    `head` is lazy, so it ends as soon as what only calls begin with is there.
    """
    several = wanted.may_be_several and bool(syntax.begin)
    begin = _part(f"{syntax.begin} {syntax.first}".strip())
    before, after = syntax.parts
    head, _, tail = before.removeprefix(syntax.first).partition("NAME")
    head = head if syntax.first else f" {head}"
    calls = [
        f"{_lexeme(_part(head) + name + _part(tail))} arguments_{at}"
        for at, name in enumerate(names)
    ]
    rules = [f"one: ({' | '.join(calls)}){_lexeme(_part(after))}"]
    end = _lexeme(_part(f" {syntax.end}")) if syntax.end else ""
    if syntax.separator is None or not several:
        rules.append(f"body: one{end}")
    else:
        more = _lexeme(_part(f" {syntax.separator} {syntax.first}"))
        rules.append(f"body: one ({more} one)*{end}")
    if wanted.is_required or schema is not None or not syntax.begin:
        may_repeat = several and syntax.separator is None
        line = r"(\r?\n)?" if syntax.begin else ""
        rules.append(f"call: /{line}{begin}/ body")
        start = "call+" if may_repeat else "call"
        rules.append(f"start: {start}" + ("" if wanted.is_required else " | tail"))
    else:
        rules.append("start: (head body)* tail" if several else "start: head body | tail")
        rules.append(f"head[lazy]: /(.|\\n)*{begin.replace(_GAP, _ANY_GAP)}/")
    if not wanted.is_required:
        any_text = _ANY_TEXT if syntax.begin else r"/([^{](.|\n)*)?/"
        rules.append(f"tail: {any_text if schema is None else f'%json {schema}'}")
    return rules


def _part(text: str) -> str:
    """A part of a syntax as a pattern."""
    return CallSyntax.written(text, exactly, _GAP)


def _lexeme(pattern: str) -> str:
    return f" /{pattern}/" if pattern else ""
