"""Answers that must match a grammar: llguidance says which tokens may come next."""

import json
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from hotcold.actors.protocol.messages import Grammar
from hotcold.model.errors import UsageError
from hotcold.model.text.tokenizer import Tokenizer

# One blank, or a new line with its indentation: small models write blanks for ever where they may.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"(?: |\n {0,24})"}


class Constraint:
    """One answer's place in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        """`matcher` is llguidance's, and this object's alone."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._bits = np.zeros(-(-vocab_size // 32), np.uint32)

    def masked(self, logits: np.ndarray) -> np.ndarray:
        """A copy of `logits` (V,) that is -inf where the grammar has no such token next.

        Errors:  UsageError where the grammar allows nothing, or became too complex
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._require_whole()
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size]
        if not allowed.any():
            raise UsageError("no token of the model can continue the answer by the grammar")
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token_id: int) -> bool:
        """Go on by a token; True where nothing can follow it. Errors: UsageError."""
        self._matcher.consume_token(token_id)
        self._require_whole()
        return bool(self._matcher.is_stopped())

    def _require_whole(self) -> None:
        if self._matcher.is_error():
            problem = _one_line(self._matcher.get_error())
            raise UsageError(f"the answer cannot follow the grammar any further: {problem}")


class Grammars:
    """Makes constraints for one model; its table of tokens is made at the first one."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Iterable[int]
    ) -> None:
        """`eos_ids` may come where the grammar allows the answer to end."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._table: Any = None
        self._making = threading.Lock()

    def constraint(self, grammar: Grammar) -> Constraint:
        """A constraint at the grammar's start.

        Errors:  UsageError for text that is no such grammar, or where llguidance is missing
        """
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise UsageError(
                "grammars need llguidance, which is not installed; pip install 'hotcold[ui]'"
            ) from None
        table = self._token_table()
        try:
            if grammar.kind == "json_schema":
                source = LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON_OPTIONS)
            else:
                source = LLMatcher.grammar_from_lark(grammar.text)
        except ValueError as problem:
            raise _refused(grammar, str(problem)) from None
        if grammar.frame:
            is_lark = grammar.kind != "json_schema"
            inner = {"lark_grammar": source} if is_lark else json.loads(source)["grammars"][0]
            frame = {"lark_grammar": grammar.frame}
            source = json.dumps({"grammars": [frame, {**inner, "name": "answer"}]})
        matcher = LLMatcher(table, source, log_level=0)
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        return Constraint(matcher, self._vocab_size)

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


class _Tokens:
    """What llguidance asks of a tokenizer. All that a text shows is text to a grammar, too.

    By itself llguidance takes all added tokens of the form <...> for special ones, which no text
    of a grammar matches: a model could not write <tool_call> as the token that it learned.
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


def _refused(grammar: Grammar, problem: str) -> UsageError:
    if grammar.kind == "calls":
        return UsageError(
            "the tools are too many, or their schemas too large, for calls to be held to them; "
            "send fewer of them"
        )
    name = "JSON schema" if grammar.kind == "json_schema" else "Lark grammar"
    return UsageError(f"the {name} cannot be used: {_one_line(problem)}")


def _one_line(problem: str, limit: int = 200) -> str:
    text = "".join(c if c.isprintable() else " " for c in problem)
    return " ".join(text.split())[:limit]
