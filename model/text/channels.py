"""Answers in channels, as gpt-oss writes them: messages, each with a header that says what it is.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>text
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"a": 1}<|call|>

Commentary to no one is text before calls.
Source:  OpenAI's "harmony response format"
"""

from __future__ import annotations

import re

from hotcold.model.text.calls import Span, SpanKind

MARKS = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>")
BEFORE_ANSWER = "<|start|>assistant"  # ends a prompt; the answer goes on with the rest of a header
THOUGHTS = "<|channel|>analysis<|message|>"
END = f"<|end|>{BEFORE_ANSWER}"
FINAL = "<|channel|>final<|message|>"
MESSAGE = "<|message|>"
_THINK = "<think>", "</think>"
_FORMAT = r"( ?(<\|constrain\|>)?json)?<\|message\|>"
_ANY_CHANNEL = r"<\|channel\|>(commentary|analysis)"
# Of a grammar in Lark: the header of the answer itself, and messages before it.
FINAL_IN_LARK = rf"/<\|channel\|>final{_FORMAT}/"
BEFORE_IN_LARK = (
    r"before[lazy]: /<\|channel\|>(%s)<\|message\|>(.|\n)*<\|end\|><\|start\|>assistant/" "\n"
)
WITH_ANSWER = f"start: before* {FINAL_IN_LARK} @answer\n{BEFORE_IN_LARK % 'analysis'}"
_BODY_ENDS = ("<|end|>", "<|start|>", "<|channel|>", "<|call|>", "<|return|>")
_HEADERS = (*MARKS, "assistant", "to=")  # what they begin with
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class ReadableText:
    """An answer's text for who shows all of it: without marks, thoughts as others write them."""

    def __init__(self) -> None:
        self._is_thinking = self._is_apart = self._has_begun = False

    def push(self, kind: SpanKind, text: str) -> str:
        """What is shown of more text of this kind."""
        if kind is SpanKind.MARK:
            self._is_apart = True
            return ""
        is_thought = kind is SpanKind.THOUGHT
        before = ""
        if is_thought != self._is_thinking:
            before = f"\n{_THINK[1]}\n\n" if self._is_thinking else f"{_THINK[0]}\n"
        elif self._is_apart and self._has_begun:
            before = "\n\n"
        self._is_thinking, self._is_apart, self._has_begun = is_thought, False, True
        return before + text


def split_readable(text: str) -> tuple[str, str]:
    """The thoughts and the rest of such a text."""
    thought, end, said = text.partition(_THINK[1])
    if not end or not thought.lstrip().startswith(_THINK[0]):
        return "", text
    return thought.strip().removeprefix(_THINK[0]).strip(), said.strip()


def call_in_lark(name: str) -> str:
    """The header of a call of a function; `name`: its pattern."""
    to = rf"to=functions\.{name}"
    return rf"/({_ANY_CHANNEL} {to}| {to}{_ANY_CHANNEL}){_FORMAT}/"


class ChannelReader:
    """Splits an answer's text, as it comes, into thoughts, what it says or calls, and marks.

    Calls of functions are told with their header, where there `may_be_calls`; others are thoughts.
    """

    def __init__(self, header: str = "", may_be_calls: bool = False) -> None:
        """`header`: what the prompt has of the first message's, after "assistant"."""
        self._may_be_calls = may_be_calls
        self.has_answered = False
        self._text = ""  # not certain yet
        self._kind: SpanKind | None = None  # of the message; None: within a header
        self._is_first = True  # nothing of the message was told yet
        self.push(header)

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is thought."""
        return self._kind is SpanKind.THOUGHT

    def push(self, text: str, is_last: bool = False, is_cut: bool = False) -> list[Span]:
        """The spans that are certain after this further text."""
        self._text += text
        spans: list[Span] = []
        while True:
            before = self._kind, len(self._text)
            spans += self._read_header() if self._kind is None else self._read_message()
            if (self._kind, len(self._text)) == before:
                break
        if is_last and self._text:
            is_said = self._kind is SpanKind.TEXT and not is_cut
            spans += self._take(SpanKind.TEXT if is_said else SpanKind.MARK, len(self._text))
        return spans

    def _take(self, kind: SpanKind, length: int) -> list[Span]:
        text, self._text = self._text[:length], self._text[length:]
        self.has_answered |= kind is SpanKind.TEXT and bool(text)
        return [Span(kind, text)] if text else []

    def _read_header(self) -> list[Span]:
        text = self._text.lstrip()
        if text and not any(one.startswith(text[: len(one)]) for one in _HEADERS):
            self._kind, self._is_first = SpanKind.TEXT, True  # there is none
            return []
        end = self._text.find(MESSAGE)
        if end < 0:
            return []
        header = self._text[:end]
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        end += len(MESSAGE)
        self._is_first = True
        is_call = recipient is not None and recipient[1].startswith("functions.")
        if is_call and self._may_be_calls:
            self._kind = SpanKind.TEXT
            start = min(at for at in (header.find("<|channel|>"), header.find("to=")) if at >= 0)
            marks = self._take(SpanKind.MARK, start)
            return marks + self._take(SpanKind.TEXT, end - start)
        is_thought = recipient is not None and recipient[1] != "assistant"
        is_thought |= channel is not None and channel[1] == "analysis"
        self._kind = SpanKind.THOUGHT if is_thought else SpanKind.TEXT
        return self._take(SpanKind.MARK, end)

    def _read_message(self) -> list[Span]:
        kind = self._kind or SpanKind.TEXT
        places = [at for mark in _BODY_ENDS if (at := self._text.find(mark)) >= 0]
        if not places:
            return self._told(kind, len(self._text) - self._num_held())
        spans = self._told(kind, min(places), is_whole=True)
        self._kind = None
        for mark in ("<|end|>", "<|call|>", "<|return|>"):
            if self._text.startswith(mark):
                spans += self._take(SpanKind.MARK, len(mark))
        return spans

    def _told(self, kind: SpanKind, length: int, is_whole: bool = False) -> list[Span]:
        """So much of a message; thoughts without the white space around them."""
        if kind is not SpanKind.THOUGHT:
            return self._take(kind, length)
        text = self._text[:length]
        blanks = len(text) - len(text.lstrip()) if self._is_first else 0
        spans = self._take(SpanKind.MARK, blanks)
        thought = text[blanks:].rstrip()
        self._is_first &= not thought
        spans += self._take(kind, len(thought))
        rest = length - blanks - len(thought) if is_whole else 0
        return spans + self._take(SpanKind.MARK, rest)

    def _num_held(self) -> int:
        """Characters at the text's end that may begin a mark."""
        starts = {mark[:size] for mark in _BODY_ENDS for size in range(1, len(mark))}
        return max((len(one) for one in starts if self._text.endswith(one)), default=0)
