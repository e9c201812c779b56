"""The tokenizer and the chat template of a GGUF file, from its metadata.

Source:  llama.cpp, src/llama-vocab.cpp; ggml/docs/gguf.md
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from hotcold.model.errors import ConfigError, first_line, shown
from hotcold.model.gguf.file import GgufFile, open_gguf
from hotcold.model.text.bpe import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Pieces,
    add_ends,
    add_tokens,
    byte_bpe,
    merges_of,
    tokenizer_of_pieces,
)
from hotcold.model.text.chat_template import ChatTemplate
from hotcold.model.text.end_tokens import END_TOKENS
from hotcold.model.text.splittings import GPT2, SPLITTINGS
from hotcold.model.text.tokenizer_cache import cached_tokenizer

_NO_VOCABULARY = ("none", "no_vocab")
_LARGE = 100_000  # tokens: their merges take over a second to find
_END_KEYS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}
_END_KEYS |= {"unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
# What to take where a file's vocabulary is of another kind.
_OTHER_KINDS = {
    "bert": "which models of embeddings have; hotcold runs models that write",
    "t5": "which encoders and decoders have; hotcold runs decoders alone",
    "rwkv": "RWKV's; take another model",
    "plamo2": "PLaMo's; take another model",
}
# By general.architecture: the tokens after which white space counts, where it does not after all
# others. GGUF has no place for what their tokenizer.json says.
_KEEPS_SPACES = {"phi3": ("<unk>", "<s>", "<|endoftext|>", "<|endofprompt|>")}


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

    def special(self) -> list[str]:
        """Control tokens, and those known to end answers that a file calls ordinary ones."""
        ends = [text for text, rule in END_TOKENS.items() if not rule.is_control]
        ordinary = [
            text for text in ends if text in self.ids and self.kinds[self.ids[text]] == NORMAL
        ]
        return [*self.of_kind(CONTROL), *ordinary]

    def strips_after(self) -> Container[str]:
        """The tokens after which white space is left out."""
        kept = _KEEPS_SPACES.get(str(self.file.metadata.get("general.architecture")))
        if kept is None:
            return ()
        return {*self.special(), *self.of_kind(USER_DEFINED)}.difference(kept)

    def merges(self) -> list[tuple[str, str]]:
        """The pairs of tokens that become one, the first first. Errors: ConfigError."""
        merges = self.file.strings("tokenizer.ggml.merges") or []
        return [_pair(self.file, merge) for merge in merges]

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
        makers = {"gpt2": _byte_level, "gemma4": _merged_pieces, "llama": _sentencepiece}
        make = makers.get(str(kind))
        if make is None:
            raise _unknown_kind(file, kind)
        if "tokenizer.ggml.merges" in file.metadata or len(vocabulary.texts) <= _LARGE:
            return make(vocabulary)
        return cached_tokenizer(file.header_digest, lambda: make(vocabulary))
    except (ValueError, OverflowError, TypeError) as problem:
        raise _damaged(file, problem) from None
    except Exception as problem:  # the library raises nothing narrower
        if type(problem) is Exception:
            raise _damaged(file, problem) from None
        raise


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


def begins_chats(path: str | Path) -> bool:
    """Whether conversations begin with BOS even if the template writes none, as with llama.cpp.

    So it is where the file itself says that texts do: publishers then leave it out of templates.
    """
    metadata = open_gguf(path).metadata
    says = metadata.get("tokenizer.ggml.add_bos_token") is True
    return says or metadata.get("tokenizer.ggml.model") == "gemma4"


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    name = vocabulary.get("pre", str, None)
    if name is not None and name not in SPLITTINGS:
        raise ConfigError(
            f"{vocabulary.file.path}: tokenizer.ggml.pre is {shown(name)}: hotcold does not know "
            "how that cuts texts into words; take the model's own files with a tokenizer.json, "
            "which says so, or look for a newer hotcold"
        )
    splitting = SPLITTINGS[name] if name is not None else GPT2
    tokenizer = byte_bpe(vocabulary.ids, vocabulary.merges() or _ranked(vocabulary), splitting)
    special = [*vocabulary.special(), *vocabulary.of_kind(UNKNOWN)]
    others = vocabulary.of_kind(USER_DEFINED)
    add_tokens(tokenizer, special, others, vocabulary.strips_after())
    return _finished(tokenizer, vocabulary, splitting.adds_bos)


def _ranked(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The merges of a vocabulary without: tiktoken's, where ids are ranks."""
    return merges_of({text: -vocabulary.ids[text] for text in vocabulary.of_kind(NORMAL)})


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    return _finished(_pieces(vocabulary, None, True), vocabulary, True)


def _merged_pieces(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Gemma 4's: pieces as SentencePiece's, merges as of BPE.

    Texts begin with BOS even if the file says no: its first files did (llama.cpp's pull request
    21500), and without it the model writes nonsense.
    """
    tokenizer = _pieces(vocabulary, vocabulary.merges() or None, False)
    add_ends(tokenizer, vocabulary.text_of("bos_token_id"), None)
    return tokenizer


def _pieces(
    vocabulary: _Vocabulary, merges: list[tuple[str, str]] | None, adds_prefix: bool
) -> tokenizers.Tokenizer:
    kinds = vocabulary.kinds.copy()
    kinds[[vocabulary.ids[text] for text in vocabulary.special()]] = CONTROL
    return tokenizer_of_pieces(
        Pieces(vocabulary.texts, kinds.tolist(), vocabulary.scores().tolist()),
        vocabulary.get("add_space_prefix", bool, adds_prefix),
        vocabulary.text_of("unknown_token_id"),
        merges,
        vocabulary.strips_after(),
    )


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
    left, right = merge[:1], ""
    if merge:
        rest, _, right = merge[1:].partition(" ")
        left += rest
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


def _unknown_kind(file: GgufFile, kind: Any) -> ConfigError:
    what = _OTHER_KINDS.get(kind) if isinstance(kind, str) else None
    instead = (
        "which is not supported (gpt2, llama and gemma4 are); take the model's own files with a "
        "tokenizer.json instead of this one"
    )
    return ConfigError(f"{file.path}: tokenizer.ggml.model is {shown(kind)}, {what or instead}")
