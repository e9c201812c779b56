"""Tells an answer's text from its tool calls, as both come.

Stop texts go by it, and so does everyone who reads the answer.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from hotcold.model.text.tools import CallSyntax

# OpenAI's and MCP's: more than these have their own meaning where a call is written.
NAME_CHARACTERS = r"[a-zA-Z0-9_.:/-]"
_BLANKS = r"\s*"


class SpanKind(Enum):
    """What a piece of an answer is."""

    TEXT = 1
    OPENING = 2  # of a call, with its name
    ARGUMENTS = 3
    CLOSING = 4
    CUT = 5  # of a call that does not go on


class Span(NamedTuple):
    """A piece of an answer."""

    kind: SpanKind
    text: str
    name: str = ""  # of an opening


class CallSplitter:
    """Splits one answer of `calls_grammar` incrementally; the spans are all of its text."""

    def __init__(self, syntax: CallSyntax) -> None:
        pattern = _opening(syntax)
        self._opening = re.compile(pattern)
        self._closing = re.compile(rf"\s*\}}\s*{re.escape(syntax.end)}")
        self._is_bare = not syntax.begin  # a call is the whole answer, or there is none
        self._read = self._read_text
        self._text = ""  # not certain yet
        self._is_first = True  # nothing was certain yet
        self._object = _Object()

    @property
    def is_calling(self) -> bool:
        """Whether what comes next belongs to a call."""
        return self._read != self._read_text or "{" in self._text

    def push(self, text: str, is_last: bool = False, is_cut: bool = False) -> list[Span]:
        """The spans that are certain after this further `text`; `is_cut`: more would follow."""
        self._text += text
        spans: list[Span] = []
        while True:
            read, length = self._read, len(self._text)
            spans += read()
            if (self._read, len(self._text)) == (read, length):
                break
        if is_last:
            is_of_call = is_cut or self.is_calling
            spans += self._take(SpanKind.CUT if is_of_call else SpanKind.TEXT, len(self._text))
        return spans

    def _take(self, kind: SpanKind, length: int, name: str = "") -> list[Span]:
        """The next `length` characters as a span, which are certain now; empty for none."""
        text, self._text = self._text[:length], self._text[length:]
        self._is_first = self._is_first and not text
        return [Span(kind, text, name)] if text else []

    def _read_text(self) -> list[Span]:
        find = self._opening.match if self._is_bare else self._opening.search
        match = find(self._text) if self._is_first or not self._is_bare else None
        if match is None:
            return self._take(SpanKind.TEXT, len(self._text))
        spans = self._take(SpanKind.TEXT, match.start())
        if match["whole"] is not None:
            spans += self._take(SpanKind.OPENING, match.end() - match.start(), match["name"])
            self._read, self._object = self._read_arguments, _Object()
        return spans

    def _read_arguments(self) -> list[Span]:
        spans = self._take(SpanKind.ARGUMENTS, self._object.length_in(self._text))
        if self._object.has_ended:
            self._read = self._read_closing
        return spans

    def _read_closing(self) -> list[Span]:
        match = self._closing.match(self._text)
        if match is None:
            return []
        self._read = self._read_text
        return self._take(SpanKind.CLOSING, match.end())


def _opening(syntax: CallSyntax) -> str:
    """A pattern of what opens a call, up to its arguments (`whole`), or as far as the text goes."""
    key = f'"{syntax.arguments}"'
    words = [list(map(re.escape, word)) for word in ("{", '"name"', ":", ",", key, ":")]
    words.insert(3, ['"', f"(?P<name>{NAME_CHARACTERS}+)", '"'])
    units = list(map(re.escape, syntax.begin))
    for word in words:
        units += [_BLANKS, *word] if units else word
    pattern = rf"{_BLANKS}(?:\Z|(?=(?P<whole>\{{)))"
    for unit in reversed(units):
        pattern = _BLANKS + pattern if unit == _BLANKS else rf"(?:\Z|{unit}{pattern})"
    return pattern


class _Object:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.has_ended = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def length_in(self, text: str) -> int:
        """Characters of the next piece that belong to the object."""
        for place, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.has_ended = True
                    return place + 1
        return len(text)
