"""Memory as Ray uses it: what its monitor keeps free, and /dev/shm for the arena.

Where less is free, Ray's memory monitor kills workers, our services among them. A raylet reads its
limits from its environment, and hands them on to its workers and jobs.

Ray takes /dev/shm page by page, and a full one is a signal, SIGBUS. So the space is reserved or
checked as a whole before anything is written.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.model.errors import MemoryBudgetError, ServiceError
from hotcold.model.weights.memory import (
    SHARED_MEMORY,
    available_bytes,
    free_shared_memory,
    usable_bytes,
)

MONITOR_EVERY_MS = "RAY_memory_monitor_refresh_ms"  # "0": there is no monitor
_THRESHOLD, _USUAL_THRESHOLD = "RAY_memory_usage_threshold", "0.95"  # of all memory, in use
_MIN_FREE = "RAY_min_memory_free_bytes"  # from how few on it kills, whatever the threshold
_MOUNTS = Path("/proc/self/mounts")
_RAYLET_PID = "RAY_RAYLET_PID"  # what a raylet tells its workers
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_MIN_STORE_BYTES = 80 << 20  # of an object store
_TRIAL_BYTES = 1 << 20  # more than Ray sends beside its object store
_LARGER = (
    f"make {SHARED_MEMORY} larger (mount -o remount,size=1g {SHARED_MEMORY}; in Docker "
    "--shm-size=1g; on Kubernetes a volume `emptyDir: {medium: Memory}` mounted there)"
)


def monitor_bytes() -> int:
    """Bytes that Ray's memory monitor keeps free; 0 for a private Ray, which has none."""
    is_ours = not (_is_in_ray() or os.environ.get("RAY_ADDRESS"))
    if os.environ.get(MONITOR_EVERY_MS, "0" if is_ours else "") == "0":
        return 0
    total = usable_bytes()
    kept = round(total * (1 - float(os.environ.get(_THRESHOLD, _USUAL_THRESHOLD))))
    least = int(os.environ.get(_MIN_FREE, "-1"))
    return kept if least < 0 else min(kept, least)


def _is_in_ray() -> bool:
    """Whether this process belongs to a Ray; one that has not imported Ray belongs to none."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def free_bytes() -> int:
    """Bytes that can be taken without swapping and without waking Ray's memory monitor."""
    return max(0, available_bytes() - monitor_bytes())


def object_store_bytes(arena_bytes: int = 0, bits_bytes: int = 0) -> int:
    """Shared memory of a private Ray: two arenas, the first with `bits_bytes` of predictors.

    One serves, the other is made when services change.
    """
    return max(_MIN_STORE_BYTES, 2 * arena_bytes) + bits_bytes


def require_shared_memory(num_bytes: int) -> None:
    """Raise MemoryBudgetError unless /dev/shm has `num_bytes` free."""
    free = free_shared_memory()
    if num_bytes > free:
        raise MemoryBudgetError(
            f"{num_bytes / 1e6:.0f} MB of shared memory are needed, and {SHARED_MEMORY} has "
            f"{free / 1e6:.0f} MB free; remove what is in it, or {_LARGER}"
        )


def reserve_object_store(raylet_pid: int) -> None:
    """Allocate all of /dev/shm that a raylet's object store may ever fill, where it can be seen.

    Errors:  MemoryBudgetError where /dev/shm is too small
    """
    for link in _stores(raylet_pid):
        with open(link, "r+b") as store:
            num_bytes = os.fstat(store.fileno()).st_size
            try:
                os.posix_fallocate(store.fileno(), 0, num_bytes)
            except OSError:
                require_shared_memory(num_bytes)  # its error says how much is missing
                raise


def require_object_store(num_bytes: int) -> None:
    """Fail as `put_arena` of `num_bytes` would, in a moment: loading before it may take minutes.

    Errors:  as `put_arena`
    """
    if not is_reserved(int(os.environ.get(_RAYLET_PID, "0"))):
        import ray  # a command reckons before it imports Ray

        require_shared_memory(num_bytes)
        require_in_memory(ray.get(ray.put(np.zeros(_TRIAL_BYTES, np.uint8))))


def put_arena(arena: np.ndarray) -> tuple[Any, np.ndarray]:
    """Put `arena` into the object store of this process's node: its ref, and the mapped array.

    Errors:  MemoryBudgetError where /dev/shm is full, ServiceError where Ray takes a disk instead
    """
    if not is_reserved(int(os.environ.get(_RAYLET_PID, "0"))):
        require_shared_memory(arena.nbytes)
    import ray

    ref = ray.put(arena)
    mapped: np.ndarray = ray.get(ref)  # its views keep the pages mapped
    require_in_memory(mapped)
    return ref, mapped


def is_reserved(raylet_pid: int) -> bool:
    """Whether all of a raylet's object store has its memory; False where it cannot be seen."""
    states = [link.stat() for link in _stores(raylet_pid)]
    return bool(states) and all(state.st_blocks * 512 >= state.st_size for state in states)


def _stores(raylet_pid: int) -> list[Path]:
    """The open files of a raylet's object store, where they can be seen from here."""
    found = []
    with suppress(OSError):
        for link in Path(f"/proc/{raylet_pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # the raylet has closed it meanwhile
                if os.readlink(link).startswith(f"{SHARED_MEMORY}/plasma"):
                    found.append(link)
    return found


def require_in_memory(arena: np.ndarray) -> None:
    """Raise ServiceError where `arena`, from the object store, is mapped from a disk."""
    file = _mapped_file(arena.ctypes.data)
    if file and _file_system(file) not in _IN_MEMORY:
        raise ServiceError(
            f"Ray has put shared memory into a file on disk, {file}: its object store is full, or "
            f"did not fit into {SHARED_MEMORY} when Ray started; start Ray with another "
            f"--object-store-memory, or {_LARGER} first"
        )


def _mapped_file(address: int) -> str:
    """The file that is mapped at an address of this process; "" where there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *file = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            name = file[0].removesuffix(" (deleted)") if file else ""
            return name if name.startswith("/") else ""  # such as [heap]
    return ""


def _file_system(file: str) -> str:
    """The kind of file system that holds `file`."""
    mounts = [line.split()[1:3] for line in _MOUNTS.read_text().splitlines()]
    holding = [mount for mount in mounts if Path(file).is_relative_to(mount[0])]
    return max(reversed(holding), key=lambda mount: len(mount[0]), default=["", ""])[1]
