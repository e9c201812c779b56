"""Splits an answer, as it comes, into thoughts, text and tool calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hotcold.actors.protocol.messages import TokenEvent
from hotcold.model.text.calls import CallSplitter, SpanKind
from hotcold.model.text.tools import CallSyntax

if TYPE_CHECKING:
    from hotcold.ui.api.logprobs import ContentLogprobs

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

    `calls` and `logprobs` are all of it that has come.
    """

    def __init__(
        self,
        syntax: CallSyntax | None,
        customs: Collection[str] = (),
        scored: ContentLogprobs | None = None,
    ) -> None:
        """`syntax` None: no calls. `customs`: custom tools. `scored` None: no logprobs."""
        self._calls = None if syntax is None else CallReader(syntax)
        self._customs = customs
        self._inputs: dict[int, InputReader] = {}  # by the number of their call
        self._scored = scored
        self._num_read = 0  # characters of all text
        self._begin: int | None = None  # of these, where the answer itself begins
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
        for part in self._parts(event):
            match part:
                case ReasoningPart(text):
                    self._thoughts.append(text)
                case TextPart(text):
                    if self._scored is not None:
                        part = part._replace(logprobs=self._scored.of(part))
                    self._texts.append(text)
                    self.logprobs += part.logprobs
                case CallPart(number, _, name):
                    if name in self._customs:
                        self._inputs[number] = InputReader()
                        part = part._replace(is_custom=True)
                    self.calls.append(part)
                case ArgumentsPart(number, text):
                    if number in self._inputs:
                        text = self._inputs[number].push(text)
                        part = ArgumentsPart(number, text)
                        if not text:
                            continue
                    call = self.calls[number]
                    self.calls[number] = call._replace(arguments=call.arguments + text)
            yield part

    def _parts(self, event: TokenEvent) -> list[Part]:
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
