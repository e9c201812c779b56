"""Splits an answer, as it comes, into thoughts, text and tool calls."""

from __future__ import annotations

import re
import uuid
from typing import NamedTuple

from hotcold.actors.protocol.messages import TokenEvent
from hotcold.model.text.tools import CallSyntax

# OpenAI's and MCP's: more than these have their own meaning where a call is written.
NAME_CHARACTERS = r"[a-zA-Z0-9_.:/-]"


class TextPart(NamedTuple):
    """Text beside calls; `at`: where it begins in the answer's whole text."""

    text: str
    at: int = 0


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
        self._mark = syntax.begin
        begin = rf"{re.escape(syntax.begin)}\s*\{{" if syntax.begin else r"\{"
        key = re.escape(syntax.arguments)
        self._begin = re.compile(begin)
        self._opening = re.compile(rf'{begin}\s*"name"\s*:\s*"{_NAME}"\s*,\s*"{key}"\s*:\s*(?=\{{)')
        self._closing = re.compile(rf"\s*\}}\s*{re.escape(syntax.end)}" if syntax.end else r"\s*\}")
        self._read = self._read_text
        self._at = 0  # where `_text` begins
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
        if self._mark:
            found = self._begin.search(self._text)
        else:  # a call is the whole answer, or there is none
            is_open = self._is_first and self.num_calls == 0
            found = self._opening.match(self._text) if is_open else None
            if is_open and found is None and not is_last and self._text[:1] in ("", "{"):
                return []
        if found is not None:
            self._read = self._read_name
            return self._say(found.start(), self._text[: found.start()].rstrip())
        if is_last:
            whole = self._text if self.num_calls == 0 else self._text.rstrip()
            return self._say(len(self._text), whole)
        certain = self._text[: len(self._text) - self._num_held()].rstrip()
        return self._say(len(certain), certain)

    def _num_held(self) -> int:
        """Characters at the text's end that may begin a call."""
        if self._mark and self._text.rstrip().endswith(self._mark):
            return len(self._text) - self._text.rindex(self._mark)
        lengths = range(len(self._mark) - 1, 0, -1)
        return next((n for n in lengths if self._text.endswith(self._mark[:n])), 0)

    def _say(self, length: int, text: str) -> list[Part]:
        """Return `text`, and drop the next `length` characters, which begin with it."""
        at = self._at
        self._drop(length)
        if self._is_first and self.num_calls:
            at += len(text) - len(text.lstrip())
            text = text.lstrip()
        self._is_first = self._is_first and not text
        return [TextPart(text, at)] if text else []

    def _drop(self, length: int) -> None:
        """Take the next `length` characters as read."""
        self._text = self._text[length:]
        self._at += length

    def _read_name(self, is_last: bool) -> list[Part]:
        if match := self._opening.match(self._text):
            self._drop(match.end())
            self._read, self._object = self._read_arguments, _Object()
            self.num_calls += 1
            return [CallPart(self.num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", match[1])]
        if is_last:
            self._text = ""
        return []

    def _read_arguments(self, is_last: bool) -> list[Part]:
        length = self._object.length_in(self._text)
        text = self._text[:length]
        self._drop(length)
        if self._object.has_ended:
            self._read = self._read_closing
        return [ArgumentsPart(self.num_calls - 1, text)] if text else []

    def _read_closing(self, is_last: bool) -> list[Part]:
        if match := self._closing.match(self._text):
            self._drop(match.end())
            self._read, self._is_first = self._read_text, True
        elif is_last:
            self._text = ""
        return []


class AnswerReader:
    """Parses one answer incrementally; the system tells its thoughts apart."""

    def __init__(self, syntax: CallSyntax | None) -> None:
        """`syntax` None: no calls."""
        self._calls = None if syntax is None else CallReader(syntax)
        self._num_read = 0  # characters of all text
        self._begin: int | None = None  # of these, where the answer itself begins

    @property
    def num_calls(self) -> int:
        """How many calls have begun."""
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, event: TokenEvent) -> list[Part]:
        """The parts that are certain after this further event."""
        parts: list[Part] = [ReasoningPart(event.thought)] if event.thought else []
        said, at = event.said, self._num_read + event.said_at
        self._num_read += len(event.text)
        if self._calls is None:
            return [*parts, TextPart(said, at)] if said else parts
        if self._begin is None and said:
            self._begin = at
        for part in self._calls.push(said, event.result is not None):
            if isinstance(part, TextPart):
                part = part._replace(at=part.at + (self._begin or 0))
            parts.append(part)
        return parts


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
