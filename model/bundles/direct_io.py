"""Opens a file for direct I/O (O_DIRECT), where its file system supports it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.storage.neuron_file import PART_UNIT

PAGE_BYTES = 4096


class DirectFile(NamedTuple):
    """A descriptor, the unit of reads in bytes, and whether it is direct.

    Where the file system has no direct reads they go through the page cache, whose pages are
    dropped after each read: `keeps_pages` is then False.
    """

    descriptor: int
    unit: int
    keeps_pages: bool


def open_direct(path: Path) -> DirectFile:
    """Open a file for reading, direct where possible. Errors: OSError."""
    buffered = os.open(path, os.O_RDONLY)
    try:
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return DirectFile(buffered, PART_UNIT, False)
    page = aligned_empty((PAGE_BYTES,), "uint8", PAGE_BYTES, huge_pages=False)
    for unit in (PART_UNIT, PAGE_BYTES):
        try:
            if os.preadv(direct, [page[:unit].data], unit) == unit:
                os.close(buffered)
                return DirectFile(direct, unit, True)
        except OSError:
            continue
    os.close(direct)
    return DirectFile(buffered, PART_UNIT, False)
