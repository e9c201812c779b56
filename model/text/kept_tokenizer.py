"""Tokenizers that take seconds to build, kept as tokenizer.json in this user's cache.

A vocabulary of SentencePiece's has no merges: of Gemma's 262,144 pieces half a million are found,
which takes longer than reading the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import tokenizers

from hotcold.model.files.whole_file import write_whole
from hotcold.numba_kernels.own_cache import own_folder

_VERSION = 1  # another way to build gets another number


def kept_tokenizer(key: str, build: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    """Return what `build` does, from the cache where it was built before from the same `key`.

    `key` is a digest of all that it is built of. Without a folder of this user's alone, or with a
    damaged file in it, it is built.
    Errors:  those of `build`
    """
    try:
        folder = own_folder("tokenizers")
    except OSError:
        return build()
    file = folder / f"{key}-{_VERSION}-{tokenizers.__version__}.json"
    found = _read(file)
    if found is None:
        found = build()
        with contextlib.suppress(OSError):
            write_whole(file, str(found.to_str()).encode())
    return found


def _read(file: Path) -> tokenizers.Tokenizer | None:
    """The kept tokenizer; None where there is none that can be read."""
    try:
        return tokenizers.Tokenizer.from_buffer(file.read_bytes())
    except BaseException as problem:  # the library raises Exception, its core PanicException
        if isinstance(problem, KeyboardInterrupt | SystemExit):
            raise
        return None
