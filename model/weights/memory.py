"""Memory for weights: aligned allocation in huge pages, and how much is free."""

from __future__ import annotations

import contextlib
import math
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from model.errors import MemoryBudgetError

HUGE_PAGE_BYTES = 2 << 20


def aligned_empty(
    shape: tuple[int, ...],
    dtype: DTypeLike,
    alignment: int = HUGE_PAGE_BYTES,
    huge_pages: bool = True,
) -> np.ndarray:
    """Return a new C-contiguous array whose first byte lies at a multiple of `alignment`.

    Pages are taken on first write, so on the NUMA node of the thread that fills them: for weights a
    loading thread (`model.weights.tensor_reader`) of the service that reads them. Neither these
    threads nor the service's own are pinned, so the node may be another than the one they are read
    from. Pages are huge where the kernel allows, or small without `huge_pages`: for what is written
    here and there and must take no more memory than that. Content is zero.
    Units:   `alignment` in bytes, a power of two
    Errors:  MemoryBudgetError where the system refuses so much
    """
    num_items = math.prod(shape)
    num_bytes = num_items * np.dtype(dtype).itemsize
    try:
        region = mmap.mmap(-1, num_bytes + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError):
        raise MemoryBudgetError(
            f"cannot reserve {num_bytes / 1e9:.2f} GB, {available_bytes() / 1e9:.2f} GB are free; "
            "free memory or use a smaller model"
        ) from None
    if num_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without huge pages
            region.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(region, np.uint8)
    start = -whole.ctypes.data % alignment
    return whole[start : start + num_bytes].view(dtype).reshape(shape)


def available_bytes() -> int:
    """Return the bytes that can be used without swapping: the system's, capped by the cgroup's."""
    free = _meminfo_available()
    for limit, used, stat in _CGROUP_FILES:
        try:
            limit_bytes = int(Path(limit).read_text())
            used_bytes = int(Path(used).read_text())
            lines = (line.split() for line in Path(stat).read_text().splitlines())
            stats = {name: int(value) for name, value in lines}
        except (OSError, ValueError):
            continue  # no such cgroup version, or no limit ("max")
        prefix = "total_" if "total_inactive_file" in stats else ""
        cache = sum(stats.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
        free = min(free, max(0, limit_bytes - used_bytes + cache))
    return free


_CGROUP_FILES = [
    tuple(f"/sys/fs/cgroup/{name}" for name in ("memory.max", "memory.current", "memory.stat")),
    tuple(
        f"/sys/fs/cgroup/memory/{name}"
        for name in ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    ),
]


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise MemoryBudgetError("/proc/meminfo has no MemAvailable line; Linux 3.14 or later is needed")
