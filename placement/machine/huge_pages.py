"""Whether memory that is allocated as weights are comes in huge pages, found by allocating some."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotcold.model.errors import MemoryBudgetError
from hotcold.model.weights.memory import aligned_empty

PROBE_BYTES = 64 << 20
_PAGE_BYTES = 4096
_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


@dataclass(frozen=True)
class HugePageProbe:
    """Of so many bytes allocated and written, so many are in huge pages."""

    huge_bytes: int
    num_bytes: int


def probe_huge_pages(
    num_bytes: int = PROBE_BYTES, smaps: Path = Path("/proc/self/smaps")
) -> HugePageProbe | None:
    """Allocate and touch `num_bytes` as weights are; None where memory or `smaps` is lacking.

    The system may have joined the mapping with others beside it, so what counts is what it gained.
    """
    try:
        array = aligned_empty((num_bytes,), np.uint8)
    except MemoryBudgetError:
        return None
    before = huge_bytes_around(array.ctypes.data, num_bytes, smaps)
    array[::_PAGE_BYTES] = 1
    after = huge_bytes_around(array.ctypes.data, num_bytes, smaps)
    if before is None or after is None:
        return None
    return HugePageProbe(min(max(0, after - before), num_bytes), num_bytes)


def huge_bytes_around(address: int, num_bytes: int, smaps: Path) -> int | None:
    """AnonHugePages of all mappings that reach into num_bytes from `address` on; None if unsaid."""
    try:
        lines = smaps.read_text().splitlines()
    except OSError:
        return None
    total, inside = None, False
    for line in lines:
        if found := _RANGE.match(line):
            start, end = (int(part, 16) for part in found.groups())
            inside = start < address + num_bytes and address < end
        elif inside and line.startswith("AnonHugePages:"):
            total = (total or 0) + int(line.split()[1]) * 1024
    return total
