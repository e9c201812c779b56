"""Splits an answer, as it comes, into thoughts, text and tool calls."""

from __future__ import annotations

import uuid
from typing import NamedTuple

from hotcold.actors.protocol.messages import TokenEvent
from hotcold.model.text.calls import CallSplitter, SpanKind
from hotcold.model.text.tools import CallSyntax


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


class CallReader:
    """Parses one answer of `calls_grammar` incrementally.

    White space around calls is dropped, and a call that is cut off before its arguments begin.
    """

    def __init__(self, syntax: CallSyntax) -> None:
        self.num_calls = 0
        self._splitter = CallSplitter(syntax)
        self._num_read = 0  # characters of all text
        self._blanks = ""  # before these, which a call may follow
        self._is_first = True  # no text was returned since the answer or the last call began

    def push(self, text: str, is_last: bool = False, is_cut: bool = False) -> list[Part]:
        """The parts that are certain after this further `text`; `is_cut`: more would follow."""
        parts: list[Part] = []
        for kind, piece, name in self._splitter.push(text, is_last, is_cut):
            self._num_read += len(piece)
            if kind is SpanKind.TEXT:
                parts += self._say(piece)
                continue
            self._blanks = ""
            if kind is SpanKind.OPENING:
                self.num_calls += 1
                parts.append(CallPart(self.num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", name))
            elif kind is SpanKind.ARGUMENTS:
                parts.append(ArgumentsPart(self.num_calls - 1, piece))
            elif kind is SpanKind.CLOSING:
                self._is_first = True
        if is_last and self._blanks and not self.num_calls:
            parts.append(TextPart(self._blanks, self._num_read - len(self._blanks)))
        return parts

    def _say(self, text: str) -> list[Part]:
        """Text that was read last, without the white space around calls."""
        text = self._blanks + text
        at = self._num_read - len(text)
        if self._is_first and self.num_calls:
            at += len(text) - len(text.lstrip())
            text = text.lstrip()
        said = text.rstrip()
        self._blanks = text[len(said) :]
        self._is_first = self._is_first and not said
        return [TextPart(said, at)] if said else []


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
        is_cut = event.result is not None and event.result.finish_reason == "length"
        for part in self._calls.push(said, event.result is not None, is_cut):
            if isinstance(part, TextPart):
                part = part._replace(at=part.at + (self._begin or 0))
            parts.append(part)
        return parts
