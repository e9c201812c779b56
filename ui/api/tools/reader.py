"""An answer's text as it comes, told apart: what is said, and what is called."""

from __future__ import annotations

import re
import uuid
from typing import NamedTuple

from hotcold.model.text.tools import CallSyntax

# OpenAI's and MCP's: more than these have their own meaning where a call is written.
NAME_CHARACTERS = r"[a-zA-Z0-9_.:/-]"


class Said(NamedTuple):
    """Text beside calls."""

    text: str


class Thought(NamedTuple):
    """What the model thinks before it answers."""

    text: str


class Called(NamedTuple):
    """A call begins, the `number`-th of the answer."""

    number: int
    id: str
    name: str


class Argued(NamedTuple):
    """More of a call's arguments, as JSON text."""

    number: int
    text: str


Part = Thought | Said | Called | Argued
_NAME = f"({NAME_CHARACTERS}+)"


class CallReader:
    """Reads one answer that was held to `calls_grammar`; nothing that it gives is taken back.

    Blanks around calls are dropped. So is a call that ends before its name is whole, where an
    answer was as long as it may be.
    """

    def __init__(self, syntax: CallSyntax) -> None:
        self.num_calls = 0
        self._syntax = syntax
        before, after = syntax.opening("\0").split("\0")
        self._begin = syntax.begin or before
        self._opening = re.compile(re.escape(before) + _NAME + re.escape(after))
        self._read = self._read_text
        self._text = ""  # not yet given
        self._is_first = True  # no text has been given since the answer or the last call began
        self._object = _Object()

    def push(self, text: str, is_last: bool = False) -> list[Part]:
        """What `text`, which follows all that came before, makes certain."""
        self._text += text
        parts: list[Part] = []
        while True:
            read, length = self._read, len(self._text)
            parts += read(is_last)
            if (self._read, len(self._text)) == (read, length):
                return parts

    def _read_text(self, is_last: bool) -> list[Part]:
        """Text, but for blanks and the beginning of a call at its end."""
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
        """How many characters at the text's end may begin a call."""
        if not self._syntax.begin:
            return 0
        most = min(len(self._begin) - 1, len(self._text))
        lengths = range(most, 0, -1)
        return next((n for n in lengths if self._begin.startswith(self._text[-n:])), 0)

    def _say(self, length: int, text: str) -> list[Part]:
        """Give `text`, all of the next `length` characters that is to be given."""
        self._text = self._text[length:]
        if self._is_first and self.num_calls:
            text = text.lstrip()
        self._is_first = self._is_first and not text
        return [Said(text)] if text else []

    def _read_name(self, is_last: bool) -> list[Part]:
        if match := self._opening.match(self._text):
            self._text = self._text[match.end() :]
            self._read, self._object = self._read_arguments, _Object()
            self.num_calls += 1
            return [Called(self.num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", match[1])]
        if is_last:
            self._text = ""
        return []

    def _read_arguments(self, is_last: bool) -> list[Part]:
        length = self._object.length_in(self._text)
        text, self._text = self._text[:length], self._text[length:]
        if self._object.has_ended:
            self._read = self._read_closing
        return [Argued(self.num_calls - 1, text)] if text else []

    def _read_closing(self, is_last: bool) -> list[Part]:
        if self._text.startswith(self._syntax.closing):
            self._text = self._text[len(self._syntax.closing) :]
            self._read, self._is_first = self._read_text, True
        elif is_last:
            self._text = ""
        return []


class _Object:
    """Finds where a JSON object ends that comes in pieces."""

    def __init__(self) -> None:
        self.has_ended = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def length_in(self, text: str) -> int:
        """How many characters of the next piece belong to the object."""
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
