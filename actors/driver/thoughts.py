"""What a model thinks before it answers, told apart from the answer as both are written.

Stop texts, logprobs, grammars and budgets go by it, and so does everyone who reads the answer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from hotcold.model.text.call_syntax import CallSyntax
from hotcold.model.text.calls import Span, SpanKind
from hotcold.model.text.channels import BEFORE_ANSWER, FINAL, ChannelReader
from hotcold.model.text.chat_template import Thinking
from hotcold.model.text.tokenizer import Tokenizer

_TAIL_TOKENS = 32  # of a prompt, in which thoughts may have been begun or ended


class Thoughts(NamedTuple):
    """How one answer may begin: with thoughts, or within them."""

    way: Thinking
    are_open: bool  # the prompt ends with their begin mark
    header: str | None = None  # of an answer in channels: what the prompt has of its first one

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]) -> Thoughts | None:
        """For the answer to a prompt; None for models without, or if the prompt ended them."""
        if tokenizer is None or (way := tokenizer.thinking) is None:
            return None
        tail = tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        if way.are_channels:
            _, found, header = tail.rpartition(BEFORE_ANSWER)
            return cls(way, tail.endswith(way.begin), header if found else FINAL)
        if tail.endswith(way.end) and not way.may_reopen:
            return None
        return cls(way, tail.endswith(way.begin))


class _Place(Enum):
    """Where in an answer its text has come to."""

    BEGINNING = 1  # nothing, or what may begin thoughts
    THOUGHTS = 2
    END = 3  # white space behind thoughts
    ANSWER = 4


class ThoughtReader:
    """Splits an answer's text, as it comes, into thoughts, what follows them, and marks.

    White space around thoughts belongs to their marks. Thoughts that do not end are the whole
    answer. A call that is written within thoughts ends them.
    """

    def __init__(
        self,
        thoughts: Thoughts | None,
        syntax: CallSyntax | None = None,
        may_call: Callable[[str], bool] = lambda text: False,
    ) -> None:
        """`thoughts` None: there are none. What opens a call of `syntax` within them begins one
        where `may_call` says so of the text from there on.
        """
        self._way = None if thoughts is None else thoughts.way
        self._are_open = thoughts is not None and thoughts.are_open
        self._syntax, self._may_call = syntax if syntax and syntax.begin else None, may_call
        self._place = _Place.ANSWER if thoughts is None else _Place.BEGINNING
        self._text = ""  # not certain yet
        self._is_first = True  # no thought was returned yet

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is thought."""
        is_beginning = self._place is _Place.BEGINNING and self._are_open
        return is_beginning or self._place is _Place.THOUGHTS

    @property
    def has_answered(self) -> bool:
        """Whether some of the answer itself was written."""
        return self._place is _Place.ANSWER

    def push(self, text: str, is_last: bool = False, is_cut: bool = False) -> list[Span]:
        """What is certain after this further `text`; `is_cut`: more would follow the last.

        What may begin a mark is no thought then.
        """
        self._text += text
        spans: list[Span] = []
        place: _Place | None = None
        while place is not self._place:
            place = self._place
            if place is _Place.BEGINNING:
                spans += self._read_beginning(is_last and not is_cut)
            elif place is _Place.THOUGHTS:
                spans += self._read_thoughts(is_last and not is_cut)
            elif place is _Place.END and (rest := self._text.lstrip()):
                spans += self._take(SpanKind.MARK, len(self._text) - len(rest))
                self._place = _Place.ANSWER
        if self._place is _Place.ANSWER:
            spans += self._take(SpanKind.TEXT, len(self._text))
        elif self._place is _Place.END or is_last:
            spans += self._take(SpanKind.MARK, len(self._text))
        return spans

    def _take(self, kind: SpanKind, length: int) -> list[Span]:
        text, self._text = self._text[:length], self._text[length:]
        return [Span(kind, text)] if text else []

    def _read_beginning(self, is_last: bool) -> list[Span]:
        assert self._way is not None
        begin, text = self._way.begin, self._text.lstrip()
        if text.startswith(begin):
            self._place = _Place.THOUGHTS
            return self._take(SpanKind.MARK, len(self._text) - len(text) + len(begin))
        if is_last or not begin.startswith(text):
            self._place = _Place.THOUGHTS if self._are_open else _Place.ANSWER
        return []

    def _read_thoughts(self, is_last: bool) -> list[Span]:
        """The thoughts that are certain, with the white space and the mark around them."""
        assert self._way is not None
        spans: list[Span] = []
        if self._is_first:
            spans += self._take(SpanKind.MARK, len(self._text) - len(self._text.lstrip()))
        mark = self._way.end
        end, (call, is_whole) = self._text.find(mark), self._call()
        if end >= 0 and not 0 <= call < end:
            self._place = _Place.END
            return spans + self._thought(end, len(mark))
        if call >= 0 and is_whole:
            self._place = _Place.ANSWER
            return spans + self._thought(call, 0)
        if is_last:
            return spans + self._thought(len(self._text), 0)
        return spans + self._thought(call if call >= 0 else len(self._text) - self._num_held(mark))

    def _thought(self, length: int, mark: int | None = None) -> list[Span]:
        """The text up to there, without white space at its end, which may be the thoughts'.

        With a mark of so many characters behind it, it is that one's.
        """
        thought = len(self._text[:length].rstrip())
        spans = self._take(SpanKind.THOUGHT, thought)
        self._is_first &= not spans
        return spans if mark is None else spans + self._take(SpanKind.MARK, length - thought + mark)

    def _call(self) -> tuple[int, bool]:
        """Where a call begins, or may begin, and whether it does; -1 for nowhere."""
        if self._syntax is None:
            return -1, False
        at = 0
        while match := self._syntax.opening.search(self._text, at):
            if match.start() == len(self._text):
                break
            if match["whole"] is None:
                return match.start(), False
            if self._may_call(self._text[match.start() :]):
                return match.start(), True
            at = match.start() + 1
        return -1, False

    def _num_held(self, mark: str) -> int:
        """Characters at the text's end that may begin the mark."""
        lengths = range(len(mark) - 1, 0, -1)
        return next((size for size in lengths if self._text.endswith(mark[:size])), 0)


Reader = ThoughtReader | ChannelReader


def said(spans: Sequence[Span]) -> str:
    """The text of an answer itself, its calls included, in these spans."""
    return "".join(span.text for span in spans if span.kind is SpanKind.TEXT)


def said_after(reader: Reader, text: str) -> str:
    """What `text` would say of the answer, if it came next."""
    return said(copy.copy(reader).push(text))


def reader_of(
    thoughts: Thoughts | None, syntax: CallSyntax | None, may_call: Callable[[str], bool]
) -> Reader:
    """What splits an answer that may begin so, and call tools in a syntax."""
    if thoughts is not None and thoughts.header is not None:
        return ChannelReader(thoughts.header, may_be_calls=syntax is not None)
    return ThoughtReader(thoughts, syntax, may_call)
