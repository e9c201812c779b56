"""Memory for weights: aligned allocation in huge pages, and how much is free."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import DTypeLike

from model.errors import MemoryBudgetError

HUGE_PAGE_BYTES = 2 << 20
SHARED_MEMORY = Path("/dev/shm")


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


def free_shared_memory() -> int:
    """Bytes that /dev/shm has free."""
    state = os.statvfs(SHARED_MEMORY)
    return state.f_bavail * state.f_frsize


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be used without swapping: the system's, capped by the cgroups'."""
    free = _meminfo("MemAvailable", root)
    for limit_bytes, folder, used in _cgroup_limits(root):
        try:
            used_bytes = int((folder / used).read_text())
            lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            stats = {name: int(value) for name, value in lines}
        except (OSError, ValueError):
            continue
        prefix = "total_" if "total_inactive_file" in stats else ""
        cache = sum(stats.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
        free = min(free, max(0, limit_bytes - used_bytes + cache))
    return free


def usable_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that there are for this process's cgroup, in use or not."""
    total = _meminfo("MemTotal", root)
    return min([total, *(limit_bytes for limit_bytes, _, _ in _cgroup_limits(root))])


# Of a cgroup version: its line in /proc/self/cgroup, its place, and the files of limit and use.
_CGROUP_VERSIONS = [
    ("0::", "sys/fs/cgroup", "memory.max", "memory.current"),
    (":memory:", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
]


def _cgroup_limits(root: Path) -> Iterator[tuple[int, Path, str]]:
    """Limits of this process's cgroup and of those above it: bytes, folder, the file of its use.

    In a container the path may be the host's, which is not to be seen: then its top counts.
    """
    try:
        own = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        own = []
    for mark, top, limit, used in _CGROUP_VERSIONS:
        inner = [line.partition(mark)[2].strip("/") for line in own if mark in line]
        path = PurePosixPath(inner[0] if inner else "")
        for each in (path, *path.parents):
            folder = root / top / each
            with contextlib.suppress(OSError, ValueError):  # no such folder, or no limit ("max")
                yield int((folder / limit).read_text()), folder, used
            if str(each) == ".":
                break


def _meminfo(name: str, root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise MemoryBudgetError(f"/proc/meminfo has no {name} line; Linux 3.14 or later is needed")
