"""A file opened for direct reads, where its file system allows them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.storage.neuron_file import PART_UNIT

PAGE_BYTES = 4096


class DirectFile(NamedTuple):
    """A descriptor, the unit of reads, and whether the kernel keeps pages without being asked to.

    Direct reads in the file system's least unit; where it has none, through the page cache, whose
    pages are let go of after each read.
    """

    descriptor: int
    unit: int
    keeps_pages: bool


def open_direct(path: Path) -> DirectFile:
    """Open a file to be read. Errors: OSError."""
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
