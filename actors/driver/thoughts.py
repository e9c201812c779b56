"""What a model thinks before it answers, told apart from the answer as both are written.

Stop texts, logprobs, grammars and budgets go by it, and so does everyone who reads the answer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from hotcold.model.text.chat_template import Thinking
from hotcold.model.text.tokenizer import Tokenizer

_TAIL_TOKENS = 32  # of a prompt, in which thoughts may have been begun or ended


class Thoughts(NamedTuple):
    """How one answer may begin: with thoughts, or within them."""

    way: Thinking
    are_open: bool  # the prompt ends with their begin mark

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]) -> Thoughts | None:
        """For the answer to a prompt; None for models without, or if the prompt ended them."""
        if tokenizer is None or (way := tokenizer.thinking) is None:
            return None
        tail = tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        if tail.endswith(way.end):
            return None
        return cls(way, tail.endswith(way.begin))


class Piece(NamedTuple):
    """Text that has become certain: what is not the answer, and then what is."""

    before: str  # thoughts, with their marks and the white space around them
    thought: str  # the thoughts alone
    said: str


class _Place(Enum):
    """Where in an answer its text has come to."""

    BEGINNING = 1  # nothing, or what may begin thoughts
    THOUGHTS = 2
    END = 3  # white space behind thoughts
    ANSWER = 4


class ThoughtReader:
    """Splits an answer's text, as it comes, into thoughts and what follows them.

    White space around thoughts is dropped. Thoughts that do not end are the whole answer. A call
    that is written within thoughts ends them.
    """

    def __init__(
        self,
        thoughts: Thoughts | None,
        call_mark: str = "",
        may_call: Callable[[str], bool] = lambda text: False,
    ) -> None:
        """`thoughts` None: there are none. `call_mark` with a brace behind it begins a call where
        `may_call` says so of the text from there on.
        """
        self._way, self._are_open = thoughts or (Thinking("", ""), False)
        self._call_mark, self._may_call = call_mark, may_call
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

    def said_after(self, text: str) -> str:
        """What `text` would say of the answer, if it came next."""
        return copy.copy(self).push(text).said

    def push(self, text: str, is_last: bool = False, is_cut: bool = False) -> Piece:
        """What is certain after this further `text`; `is_cut`: more would follow the last.

        What may begin a mark is no thought then.
        """
        whole = self._text = self._text + text
        thought = ""
        place: _Place | None = None
        while place is not self._place:
            place = self._place
            if place is _Place.BEGINNING:
                self._read_beginning(is_last)
            elif place is _Place.THOUGHTS:
                thought += self._read_thoughts(is_last and not is_cut)
            elif place is _Place.END and (rest := self._text.lstrip()):
                self._text, self._place = rest, _Place.ANSWER
        before = whole[: len(whole) - len(self._text)]
        said = ""
        if self._place is _Place.ANSWER:
            said, self._text = self._text, ""
        elif self._place is _Place.END or is_last:
            before, self._text = whole, ""
        return Piece(before, thought, said)

    def _read_beginning(self, is_last: bool) -> None:
        begin, text = self._way.begin, self._text.lstrip()
        if text.startswith(begin):
            self._text, self._place = text[len(begin) :], _Place.THOUGHTS
        elif is_last or not begin.startswith(text):
            self._place = _Place.THOUGHTS if self._are_open else _Place.ANSWER

    def _read_thoughts(self, is_last: bool) -> str:
        """The thoughts that are certain."""
        if self._is_first:
            self._text = self._text.lstrip()
        end, call = self._text.find(self._way.end), self._call_at()
        if end >= 0 and not 0 <= call < end:
            thought, self._text = self._text[:end], self._text[end + len(self._way.end) :]
            self._place = _Place.END
        elif call >= 0 and self._text[call + len(self._call_mark) :].strip():
            thought, self._text = self._text[:call], self._text[call:]
            self._place = _Place.ANSWER
        elif is_last:
            thought, self._text = self._text, ""
        else:
            held = len(self._text) - call if call >= 0 else self._num_held()
            thought = self._text[: len(self._text) - held].rstrip()
            self._text = self._text[len(thought) :]
        thought = thought.rstrip()
        self._is_first &= not thought
        return thought

    def _call_at(self) -> int:
        """Where a call begins, or may begin; -1 for nowhere."""
        at = self._text.find(self._call_mark) if self._call_mark else -1
        while at >= 0:
            rest = self._text[at + len(self._call_mark) :].lstrip()
            if not rest or (rest[0] == "{" and self._may_call(self._text[at:])):
                break
            at = self._text.find(self._call_mark, at + 1)
        return at

    def _num_held(self) -> int:
        """Characters at the text's end that may begin a mark."""
        marks = [mark for mark in (self._way.end, self._call_mark) if mark]
        lengths = range(max(map(len, marks)) - 1, 0, -1)
        ends = (n for n in lengths if any(self._text.endswith(m[:n]) for m in marks if n < len(m)))
        return next(ends, 0)
