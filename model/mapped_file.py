"""Files mapped into memory, page by page, and whether a file is still the same one.

NumPy is imported on first use: commands import `file_state` and start without it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hotcold.model.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np


def file_state(path: str | Path) -> tuple[int, int, int, int]:
    """Return size, mtime and ctime in nanoseconds, and inode: compared without reading the file.

    A program that writes into a file can set mtime back, but not ctime. A copy has another state.
    Errors:  OSError
    """
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


class MappedFile:
    """The bytes of one file, mapped on first use. Errors: CheckpointError naming the file."""

    def __init__(self, path: Path):
        self.path = path
        self._data: np.ndarray | None = None
        self._region: mmap.mmap | None = None

    def view(self, start: int, end: int) -> np.ndarray:
        """Return the bytes `start` to `end`: uint8, read-only."""
        import numpy as np

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
        """Unload the whole pages of these bytes (MADV_DONTNEED); reading maps them again."""
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if self._region is not None and start < end:
            self._region.madvise(mmap.MADV_DONTNEED, start, end - start)

    def read_ahead(self, start: int, end: int) -> None:
        """Have the kernel read all these bytes now (MADV_WILLNEED)."""
        start = start // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end:
            self._open().madvise(mmap.MADV_WILLNEED, start, end - start)

    def advise_random(self, start: int, end: int) -> None:
        """Read single rows of these bytes from now on: the kernel reads nothing ahead."""
        start = start // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end:
            self._open().madvise(mmap.MADV_RANDOM, start, end - start)


def forget_pages(path: Path) -> None:
    """Drop the file's pages from the page cache, but for those mapped now."""
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
            if not os.fstat(stream.fileno()).st_size:
                raise CheckpointError(f"{path}: the file is empty; download it again")
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as problem:
        raise CheckpointError(f"{path}: cannot be mapped ({problem})") from None
