"""Splits an answer, as it comes, into thoughts, text and tool calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hotcold.actors.protocol.messages import MARK, SAID, THOUGHT, TokenEvent
from hotcold.model.text.call_arguments import ArgumentsReader
from hotcold.model.text.call_syntax import CallSyntax
from hotcold.model.text.calls import CallSplitter, Span, SpanKind

if TYPE_CHECKING:
    from hotcold.ui.api.logprobs import ContentLogprobs

_APART = "\n\n"  # between two messages of one answer
_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Characters and whole escapes of a JSON string; a pair of surrogates is one.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\[^u]|\\u(?:[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u]))'
    r"|(?![dD][89abAB])[0-9a-fA-F]{4}))*"
)


class TextPart(NamedTuple):
    """Text beside calls; `at`: where it begins in the answer's whole text."""

    text: str
    at: int = 0
    logprobs: Sequence[dict[str, Any]] = ()


class ReasoningPart(NamedTuple):
    """Reasoning before the answer."""

    text: str


class CallPart(NamedTuple):
    """A call begins, the `number`-th of the answer."""

    number: int
    id: str
    name: str
    is_custom: bool = False
    arguments: str = ""  # of one in `AnswerReader.calls`, as far as they have come


class ArgumentsPart(NamedTuple):
    """More of a call's arguments, as JSON text, or of a custom tool's input."""

    number: int
    text: str


Part = ReasoningPart | TextPart | CallPart | ArgumentsPart


class InputReader:
    """Reads a custom tool's input out of a call's arguments, as they come."""

    def __init__(self) -> None:
        self._json = ""  # not read yet
        self._is_open = False  # within the string

    def push(self, more: str) -> str:
        """The input that is certain after this further piece of JSON."""
        self._json += more
        if not self._is_open and (match := _OPENING.match(self._json)):
            self._is_open, self._json = True, self._json[match.end() :]
        if not self._is_open:
            return ""
        end = _WHOLE.match(self._json).end()  # type: ignore[union-attr]  # matches ""
        found, self._json = self._json[:end], self._json[end:]
        text: str = json.loads(f'"{found}"', strict=False)
        # Half a pair of surrogates is no character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class AnswerReader:
    """Parses one answer incrementally, and holds what it has said; the system tells thoughts apart.

    White space around calls is dropped, and a call that is cut off before its arguments begin.
    `calls` and `logprobs` are all of it that has come.
    """

    def __init__(
        self,
        syntax: CallSyntax | None,
        schemas: Mapping[str, Any] | None = None,
        customs: Collection[str] = (),
        scored: ContentLogprobs | None = None,
    ) -> None:
        """`syntax` None: no calls. `schemas`: of the functions' arguments, by name. `customs`:
        custom tools. `scored` None: no logprobs.
        """
        self._syntax = syntax
        self._splitter = None if syntax is None else CallSplitter(syntax)
        self._schemas = schemas or {}
        self._arguments: ArgumentsReader | None = None  # of the call that has begun
        self._written = ""  # of these, not read yet
        self._customs = customs
        self._input = InputReader()  # of the last call, where that is of a custom tool
        self._scored = scored
        self._num_read = 0  # characters of all text
        self._at = 0  # of these, in what spans have come
        self._is_apart = False  # what comes next is of another message than what came
        self._blanks = ""  # before that, which a call may follow
        self._is_first = True  # no text was told since the answer or the last call began
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self.calls: list[CallPart] = []
        self.logprobs: list[dict[str, Any]] = []

    @property
    def said(self) -> str:
        """All text beside calls."""
        return "".join(self._texts)

    @property
    def thought(self) -> str:
        """All reasoning."""
        return "".join(self._thoughts)

    def push(self, event: TokenEvent) -> Iterator[Part]:
        """The parts that are certain after this further event."""
        if self._scored is not None:
            self._scored.add(event)
        for kind, text in event.split():
            if kind == SAID:
                yield from self._said(text)
            else:
                yield from self._ended()
                self._is_apart |= kind == MARK
                if kind == THOUGHT:
                    yield from self._thought(text)
            self._num_read += len(text)
            if kind != SAID:
                self._at = self._num_read
        if event.result is not None:
            yield from self._said("", True, event.result.finish_reason == "length")
            if not self.calls:
                yield from self._told(self._blanks, self._at - len(self._blanks))

    def _said(self, text: str, is_last: bool = False, is_cut: bool = False) -> Iterator[Part]:
        """More of the answer itself."""
        if self._splitter is None:
            yield from self._told(text, self._num_read)
        else:
            yield from self._split(self._splitter.push(text, is_last, is_cut))

    def _thought(self, text: str) -> Iterator[Part]:
        """More thoughts; those of two messages are apart."""
        told = f"{_APART}{text}" if self._is_apart and self._thoughts else text
        self._is_apart = False
        self._thoughts.append(told)
        yield ReasoningPart(told)

    def _ended(self) -> Iterator[Part]:
        """What comes next is no part of the text so far: thoughts, or a mark."""
        if self._splitter is not None:
            yield from self._split(self._splitter.end_text())
        self._blanks = ""

    def texts(self, event: TokenEvent) -> tuple[str, str]:
        """As `push`; returns what more is said, and thought."""
        parts = list(self.push(event))
        said = (part.text for part in parts if isinstance(part, TextPart))
        thought = (part.text for part in parts if isinstance(part, ReasoningPart))
        return "".join(said), "".join(thought)

    def _split(self, spans: Iterable[Span]) -> Iterator[Part]:
        """The text and the calls in these spans of what is said."""
        for kind, piece, name in spans:
            self._at += len(piece)
            if kind is SpanKind.TEXT:
                yield from self._beside_calls(piece, self._at)
                continue
            self._blanks = ""
            if kind is SpanKind.OPENING:
                yield self._begun(name)
            elif kind is SpanKind.ARGUMENTS:
                yield from self._argued(piece)
            elif kind is SpanKind.CLOSING:
                yield from self._argued(piece)
                self._arguments, self._is_first = None, True

    def _beside_calls(self, text: str, end: int) -> Iterator[Part]:
        """Text that ends at `end`, without the white space around calls."""
        text = self._blanks + text
        if self._is_first and self.calls:
            text = text.lstrip()
        at, said = end - len(text), text.rstrip()
        self._blanks = text[len(said) :]
        self._is_first = self._is_first and not said
        yield from self._told(said, at)

    def _told(self, text: str, at: int) -> Iterator[Part]:
        if text:
            if self._is_apart and self._texts:
                self._texts.append(_APART)
                yield TextPart(_APART, at)
            self._is_apart = False
            part = TextPart(text, at)
            if self._scored is not None:
                part = part._replace(logprobs=self._scored.of(part))
            self._texts.append(text)
            self.logprobs += part.logprobs
            yield part

    def _begun(self, name: str) -> CallPart:
        assert self._syntax is not None
        self._input = InputReader()
        self._arguments, self._written = self._syntax.form.reader(self._schemas.get(name)), ""
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        self.calls.append(CallPart(len(self.calls), call_id, name, name in self._customs))
        return self.calls[-1]

    def _argued(self, text: str) -> Iterator[Part]:
        """More of the last call's arguments, and what follows them."""
        if self._arguments is None or self._arguments.has_ended:
            return
        call, written = self.calls[-1], self._written + text
        length, told = self._arguments.push(written)
        self._written = written[length:]
        if call.is_custom:
            told = self._input.push(told)
        if told:
            self.calls[-1] = call._replace(arguments=call.arguments + told)
            yield ArgumentsPart(call.number, told)
