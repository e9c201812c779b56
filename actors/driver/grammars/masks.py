"""Grammars that answers are held to: which tokens may come next, as llguidance finds them."""

import json
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hotcold.actors.driver.thoughts import Thoughts
from hotcold.actors.protocol.messages import Grammar
from hotcold.model.errors import UsageError, shown
from hotcold.model.text.channels import MESSAGE, WITH_ANSWER
from hotcold.model.text.tokenizer import Tokenizer

# One blank, or a new line with its indentation: small models write blanks for ever where they may.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"(?: |\n {0,24})"}

# How llguidance says what is wrong with a regex: it, marks under a part of it, the reason.
_MARKED = re.compile(r"regex parse error:\n    (.*)\n    ( *)\^.*\nerror: (.*)")

_MAX_PROBLEM_CHARS = 200  # of what is wrong with a grammar

# Of a grammar: 50 MB, and what it may take of the engine's thread, for each token and beside that.
_LIMITS: Any = {"max_lexer_states": 25_000}
_A_TOKEN_S, _ONCE_S = 0.001, 2.0  # a host that takes the core away for long counts, too
_BLANKS = "/[ \\n]{0,4}/"  # in Lark: between the end of thoughts and the answer

_CLASSES = {r"\d": "[0-9]", r"\w": r"[\w&&[\x{0}-\x{FFFF}]]"}  # of a regex


class Constraint:
    """One answer's place in its grammar, which is free while the model thinks.

    reads_thoughts: whether the grammar is that of the whole answer, with its thoughts

    Ambiguous grammars take longer from token to token, and all requests wait meanwhile: one that
    has taken far more of its thread's time than grammars do is ended.
    """

    def __init__(self, table: Any, vocab_size: int, ways: list[Any], after: Any = None) -> None:
        """`ways`: llguidance matchers of this object's own, by any of which the answer may go on.

        `after`: the one by which it goes on after thoughts, at its start; `table`: its tokens.
        """
        self._table = table
        self._ways = ways
        self._after = after
        self.reads_thoughts = after is None
        self._vocab_size = vocab_size
        self._bits = np.zeros(-(-vocab_size // 32), np.uint32)
        self._left_s = _ONCE_S  # that the grammar may take now

    def masked(self, logits: np.ndarray) -> np.ndarray:
        """A copy of `logits` (V,) with -inf for each token that the grammar does not allow next.

        Errors:  UsageError where the grammar allows nothing, or became too complex
        """
        self._left_s += _A_TOKEN_S
        found = np.zeros_like(self._bits)
        with self._timed():
            for way in self._ways:
                way.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
                found |= self._bits
        self._require_valid()
        allowed = np.unpackbits(found.view(np.uint8), bitorder="little")[: self._vocab_size]
        if not allowed.any():
            raise UsageError("no token of the model can continue the answer by the grammar")
        return np.where(allowed, logits, np.float32(-np.inf))

    def beginning(self, ids: list[int]) -> list[int]:
        """Those of `ids` that the grammar allows next, one after another, up to the first bad one.

        The answer's place stays where it is.
        """
        # In a copy, as an error would stay in the matcher.
        with self._timed():
            return ids[: max(way.deep_copy().validate_tokens(ids) for way in self._ways)]

    def accept(self, token_id: int) -> bool:
        """Advance by a token; True where none can follow it. Errors: UsageError."""
        with self._timed():
            for way in self._ways:
                way.consume_token(token_id)
        self._require_valid()
        return all(way.is_stopped() for way in self._ways)

    def takes_after_thoughts(self, text: str) -> bool:
        """Whether the answer that follows thoughts may begin with `text`."""
        ids = self._table.greedy_tokenize(text)
        with self._timed():
            return int(self._after.deep_copy().validate_tokens(ids)) == len(ids)

    def resume(self, text: str) -> None:
        """Go on after thoughts with an answer that begins with `text`. Errors: UsageError."""
        self._ways = [self._after]
        with self._timed():
            self._after.consume_tokens(self._table.greedy_tokenize(text))
        self._require_valid()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began_s = time.thread_time()
        yield
        self._left_s -= time.thread_time() - began_s

    def _require_valid(self) -> None:
        valid = [way for way in self._ways if not way.is_error()]
        if not valid:
            problem = _one_line(self._ways[0].get_error())
            raise UsageError(f"the answer cannot follow the grammar any further: {problem}")
        self._ways = valid
        if self._left_s < 0:
            raise UsageError(
                "the grammar takes too long for each token; write it with fewer ways to read one "
                "text"
            )


class Grammars:
    """Makes constraints for one model; builds its token table at the first one."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Iterable[int]
    ) -> None:
        """`eos_ids` may come where the grammar allows the answer to end."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._table: Any = None
        self._making = threading.Lock()

    def constraint(self, grammar: Grammar, thoughts: Thoughts | None = None) -> Constraint:
        """A constraint at the grammar's start; `thoughts` come before it.

        Errors:  UsageError for text that is no such grammar, or where llguidance is missing
        """
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise UsageError(
                "grammars need llguidance, which is not installed; pip install llguidance"
            ) from None
        table, size, limits = self._token_table(), self._vocab_size, LLParserLimits(**_LIMITS)
        source = _source_of(grammar)

        def matcher(source: str) -> Any:
            found = LLMatcher(table, source, log_level=0, limits=limits)
            if found.is_error():
                raise _grammar_error(grammar, found.get_error())
            return found

        is_lark = grammar.kind in ("lark", "calls")
        if thoughts is not None and thoughts.header is not None:
            if grammar.kind != "calls" and not thoughts.header.endswith(MESSAGE):
                source = _framed(WITH_ANSWER, source, is_lark)
            return Constraint(table, size, [matcher(source)])
        if thoughts is None:
            return Constraint(table, size, [matcher(source)])
        after = matcher(_framed(f"start: {_BLANKS} @answer", source, is_lark))
        if thoughts.are_open:
            return Constraint(table, size, [], after)
        mark = LLMatcher.grammar_from_lark(f"start: {_BLANKS} {json.dumps(thoughts.way.begin)}")
        return Constraint(table, size, [matcher(source), matcher(mark)], after)

    def _token_table(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        if self._tokenizer is None:
            raise UsageError("this model has no tokenizer, so no text; leave out the grammar")
        with self._making:
            if self._table is None:
                eos = self._eos_ids or None
                table = LLTokenizer(self._tokenizer.to_json(), self._vocab_size, eos)
                if any(map(table.is_special_token, self._tokenizer.added_texts)):
                    tokens = TokenizerWrapper(_Tokens(table, self._tokenizer))
                    table = LLTokenizer(tokens, self._vocab_size, eos)
                self._table = table
        return self._table


def _source_of(grammar: Grammar) -> str:
    """A grammar as llguidance takes it. Errors: UsageError."""
    from llguidance import LLMatcher

    try:
        if grammar.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON_OPTIONS)
        if grammar.kind != "regex":
            return LLMatcher.grammar_from_lark(grammar.text)
        if re.search(r"(?<!\\)(\\\\)*\\\Z", grammar.text):  # llguidance leaves it out
            raise ValueError("a backslash ends it")
        return LLMatcher.grammar_from_regex(with_usual_classes(grammar.text))
    except ValueError as problem:
        raise _grammar_error(grammar, str(problem)) from None


def _framed(frame: str, source: str, is_lark: bool) -> str:
    """The grammar as `@answer` of a Lark grammar."""
    inner = {"lark_grammar": source} if is_lark else json.loads(source)["grammars"][0]
    return json.dumps({"grammars": [{"lark_grammar": frame}, {**inner, "name": "answer"}]})


def with_usual_classes(regex: str) -> str:
    r"""`regex`, where \d is a digit of ASCII, and \w of the basic multilingual plane.

    Otherwise a model that would begin with an emoji goes on, byte by byte, to digits and letters
    that nobody means. What is left out of a negated class would be let in, so none of these change.
    """
    is_negated = [False]  # the classes around this place: whether that one or one around it is

    def changed(found: re.Match[str]) -> str:
        text = found[0]
        if text.startswith("["):
            is_negated.append(text.startswith("[^") or is_negated[-1])
        elif text == "]" and len(is_negated) > 1:
            is_negated.pop()
        return text if is_negated[-1] else _CLASSES.get(text, text)

    return re.sub(r"\\.|\[\^?\]?|\]", changed, regex, flags=re.DOTALL)


class _Tokens:
    """A tokenizer for llguidance, to which every token that shows as text is text.

    By itself llguidance takes all added tokens of the form <...> for special ones, which no text of
    a grammar matches: a model could not write <tool_call> as the token that it learned.
    """

    def __init__(self, table: Any, tokenizer: Tokenizer) -> None:
        """`table` is llguidance's own of the same tokenizer."""
        shown = tokenizer.added_texts
        ids = range(table.vocab_size)
        self.eos_token_id, self.bos_token_id = table.eos_token, None
        self.tokens = [
            shown[one].encode() if one in shown else table.decode_bytes([one]) for one in ids
        ]
        self.special_token_ids = [
            one for one in ids if table.is_special_token(one) and one not in shown
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        """The ids of a text."""
        return self._tokenizer.encode(text.decode(errors="replace"), False)


def _grammar_error(grammar: Grammar, problem: str) -> UsageError:
    if grammar.kind == "calls":
        return UsageError(
            "the tools are too many, or their schemas too large, for calls to be held to them; "
            "send fewer of them"
        )
    if grammar.kind == "regex":
        return UsageError(f"the regex {shown(grammar.text)} cannot be used: {_of_regex(problem)}")
    name = "JSON schema" if grammar.kind == "json_schema" else "Lark grammar"
    return UsageError(f"the {name} cannot be used: {_one_line(problem)}")


def _of_regex(problem: str) -> str:
    """What is wrong with a regex, and from where on."""
    marked = _MARKED.search(problem)
    if marked is None:
        return _one_line(problem.partition("(in regex): ")[2].partition("\n")[0] or problem)
    pattern, marks, why = marked.groups()
    rest = pattern[len(marks) :].replace("\\/", "/")  # llguidance escapes it
    return f"{why}, at {shown(rest, 40)}"


def _one_line(problem: str) -> str:
    text = "".join(c if c.isprintable() else " " for c in problem)
    return " ".join(text.split())[:_MAX_PROBLEM_CHARS]
