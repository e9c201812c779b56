"""Splits an answer's text, as it comes, into text and tool calls."""

from __future__ import annotations

import re
import uuid
from typing import NamedTuple

from hotcold.model.text.tools import CallSyntax

# OpenAI's and MCP's: more than these have their own meaning where a call is written.
NAME_CHARACTERS = r"[a-zA-Z0-9_.:/-]"


class TextPart(NamedTuple):
    """Text beside calls."""

    text: str


class ReasoningPart(NamedTuple):
    """Reasoning before the answer."""

    text: str


class CallPart(NamedTuple):
    """A call begins, the `number`-th of the answer."""

    number: int
    id: str
    name: str


class ArgumentsPart(NamedTuple):
    """More of a call's arguments, as JSON text."""

    number: int
    text: str


Part = ReasoningPart | TextPart | CallPart | ArgumentsPart
_NAME = f"({NAME_CHARACTERS}+)"


class CallReader:
    """Parses one answer of `calls_grammar` incrementally.

    White space around calls is dropped, and a call that is cut off before its name ends.
    """

    def __init__(self, syntax: CallSyntax) -> None:
        self.num_calls = 0
        self._syntax = syntax
        before, after = syntax.opening("\0").split("\0")
        self._begin = syntax.begin or before
        self._opening = re.compile(re.escape(before) + _NAME + re.escape(after))
        self._read = self._read_text
        self._text = ""  # not returned yet
        self._is_first = True  # no text was returned since the answer or the last call began
        self._object = _Object()

    def push(self, text: str, is_last: bool = False) -> list[Part]:
        """The parts that are certain after this further `text`."""
        self._text += text
        parts: list[Part] = []
        while True:
            read, length = self._read, len(self._text)
            parts += read(is_last)
            if (self._read, len(self._text)) == (read, length):
                return parts

    def _read_text(self, is_last: bool) -> list[Part]:
        """Text, without white space or the beginning of a call at its end."""
        at = self._text.find(self._begin)
        if not self._syntax.begin:  # a call is the whole answer, or there is none
            is_open = self._is_first and self.num_calls == 0
            at = 0 if is_open and self._text.startswith(self._begin) else -1
            if is_open and at < 0 and not is_last and self._begin.startswith(self._text):
                return []
        if at >= 0:
            self._read = self._read_name
            return self._say(at, self._text[:at].rstrip())
        if is_last:
            whole = self._text if self.num_calls == 0 else self._text.rstrip()
            return self._say(len(self._text), whole)
        certain = self._text[: len(self._text) - self._num_held()].rstrip()
        return self._say(len(certain), certain)

    def _num_held(self) -> int:
        """Characters at the text's end that may begin a call."""
        if not self._syntax.begin:
            return 0
        most = min(len(self._begin) - 1, len(self._text))
        lengths = range(most, 0, -1)
        return next((n for n in lengths if self._begin.startswith(self._text[-n:])), 0)

    def _say(self, length: int, text: str) -> list[Part]:
        """Return `text`, and drop the next `length` characters, from which it comes."""
        self._text = self._text[length:]
        if self._is_first and self.num_calls:
            text = text.lstrip()
        self._is_first = self._is_first and not text
        return [TextPart(text)] if text else []

    def _read_name(self, is_last: bool) -> list[Part]:
        if match := self._opening.match(self._text):
            self._text = self._text[match.end() :]
            self._read, self._object = self._read_arguments, _Object()
            self.num_calls += 1
            return [CallPart(self.num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", match[1])]
        if is_last:
            self._text = ""
        return []

    def _read_arguments(self, is_last: bool) -> list[Part]:
        length = self._object.length_in(self._text)
        text, self._text = self._text[:length], self._text[length:]
        if self._object.has_ended:
            self._read = self._read_closing
        return [ArgumentsPart(self.num_calls - 1, text)] if text else []

    def _read_closing(self, is_last: bool) -> list[Part]:
        if self._text.startswith(self._syntax.closing):
            self._text = self._text[len(self._syntax.closing) :]
            self._read, self._is_first = self._read_text, True
        elif is_last:
            self._text = ""
        return []


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
