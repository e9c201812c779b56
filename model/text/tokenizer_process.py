"""A model's tokenizer in a subprocess that can be killed: some take minutes, or for ever."""

from __future__ import annotations

import array
import os
import threading
from pathlib import Path

from hotcold.model.errors import HotcoldError, PromptError, ServiceError
from hotcold.model.text.subprocess_worker import (
    FailedError,
    Handler,
    RefusedError,
    SubprocessWorker,
)

_LIMIT_S = 600
_IDLE_S = 60  # then the subprocess ends, and frees the tokenizer's memory
_MAX_MEMORY_BYTES = 8 << 30
_ID = "I"  # of `array`: four bytes


class TokenizerProcess:
    """The tokenizer of the model at `path`; its subprocess starts with the first text."""

    def __init__(self, path: Path):
        payload = os.fsencode(path.absolute())
        self._worker = SubprocessWorker(__name__, payload, _MAX_MEMORY_BYTES, _IDLE_S)

    def encode(
        self, text: str, add_special_tokens: bool, cancelled: threading.Event | None = None
    ) -> list[int]:
        """As `Tokenizer.encode`, given up soon after `cancelled` is set.

        Errors:  PromptError; ServiceError where the subprocess ended
        """
        data = bytes([add_special_tokens]) + text.encode("utf-8", "surrogatepass")
        try:
            found = self._worker.request(data, _LIMIT_S, cancelled)
        except RefusedError as problem:
            raise PromptError(str(problem)) from None
        except FailedError as problem:
            raise ServiceError(f"the model's tokenizer failed: {problem}") from None
        return array.array(_ID, found).tolist()


def start(path: bytes) -> tuple[Handler, bytes]:
    """Return the subprocess's handler, which encodes texts for the model at `path`."""
    from hotcold.model.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_model(os.fsdecode(path))
    if tokenizer is None:
        raise ValueError("the model has no tokenizer any more")

    def encode(data: bytes) -> bytes:
        text = data[1:].decode("utf-8", "surrogatepass")
        try:
            return array.array(_ID, tokenizer.encode(text, bool(data[0]))).tobytes()
        except HotcoldError as problem:
            raise RefusedError(str(problem)) from None

    return encode, b""
