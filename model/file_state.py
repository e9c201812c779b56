"""Whether a file is still the one that was looked at, told without reading it."""

from __future__ import annotations

import os
from pathlib import Path


def file_state(path: str | Path) -> tuple[int, int, int, int]:
    """Size, times of the last write and of the last change in nanoseconds, and inode.

    Whoever writes into a file may set the first time back, but not the second. A copy of a file has
    another state, also on another host. Errors: OSError
    """
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
