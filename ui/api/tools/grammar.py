"""The grammar of an answer that may call tools: text, and calls whose arguments fit."""

import json

from actors.protocol.messages import Grammar
from model.text.tools import CallSyntax
from ui.api.tools.schemas import Callable

# Arguments stand in one line: small models write blanks for ever where they may.
_BLANKS = {"x-guidance": {"whitespace_pattern": " ?"}}


def calls_grammar(wanted: Callable, syntax: CallSyntax, shape: str | None) -> Grammar:
    """Calls in the model's own syntax; beside them any text, or JSON of the schema `shape`.

    Text is whatever does not begin a call. That is told lexeme by lexeme: `head` is lazy, so that
    it ends, and a call begins, as soon as the words that begin one are there.
    """
    several = wanted.may_be_several and bool(syntax.end)
    calls = "call+" if several else "call"
    rules = [f"call: {_text(syntax.begin)} body" if syntax.begin else "call: body"]
    if wanted.is_required:
        rules.append(f"start: {calls}")
    elif shape is not None:
        rules.append(f"start: {calls} | tail")
    elif syntax.begin:
        rules.append("start: (head body)* tail" if several else "start: head body | tail")
        rules.append(f"head[lazy]: /(.|\\n)*{_pattern(syntax.begin)}/")
    else:
        rules.append("start: call | tail")
    if not wanted.is_required:
        any_text = r"/(.|\n)*/" if syntax.begin else r"/([^{](.|\n)*)?/"
        rules.append(f"tail: {any_text if shape is None else f'%json {shape}'}")
    if several and (wanted.is_required or shape is not None):
        rules[0] += r' "\n"?'
    bodies = []
    for number, function in enumerate(wanted.functions):
        opening = syntax.opening(function.name).removeprefix(syntax.begin)
        bodies.append(f"{_text(opening)} arguments_{number}")
        rules.append(
            f"arguments_{number}: %json {json.dumps(function.schema_of_arguments | _BLANKS)}"
        )
    rules.append(f"body: ({' | '.join(bodies)}) {_text(syntax.closing)}")
    return Grammar("lark", "\n".join(rules) + "\n")


def _text(text: str) -> str:
    """A Lark string."""
    return json.dumps(text)


def _pattern(text: str) -> str:
    """A Lark regular expression of exactly this text."""
    escaped = "".join(c if c.isalnum() or c in "_<> " else f"\\{c}" for c in text)
    return escaped.replace("\\\n", "\\n")
