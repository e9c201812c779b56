"""Splits a model's reasoning from its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hotcold.actors.protocol.messages import Grammar
from hotcold.model.text.chat_template import Thinking
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.model.text.tools import CallSyntax
from hotcold.ui.api.tools.reader import CallReader, Part, ReasoningPart, TextPart

_TAIL_TOKENS = 32  # of a prompt, in which thoughts may have been begun or ended


class Thoughts(NamedTuple):
    """How one answer may begin: with thoughts, or within them."""

    tokenizer: Tokenizer
    way: Thinking
    are_open: bool  # the prompt ends with their begin tag

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]) -> Thoughts | None:
        """For the answer to a prompt; None for models without, or if the prompt ended them."""
        if tokenizer is None or (way := tokenizer.thinking) is None:
            return None
        tail = tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        if tail.endswith(way.end):
            return None
        return cls(tokenizer, way, tail.endswith(way.begin))

    def before(self, grammar: Grammar) -> Grammar:
        """The grammar after unconstrained thoughts."""
        end = re.sub(r"[!-/:;=?@\[-^`{-~]", r"\\\g<0>", self.way.end)
        begun = "thoughts blanks"
        if not self.are_open:
            begun = f"({json.dumps(self.way.begin)} {begun})?"
        frame = (
            f"start: {begun} @answer\n"
            f"thoughts[lazy]: /(.|\\n)*{end}/\n"
            "blanks: /[ \\n]{0,4}/\n"
        )  # fmt: skip
        return replace(grammar, frame=frame)

    def num_tokens(self, ids: Sequence[int]) -> int:
        """How many of an answer's tokens are thoughts, tags included."""
        ids, end = list(ids), self.tokenizer.token_id(self.way.end)
        if end in ids:  # fast, for any number of ids
            del ids[ids.index(end) + 1 :]

        def text(count: int) -> str:
            return self.tokenizer.decode(ids[:count], skip_special_tokens=False)

        whole = text(len(ids))
        if not (self.are_open or whole.lstrip().startswith(self.way.begin)):
            return 0
        low, high = 0, len(ids)
        while low < high and self.way.end in whole:  # the fewest tokens that hold the end
            middle = (low + high) // 2
            low, high = (low, middle) if self.way.end in text(middle) else (middle + 1, high)
        return high


class AnswerReader:
    """Parses one answer incrementally into reasoning, text and tool calls.

    White space around reasoning is dropped. Reasoning that does not end is the whole answer.
    """

    def __init__(self, thoughts: Thoughts | None, syntax: CallSyntax | None) -> None:
        """`thoughts` None: no reasoning; `syntax` None: no calls."""
        self._thoughts = thoughts
        self._calls = None if syntax is None else CallReader(syntax)
        self._text = ""  # not returned yet
        self._read = self._read_answer if thoughts is None else self._read_beginning
        self._is_first = True  # no reasoning was returned yet

    @property
    def num_calls(self) -> int:
        """How many calls have begun."""
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str, is_last: bool = False) -> list[Part]:
        """The parts that are certain after this further `text`."""
        self._text += text
        parts: list[Part] = []
        while True:
            read = self._read
            parts += read(is_last)
            if self._read == read:
                return parts

    def _read_beginning(self, is_last: bool) -> list[Part]:
        assert self._thoughts is not None
        begin, text = self._thoughts.way.begin, self._text.lstrip()
        if text.startswith(begin):
            self._text = text[len(begin) :]
            self._read = self._read_thoughts
        elif is_last or not begin.startswith(text):
            self._read = self._read_thoughts if self._thoughts.are_open else self._read_answer
        return []

    def _read_thoughts(self, is_last: bool) -> list[Part]:
        assert self._thoughts is not None
        end = self._thoughts.way.end
        if self._is_first:
            self._text = self._text.lstrip()
        at = self._text.find(end)
        if at >= 0:
            thought, self._text = self._text[:at].rstrip(), self._text[at + len(end) :]
            self._read = self._read_blanks
        elif is_last:
            thought, self._text = self._text.rstrip(), ""
        else:
            lengths = range(len(end) - 1, -1, -1)
            held = next(n for n in lengths if self._text.endswith(end[:n]))
            thought = self._text[: len(self._text) - held].rstrip()
            self._text = self._text[len(thought) :]
        self._is_first &= not thought
        return [ReasoningPart(thought)] if thought else []

    def _read_blanks(self, is_last: bool) -> list[Part]:
        self._text = self._text.lstrip()
        if self._text or is_last:
            self._read = self._read_answer
        return []

    def _read_answer(self, is_last: bool) -> list[Part]:
        text, self._text = self._text, ""
        if self._calls is not None:
            return self._calls.push(text, is_last)
        return [TextPart(text)] if text else []
