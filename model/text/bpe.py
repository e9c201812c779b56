"""Tokenizers built from a vocabulary: GPT-2's byte-level BPE, and SentencePiece's BPE."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from hotcold.model.text.splittings import Splitting

_SPACE = "▁"
# Of a token: real ones have up to 256, and work on a token grows with the square of its length.
_MAX_CHARS = 1024
_NORMAL_FORMS = {"NFC": normalizers.NFC, "NFKC": normalizers.NFKC}


def byte_bpe(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], splitting: Splitting
) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer.

    Errors:  ValueError for a token that is too long; whatever the library raises
    """
    _require_short(vocab)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=dict(vocab), merges=list(merges), ignore_merges=splitting.whole_words)
    )
    if splitting.normal_form:
        tokenizer.normalizer = _NORMAL_FORMS[splitting.normal_form]()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *_splits(splitting.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            *_splits(splitting.letter_patterns),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _splits(patterns: Iterable[str]) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


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
    pieces: Pieces,
    add_prefix_space: bool,
    unknown: str | None = None,
    merges: Sequence[tuple[str, str]] | None = None,
    strips_after: Container[str] = (),
) -> tokenizers.Tokenizer:
    """Return SentencePiece's BPE of a vocabulary with its special tokens.

    Characters that are no piece fall back to bytes. Every text begins with a space where
    `add_prefix_space`, as SentencePiece adds one. `unknown` is the unknown token where no piece has
    that type. Without `merges` they follow from the scores. `strips_after`: as of `add_tokens`.
    Errors:  ValueError for a token that is too long; whatever the library raises
    """
    _require_short(pieces.texts)
    if merges is None:
        entries = zip(pieces.texts, pieces.kinds, pieces.scores, strict=True)
        merges = merges_of({text: float(score) for text, kind, score in entries if kind == NORMAL})
    named = pieces.of_kind(UNKNOWN)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: token_id for token_id, text in enumerate(pieces.texts)},
            merges=list(merges),
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
    special = [*pieces.of_kind(CONTROL), *named]
    add_tokens(tokenizer, special, pieces.of_kind(USER_DEFINED), strips_after)
    return tokenizer


def _require_short(texts: Iterable[str]) -> None:
    longest = max(map(len, texts), default=0)
    if longest > _MAX_CHARS:
        raise ValueError(f"a token has {longest} characters, more than {_MAX_CHARS}")


def add_tokens(
    tokenizer: tokenizers.Tokenizer,
    special: Sequence[str],
    others: Sequence[str],
    strips_after: Container[str] = (),
) -> None:
    """Match these tokens of the vocabulary in a text before it is cut into words.

    White space after one of `strips_after` is left out.
    """

    def added(texts: Sequence[str]) -> list[AddedToken]:
        return [AddedToken(one, normalized=False, rstrip=one in strips_after) for one in texts]

    tokenizer.add_special_tokens(added(special))
    tokenizer.add_tokens(added(others))


def add_ends(tokenizer: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Have `Tokenizer.encode` put `bos` before every text and `eos` after it; None adds nothing."""
    ends = [(text, tokenizer.token_to_id(text)) for text in (bos, eos) if text is not None]
    if not ends:
        return
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B"], special_tokens=list(dict(ends).items())
    )
