"""Tokens as text and bytes, and logprobs in the two forms of OpenAI's API."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Any

from hotcold.actors.protocol.messages import TokenEvent, TokenLogprob
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.ui.api.tools.reader import TextPart

MIN_LOGPROB = -9999.0  # JSON has no minus infinity


class TokenTexts:
    """Text and bytes of each token of a model, within a text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer all texts are empty."""
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """A token's bytes, which may be part of a character; of a special token its name."""
        if self._tokenizer is None:
            return b""
        if token_id not in self._known:
            self._known[token_id] = self._tokenizer.token_bytes(token_id)
        return self._known[token_id]

    def text_of(self, token_id: int) -> str:
        """A token's bytes as text; a part of a character is U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")


class ContentLogprobs:
    """Hands out the logprobs of an answer's text with the parts of it: joined they are the text.

    Those of thoughts, calls and what ends an answer belong to no part.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._waiting: deque[TokenLogprob] = deque()

    def add(self, event: TokenEvent) -> None:
        """Take those of the next event."""
        self._waiting += event.logprobs

    def of(self, part: TextPart) -> list[dict[str, Any]]:
        """The `logprobs` of a chat's next piece of text, one a token."""
        found = []
        while self._waiting and self._waiting[0].at < part.at + len(part.text):
            one = self._waiting.popleft()
            if one.at + len(self._texts.text_of(one.token_id)) > part.at:
                top = [self._scored(*alternative) for alternative in one.top]
                found.append(self._scored(one.token_id, one.logprob or 0.0) | {"top_logprobs": top})
        return found

    def _scored(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._texts.text_of(token_id),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(self._texts.bytes_of(token_id)),
        }


class CompletionLogprobs:
    """The `logprobs` of a completion, piece by piece, with the tokens' offsets in the text."""

    def __init__(self, texts: TokenTexts) -> None:
        """Offsets count characters from here on, the prompt's too where it is echoed."""
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def piece(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The next tokens'. The first of a prompt has null for its logprob."""
        found: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for token in tokens:
            logprob = token.logprob
            found["tokens"].append(self._texts.text_of(token.token_id))
            found["token_logprobs"].append(None if logprob is None else max(logprob, MIN_LOGPROB))
            found["top_logprobs"].append(None if logprob is None else self._top(token))
            found["text_offset"].append(self._num_chars)
            self._num_chars += len(self._decoder.decode(self._texts.bytes_of(token.token_id)))
        return found

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the one that stands here. Of equal texts the likelier one."""
        found: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob or 0.0)):
            text = self._texts.text_of(token_id)
            found.setdefault(text, max(logprob, MIN_LOGPROB))
        return found
