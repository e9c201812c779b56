"""The tokenizer and the chat template of a GGUF file, from its metadata.

Source:  llama.cpp, src/llama-vocab.cpp; ggml/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from hotcold.model.errors import ConfigError, first_line, shown
from hotcold.model.gguf.file import GgufFile, open_gguf
from hotcold.model.text.bpe import (
    CONTROL,
    GPT2,
    NORMAL,
    SPLITTINGS,
    UNKNOWN,
    USER_DEFINED,
    Pieces,
    add_ends,
    add_tokens,
    byte_bpe,
    tokenizer_of_pieces,
)
from hotcold.model.text.chat_template import ChatTemplate
from hotcold.model.text.tokenizer_cache import cached_tokenizer

_NO_VOCABULARY = ("none", "no_vocab")
_LARGE = 100_000  # tokens: their merges take over a second to find
_END_KEYS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}
_END_KEYS |= {"unk_token": "unknown_token_id", "pad_token": "padding_token_id"}


class _Vocabulary:
    """The tokens in the metadata. Errors: ConfigError, CheckpointError."""

    def __init__(self, file: GgufFile):
        self.file = file
        self.texts = _distinct(file.strings("tokenizer.ggml.tokens") or [])
        self.kinds = self._numbers("token_type", NORMAL)
        self.ids = {text: token_id for token_id, text in enumerate(self.texts)}

    def get(self, key: str, kind: type, default: Any) -> Any:
        """Return a value of the metadata. Errors: ConfigError for one of another type."""
        value = self.file.metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not default and type(value) is not kind:
            raise ConfigError(f"{self.file.path}: tokenizer.ggml.{key} is {shown(value)}")
        return value

    def text_of(self, key: str) -> str | None:
        """Return the text of the token whose id is the value of `key`; None without the key."""
        token_id = self.get(key, int, None)
        if token_id is None or token_id == 0xFFFFFFFF:  # llama.cpp writes it for none
            return None
        if not 0 <= token_id < len(self.texts):
            raise ConfigError(
                f"{self.file.path}: tokenizer.ggml.{key} is {token_id}, outside the vocabulary of "
                f"{len(self.texts)} tokens"
            )
        return self.texts[token_id]

    def of_kind(self, kind: int) -> list[str]:
        """Return the tokens' texts of one type."""
        return [self.texts[token_id] for token_id in np.flatnonzero(self.kinds == kind)]

    def scores(self) -> np.ndarray:
        """Return the tokens' scores; without any, falling in the order of ids."""
        if "tokenizer.ggml.scores" in self.file.metadata:
            return self._numbers("scores", 0)
        return -np.arange(len(self.texts), dtype=np.float64)

    def _numbers(self, key: str, default: float) -> np.ndarray:
        found = self.file.numbers(f"tokenizer.ggml.{key}")
        if found is None:
            return np.full(len(self.texts), default)
        if len(found) != len(self.texts):
            raise ConfigError(
                f"{self.file.path}: tokenizer.ggml.{key} has {len(found)} items for "
                f"{len(self.texts)} tokens; download it again"
            )
        return found


def gguf_tokenizer(path: str | Path) -> tokenizers.Tokenizer | None:
    """Return the model's tokenizer; None where the file has no vocabulary.

    Errors:  ConfigError for a kind of vocabulary that is not supported, or a damaged one;
             CheckpointError for a damaged file
    """
    file = open_gguf(path).first
    kind = file.metadata.get("tokenizer.ggml.model", "none")
    if kind in _NO_VOCABULARY or "tokenizer.ggml.tokens" not in file.metadata:
        return None
    vocabulary = _Vocabulary(file)
    try:
        if kind == "gpt2":
            return _byte_level(vocabulary)
        if kind == "llama" and len(vocabulary.texts) > _LARGE:
            return cached_tokenizer(file.header_digest, lambda: _sentencepiece(vocabulary))
        if kind == "llama":
            return _sentencepiece(vocabulary)
    except (ValueError, OverflowError, TypeError) as problem:
        raise _damaged(file, problem) from None
    except Exception as problem:  # the library raises nothing narrower
        if type(problem) is Exception:
            raise _damaged(file, problem) from None
        raise
    raise ConfigError(
        f"{path}: tokenizer.ggml.model is {shown(kind)}, which is not supported; supported: "
        "gpt2, llama"
    )


def gguf_chat_template(path: str | Path) -> ChatTemplate | None:
    """Return the model's chat template; None where it has none. Errors: ConfigError."""
    file = open_gguf(path).first
    text = file.metadata.get("tokenizer.chat_template")
    if text is None:
        return None
    if not isinstance(text, str):
        raise ConfigError(f"{path}: tokenizer.chat_template is {shown(text, 60)}, no text")
    vocabulary = _Vocabulary(file)
    tokens = {name: vocabulary.text_of(key) for name, key in _END_KEYS.items()}
    return ChatTemplate(text, str(path), {name: text for name, text in tokens.items() if text})


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    file = vocabulary.file
    name = vocabulary.get("pre", str, None)
    if name is not None and name not in SPLITTINGS:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.pre is {shown(name)}, which is not supported; "
            f"supported: {', '.join(SPLITTINGS)}"
        )
    splitting = SPLITTINGS[name] if name is not None else GPT2
    merges = [_pair(file, merge) for merge in file.strings("tokenizer.ggml.merges") or []]
    tokenizer = byte_bpe(
        vocabulary.ids, merges, splitting, vocabulary.get("add_space_prefix", bool, False)
    )
    special = [*vocabulary.of_kind(CONTROL), *vocabulary.of_kind(UNKNOWN)]
    add_tokens(tokenizer, special, vocabulary.of_kind(USER_DEFINED))
    return _finished(tokenizer, vocabulary, splitting.adds_bos)


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    kinds, scores = vocabulary.kinds.tolist(), vocabulary.scores().tolist()
    tokenizer = tokenizer_of_pieces(
        Pieces(vocabulary.texts, kinds, scores),
        vocabulary.get("add_space_prefix", bool, True),
        vocabulary.text_of("unknown_token_id"),
    )
    return _finished(tokenizer, vocabulary, True)


def _finished(
    tokenizer: tokenizers.Tokenizer, vocabulary: _Vocabulary, adds_bos: bool
) -> tokenizers.Tokenizer:
    """Add BOS and EOS as the metadata says; `adds_bos` where it says nothing."""
    adds_bos = vocabulary.get("add_bos_token", bool, adds_bos)
    adds_eos = vocabulary.get("add_eos_token", bool, False)
    add_ends(
        tokenizer,
        vocabulary.text_of("bos_token_id") if adds_bos else None,
        vocabulary.text_of("eos_token_id") if adds_eos else None,
    )
    return tokenizer


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.merges has {shown(merge, 60)}, which is no pair; "
            "download it again"
        )
    return left, right


def _distinct(texts: Sequence[str]) -> list[str]:
    """The texts, repeated ones with a number: a tokenizer has one id for a text."""
    seen: set[str] = set()
    found = []
    for token_id, text in enumerate(texts):
        unique = text if text not in seen else f"{text}<{token_id}>"
        seen.add(unique)
        found.append(unique)
    return found


def _damaged(file: GgufFile, problem: BaseException) -> ConfigError:
    reason = first_line(problem)
    return ConfigError(f"{file.path}: its vocabulary is damaged ({reason}); download it again")
