"""The ids of long texts, in a process that can be ended: some tokenizers take minutes for them."""

from __future__ import annotations

import array
import os
import threading
from pathlib import Path

from hotcold.model.errors import HotcoldError, PromptError, ServiceError
from hotcold.model.text.apart import Answer, Apart, FailedError, RefusedError

_LIMIT_S = 600
_IDLE_S = 60  # of the process, which has a tokenizer in its memory
_MAX_MEMORY_BYTES = 8 << 30
_ID = "I"  # of `array`: four bytes


class LongTexts:
    """One model's tokenizer in another process, from the first text on."""

    def __init__(self, path: Path):
        """`path` is the model's."""
        self._process = Apart(__name__, os.fsencode(path.absolute()), _MAX_MEMORY_BYTES, _IDLE_S)

    def encode(
        self, text: str, add_special_tokens: bool, unwanted: threading.Event | None = None
    ) -> list[int]:
        """As `Tokenizer.encode`, given up soon after `unwanted` is set.

        Errors:  PromptError; ServiceError where the process ended
        """
        question = bytes([add_special_tokens]) + text.encode("utf-8", "surrogatepass")
        try:
            found = self._process.ask(question, _LIMIT_S, unwanted)
        except RefusedError as problem:
            raise PromptError(str(problem)) from None
        except FailedError as problem:
            raise ServiceError(f"the model's tokenizer failed: {problem}") from None
        return array.array(_ID, found).tolist()


def begin(path: bytes) -> tuple[Answer, bytes]:
    """What encodes texts with the tokenizer of the model at `path`."""
    from hotcold.model.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_model(os.fsdecode(path))
    if tokenizer is None:
        raise ValueError("the model has no tokenizer any more")

    def encoded(question: bytes) -> bytes:
        text = question[1:].decode("utf-8", "surrogatepass")
        try:
            return array.array(_ID, tokenizer.encode(text, bool(question[0]))).tobytes()
        except HotcoldError as problem:
            raise RefusedError(str(problem)) from None

    return encoded, b""
