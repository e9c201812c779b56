"""Tokenizers built from a vocabulary: GPT-2's byte-level BPE, and SentencePiece's BPE."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from hotcold.model.text.split_patterns import LOWER, UPPER

_SPACE = "▁"
# Of a token: real ones have up to 256, and work on a token grows with the square of its length.
_MAX_CHARS = 1024
# The GPT-2 pattern is that of ByteLevel itself.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Splitting:
    """The pre-tokenizer: how text is cut into words before merges. Without a pattern, GPT-2's.

    `whole_words`: a word that is a token becomes that token, whatever merges would make of it.
    """

    pattern: str = ""
    single_digits: bool = False
    falcon: bool = False  # punctuation and three digits on their own
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


GPT2 = Splitting()
LLAMA3 = Splitting(_LLAMA3, whole_words=True, adds_bos=True)
QWEN2 = Splitting(_QWEN2, nfc=True)
# By the value of tokenizer.ggml.pre.
SPLITTINGS: dict[str, Splitting] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt", "jais"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), Splitting(single_digits=True)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Splitting(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), Splitting(_GPT4O)),
    "tekken": Splitting(_TEKKEN, whole_words=True, adds_bos=True),
    "falcon": Splitting(falcon=True),
}


def byte_bpe(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    splitting: Splitting,
    add_prefix_space: bool = False,
) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer.

    Errors:  ValueError for a token that is too long; whatever the library raises
    """
    _require_short(vocab)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=dict(vocab), merges=list(merges), ignore_merges=splitting.whole_words)
    )
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps = []
    if splitting.falcon:
        steps = [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=True),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    elif splitting.pattern:
        steps = [
            pre_tokenizers.Split(Regex(splitting.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
        ]
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if splitting.single_digits else []
        steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def merges_of(pieces: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the merges of SentencePiece's BPE: any two pieces that joined are a piece.

    The merge into the piece of the best score comes first; of one piece, the merge with the
    shortest left part.
    """
    found: list[tuple[str, str]] = []
    for piece in sorted(pieces, key=pieces.__getitem__, reverse=True):  # equals stay in order
        for cut in range(1, len(piece)):
            right = piece[cut:]
            if right in pieces:
                left = piece[:cut]
                if left in pieces:
                    found.append((left, right))
    return found


# Types of tokens, by SentencePiece's numbers, which GGUF has too.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


@dataclass(frozen=True)
class Pieces:
    """A vocabulary with the type and the score of each token; all three of one length."""

    texts: Sequence[str]
    kinds: Sequence[int]
    scores: Sequence[float]

    def of_kind(self, kind: int) -> list[str]:
        """Return the texts of one type."""
        return [text for text, own in zip(self.texts, self.kinds, strict=True) if own == kind]


def tokenizer_of_pieces(
    pieces: Pieces, add_prefix_space: bool, unknown: str | None = None
) -> tokenizers.Tokenizer:
    """Return SentencePiece's BPE of a vocabulary with its special tokens.

    Characters that are no piece fall back to bytes. Every text begins with a space where
    `add_prefix_space`, as SentencePiece adds one. `unknown` is the unknown token where no piece has
    that type.
    Errors:  ValueError for a token that is too long; whatever the library raises
    """
    _require_short(pieces.texts)
    entries = zip(pieces.texts, pieces.kinds, pieces.scores, strict=True)
    normal = {text: float(score) for text, kind, score in entries if kind == NORMAL}
    named = pieces.of_kind(UNKNOWN)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: token_id for token_id, text in enumerate(pieces.texts)},
            merges=merges_of(normal),
            unk_token=named[0] if named else unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    prefix = [normalizers.Prepend(_SPACE)] if add_prefix_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if add_prefix_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    add_tokens(tokenizer, [*pieces.of_kind(CONTROL), *named], pieces.of_kind(USER_DEFINED))
    return tokenizer


def _require_short(texts: Iterable[str]) -> None:
    longest = max(map(len, texts), default=0)
    if longest > _MAX_CHARS:
        raise ValueError(f"a token has {longest} characters, more than {_MAX_CHARS}")


def add_tokens(
    tokenizer: tokenizers.Tokenizer, special: Sequence[str], others: Sequence[str]
) -> None:
    """Match these tokens of the vocabulary in a text before it is cut into words."""
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in others])


def add_ends(tokenizer: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Have `Tokenizer.encode` put `bos` before every text and `eos` after it; None adds nothing."""
    ends = [(text, tokenizer.token_to_id(text)) for text in (bos, eos) if text is not None]
    if not ends:
        return
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B"], special_tokens=list(dict(ends).items())
    )
