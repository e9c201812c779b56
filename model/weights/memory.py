"""Memory for weights: aligned allocation in huge pages, and how much is free."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from hotcold.model.byte_sizes import size_text
from hotcold.model.errors import MemoryBudgetError
from hotcold.model.limits import group_folders, memory_nodes, read_text

HUGE_PAGE_BYTES = 2 << 20
SHARED_MEMORY = Path("/dev/shm")


def aligned_empty(
    shape: tuple[int, ...],
    dtype: DTypeLike,
    alignment: int = HUGE_PAGE_BYTES,
    huge_pages: bool = True,
) -> np.ndarray:
    """Return a new C-contiguous array whose first byte lies at a multiple of `alignment`.

    Content is zero. Pages are allocated on first write, on the NUMA node of the thread that fills
    them: for weights a thread of `TensorReader`, which is not pinned, so the service that reads
    them may run on another node. Pages are huge where the kernel allows, and small without
    `huge_pages`, for arrays of which only parts are written.
    Units:   `alignment` in bytes, a power of two
    Errors:  MemoryBudgetError where the system refuses so much
    """
    num_items = math.prod(shape)
    num_bytes = num_items * np.dtype(dtype).itemsize
    try:
        region = mmap.mmap(-1, num_bytes + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError):
        raise MemoryBudgetError(
            f"cannot reserve {size_text(num_bytes)}, {size_text(available_bytes())} are free; "
            "free memory or use a smaller model"
        ) from None
    if num_bytes >= HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel built without huge pages
            region.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(region, np.uint8)
    start = -whole.ctypes.data % alignment
    return whole[start : start + num_bytes].view(dtype).reshape(shape)


def free_shared_memory() -> int:
    """Return the free bytes of /dev/shm; 0 where there is none."""
    try:
        state = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return state.f_bavail * state.f_frsize


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be used without swapping.

    The least of: the system's, the NUMA nodes' of the cpuset, and what each cgroup's limit leaves.
    The page cache counts as free: the kernel gives it up where memory is needed.
    """
    free = _meminfo("MemAvailable", root)
    if (on_nodes := _free_on_nodes(root)) is not None:
        free = min(free, on_nodes)
    for limit_bytes, folder in _cgroup_limits(root):
        stats = read_numbers(folder / "memory.stat")
        prefix = "total_" if "total_inactive_file" in stats else ""
        cache = sum(stats.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
        used = _first_number(folder, "memory.current", "memory.usage_in_bytes")
        free = min(free, max(0, limit_bytes - used + cache))
    return free


def usable_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory of this process's cgroup, in use or not."""
    limit_bytes = memory_limit(root)
    return _meminfo("MemTotal", root) if limit_bytes is None else limit_bytes


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the least limit of this process's cgroups in bytes; None without one."""
    least = min((limit_bytes for limit_bytes, _ in _cgroup_limits(root)), default=None)
    return least if least is not None and least < _meminfo("MemTotal", root) else None


# memory.high does not end a process, but slows it until it takes no more.
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")


def _cgroup_limits(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield the limits of this process's cgroups and their parents: bytes, and the folder."""
    for folder in group_folders("memory", root):
        for name in _LIMITS:
            with contextlib.suppress(OSError, ValueError):  # no such folder, or no limit ("max")
                yield int((folder / name).read_text()), folder


def _free_on_nodes(root: Path) -> int | None:
    """Bytes free or in the page cache on the cpuset's NUMA nodes; None where it allows all."""
    allowed = memory_nodes(root)
    free, is_limited = 0, False
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        node = read_numbers(folder / "meminfo", skip=2)  # "Node 0 MemFree:  123 kB"
        if allowed is None or int(folder.name.removeprefix("node")) in allowed:
            names = ("MemFree", "Active(file)", "Inactive(file)")
            free += sum(node.get(name, 0) for name in names) * 1024
        else:
            is_limited |= node.get("MemTotal", 0) > 0
    return free if is_limited else None


def _first_number(folder: Path, *names: str) -> int:
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            return int((folder / name).read_text())
    return 0


def read_numbers(path: Path, skip: int = 0) -> dict[str, int]:
    """Return the numbers of lines such as "file 123" or "MemFree: 12 kB", after `skip` words."""
    found = {}
    for line in read_text(path).splitlines():
        with contextlib.suppress(ValueError, IndexError):
            name, number = line.split()[skip:][:2]
            found[name.rstrip(":")] = int(number)
    return found


def _meminfo(name: str, root: Path) -> int:
    found = read_numbers(root / "proc/meminfo")
    if name in found:
        return found[name] * 1024
    raise MemoryBudgetError(f"/proc/meminfo has no {name} line; Linux 3.14 or later is needed")
