"""Tells an answer's text from its tool calls, as both come.

Stop texts go by it, and so does everyone who reads the answer.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from hotcold.model.text.call_syntax import CallSyntax


class SpanKind(Enum):
    """What a piece of an answer is."""

    MARK = 6  # around thoughts and messages, with the white space there: nobody is shown it
    THOUGHT = 7
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
        self._syntax = syntax
        self._is_bare = not syntax.begin  # a call is the whole answer, or there is none
        self._read = self._read_text
        self._text = ""  # not certain yet
        self._is_first = True  # nothing was certain yet
        self._arguments = syntax.form.reader()

    @property
    def is_calling(self) -> bool:
        """Whether what comes next belongs to a call."""
        is_begun = self._syntax.trigger.match(self._text) is not None
        return self._read != self._read_text or is_begun

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

    def end_text(self) -> list[Span]:
        """What was held back of a text that ends here, though the answer does not."""
        return self._take(SpanKind.TEXT, len(self._text)) if not self.is_calling else []

    def _take(self, kind: SpanKind, length: int, name: str = "") -> list[Span]:
        """The next `length` characters as a span, which are certain now; empty for none."""
        text, self._text = self._text[:length], self._text[length:]
        self._is_first = self._is_first and not text
        return [Span(kind, text, name)] if text else []

    def _read_text(self) -> list[Span]:
        opening = self._syntax.opening
        find = opening.match if self._is_bare else opening.search
        match = find(self._text) if self._is_first or not self._is_bare else None
        if match is None:
            return self._take(SpanKind.TEXT, len(self._text))
        return self._take(SpanKind.TEXT, match.start()) + self._begun(match)

    def _begun(self, match: re.Match[str]) -> list[Span]:
        if match["whole"] is None:
            return []
        self._read, self._arguments = self._read_arguments, self._syntax.form.reader()
        return self._take(SpanKind.OPENING, match.end() - match.start(), match["name"])

    def _read_arguments(self) -> list[Span]:
        spans = self._take(SpanKind.ARGUMENTS, self._arguments.push(self._text).length)
        if self._arguments.has_ended:
            self._read = self._read_closing
        return spans

    def _read_closing(self) -> list[Span]:
        match = self._syntax.closing.match(self._text)
        if match is None:
            return []
        is_last = self._syntax.separator is None
        self._read = self._read_text if is_last else self._read_next
        # Without an end of its own a call has ended, too.
        return self._take(SpanKind.CLOSING, match.end()) or [Span(SpanKind.CLOSING, "")]

    def _read_next(self) -> list[Span]:
        """A further call, or the end of all."""
        if match := self._syntax.next_opening.match(self._text):
            return self._begun(match)
        if match := self._syntax.last_closing.match(self._text):
            self._read = self._read_text
            return self._take(SpanKind.CLOSING, match.end())
        return []
