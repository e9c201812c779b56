"""Custom tools: an answer calls one with any text, which its own grammar may hold.

The model is offered a function of one string `input`.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Literal

from hotcold.ui.api.fields import StrictModel
from hotcold.ui.api.tools.lark_regex import regex_of

_MAX_GRAMMAR = 1 << 16  # characters


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
