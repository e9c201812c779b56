"""A cache of tokenizers that take seconds to build, as files of this user: checksum and JSON.

SentencePiece's vocabularies have no merges: to find half a million of them for Gemma's 262,144
pieces takes longer than reading the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import tokenizers

from hotcold.model.errors import first_line_of_any
from hotcold.numba_kernels.own_cache import own_folder, read_checked, write_checked

_VERSION = 3  # raise it when tokenizers are built in another way


def cached_tokenizer(key: str, build: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    """Return the cached tokenizer of `key`, or what `build` returns.

    `key` is a digest of all that it is built from. It is built again where the cached file is
    damaged, or no folder belongs to this user alone.
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
            write_checked(file, str(found.to_str()).encode())
    return found


def _read(file: Path) -> tokenizers.Tokenizer | None:
    """The file's tokenizer; None where the file is missing or damaged."""
    try:
        return tokenizers.Tokenizer.from_buffer(read_checked(file))
    except BaseException as problem:
        first_line_of_any(problem)
        return None
