"""The formats before tokenizer.json: tokenizer.model, or vocab.json and merges.txt.

tokenizer.model is SentencePiece's ModelProto, read in part: pieces (1) of text (1), score (2) and
type (3); the kind of model in trainer_spec (2.3); add_dummy_prefix in normalizer_spec (3.3).
Source:  sentencepiece_model.proto; protobuf's encoding
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from hotcold.model.config.json_reader import read_bounded, read_json_object
from hotcold.model.errors import ConfigError, first_line_of_any
from hotcold.model.text.bpe import (
    NORMAL,
    Pieces,
    add_ends,
    add_tokens,
    byte_bpe,
    tokenizer_of_pieces,
)
from hotcold.model.text.chat_template import special_tokens
from hotcold.model.text.splittings import GPT2

MAX_BYTES = 64 << 20
_BPE = 2  # trainer_spec.model_type
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def legacy_tokenizer(directory: Path) -> tokenizers.Tokenizer | None:
    """Return the directory's tokenizer; None where it has none of these files.

    Errors:  ConfigError naming the file that is damaged or not supported
    """
    model, vocab = directory / "tokenizer.model", directory / "vocab.json"
    try:
        if model.exists():
            return _of_sentencepiece(model)
        if vocab.exists() and (directory / "merges.txt").exists():
            return _of_merges(vocab, directory / "merges.txt")
    except ConfigError:
        raise
    except BaseException as problem:
        reason = first_line_of_any(problem)
        raise ConfigError(f"{directory}: no tokenizer ({reason}); download it again") from None
    return None


def _of_sentencepiece(file: Path) -> tokenizers.Tokenizer:
    pieces, kind, add_prefix = read_sentencepiece(file)
    if kind != _BPE:
        raise ConfigError(
            f"{file}: is a SentencePiece model of kind {kind}, only BPE is supported; use a model "
            "with a tokenizer.json"
        )
    tokenizer = tokenizer_of_pieces(pieces, add_prefix)
    return _finished(tokenizer, file.parent, adds_bos=True)


def _of_merges(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    ids = read_json_object(vocab)
    if any(type(token_id) is not int or token_id < 0 for token_id in ids.values()):
        raise ConfigError(f"{vocab}: holds other things than token ids; download it again")
    lines = read_bounded(merges, MAX_BYTES, ConfigError, "download it again").decode().splitlines()
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in pairs):
        raise ConfigError(f"{merges}: has a line that is no pair; download it again")
    tokenizer = byte_bpe(ids, [(pair[0], pair[1]) for pair in pairs], GPT2)
    return _finished(tokenizer, vocab.parent, adds_bos=False)


def _finished(
    tokenizer: tokenizers.Tokenizer, directory: Path, adds_bos: bool
) -> tokenizers.Tokenizer:
    """Add the special tokens of tokenizer_config.json, and BOS and EOS where it asks for them."""
    names = special_tokens(directory)
    known = [text for text in names.values() if tokenizer.token_to_id(text) is not None]
    add_tokens(tokenizer, list(dict.fromkeys(known)), [])
    file = directory / "tokenizer_config.json"
    values: dict[str, Any] = read_json_object(file) if file.exists() else {}
    bos, eos = (
        names.get(name) if values.get(f"add_{name}", default) is True else None
        for name, default in (("bos_token", adds_bos), ("eos_token", False))
    )
    ends = [text if text in known else None for text in (bos, eos)]
    add_ends(tokenizer, *ends)
    return tokenizer


def read_sentencepiece(file: Path) -> tuple[Pieces, int, bool]:
    """Return a model's pieces, its kind, and whether it begins texts with a space.

    Errors:  ConfigError for a file that is damaged
    """
    texts, kinds, scores = [], [], []
    model_kind, add_prefix = 1, True
    try:
        content = read_bounded(file, MAX_BYTES, ConfigError, "download it again")
        for number, value in _fields(content):
            if number == 1 and isinstance(value, bytes):
                own = dict(_fields(value))
                texts.append(own.get(1, b"").decode())
                (score,) = struct.unpack("<f", own[2]) if 2 in own else (0.0,)
                scores.append(score)
                kinds.append(own.get(3, NORMAL))
            elif number == 2 and isinstance(value, bytes):
                model_kind = dict(_fields(value)).get(3, model_kind)
            elif number == 3 and isinstance(value, bytes):
                add_prefix = bool(dict(_fields(value)).get(3, 1))
    except (ValueError, AttributeError, TypeError, struct.error):
        raise ConfigError(f"{file}: is no SentencePiece model; download it again") from None
    if not texts:
        raise ConfigError(f"{file}: holds no pieces; download it again")
    return Pieces(texts, kinds, scores), model_kind, add_prefix


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: number, and a whole number or bytes. Errors: ValueError."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if size > len(data) - at:
            raise ValueError("a field ends beyond the message")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number does not end")
