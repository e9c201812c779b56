"""A file mapped into memory, of which parts are let go of again."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np

from hotcold.model.errors import CheckpointError


class MappedFile:
    """The bytes of one file, mapped on first use. Errors: CheckpointError naming the file."""

    def __init__(self, path: Path):
        self.path = path
        self._data: np.ndarray | None = None
        self._region: mmap.mmap | None = None

    def view(self, start: int, end: int) -> np.ndarray:
        """Return the bytes `start` to `end`: uint8, read-only."""
        if self._data is None:
            self._data = np.frombuffer(self._open(), np.uint8)
        if end > self._data.size:
            raise CheckpointError(f"{self.path}: became shorter while in use; download it again")
        return self._data[start:end]

    def _open(self) -> mmap.mmap:
        if self._region is None:
            self._region = mapped(self.path)
        return self._region

    def release(self, start: int, end: int) -> None:
        """Give up the whole pages among these bytes; they are mapped again if read."""
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if self._region is not None and start < end and hasattr(mmap, "MADV_DONTNEED"):
            self._region.madvise(mmap.MADV_DONTNEED, start, end - start)

    def read_ahead(self, start: int, end: int) -> None:
        """These bytes are wanted soon, all of them."""
        start = start // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end and hasattr(mmap, "MADV_WILLNEED"):
            self._open().madvise(mmap.MADV_WILLNEED, start, end - start)

    def read_apart(self, start: int, end: int) -> None:
        """Of these bytes only those that are looked at are read from now on, nothing ahead."""
        start = start // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end and hasattr(mmap, "MADV_RANDOM"):
            self._open().madvise(mmap.MADV_RANDOM, start, end - start)


def forget_pages(path: Path) -> None:
    """Let the kernel free what it keeps of a file in memory, but for what is mapped just now."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def mapped(path: Path) -> mmap.mmap:
    """Return the file mapped for reading. Errors: CheckpointError."""
    try:
        with path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path}: cannot be mapped ({problem})") from None
