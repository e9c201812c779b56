"""Room for the arena in /dev/shm: Ray takes it page by page, and a full one is a signal, SIGBUS.

So what may be written there is taken as a whole, or looked for, before anything is written.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray

from hotcold.model.errors import MemoryBudgetError, ServiceError
from hotcold.model.weights.memory import SHARED_MEMORY, free_shared_memory

_MOUNTS = Path("/proc/self/mounts")
_RAYLET_PID = "RAY_RAYLET_PID"  # what a raylet tells its workers
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


def require_shared_memory(num_bytes: int) -> None:
    """Raise MemoryBudgetError where /dev/shm has not so many bytes free."""
    free = free_shared_memory()
    if num_bytes > free:
        raise MemoryBudgetError(
            f"{num_bytes / 1e6:.0f} MB of shared memory are needed, and {SHARED_MEMORY} has "
            f"{free / 1e6:.0f} MB free; remove what is in it, or make it larger (mount -o "
            f"remount,size=1g {SHARED_MEMORY}; in Docker --shm-size=1g)"
        )


def reserve_object_store(raylet_pid: int) -> None:
    """Take all of /dev/shm that a raylet's object store may ever fill.

    Errors:  MemoryBudgetError where it is not to be had. Nothing where the store cannot be seen.
    """
    for link in _stores(raylet_pid):
        with open(link, "r+b") as store:
            num_bytes = os.fstat(store.fileno()).st_size
            try:
                os.posix_fallocate(store.fileno(), 0, num_bytes)
            except OSError:
                require_shared_memory(num_bytes)  # says what is missing
                raise


def put_arena(arena: np.ndarray) -> tuple[Any, np.ndarray]:
    """Put `arena` into the object store of this process's node: its ref, and the mapped array.

    Errors:  MemoryBudgetError where /dev/shm is full, ServiceError where Ray takes a disk instead
    """
    if not is_reserved(int(os.environ.get(_RAYLET_PID, "0"))):
        require_shared_memory(arena.nbytes)
    ref = ray.put(arena)
    mapped: np.ndarray = ray.get(ref)  # its views keep the pages mapped
    require_in_memory(mapped)
    return ref, mapped


def is_reserved(raylet_pid: int) -> bool:
    """Whether all of a raylet's object store has its memory; False where it cannot be seen."""
    states = [link.stat() for link in _stores(raylet_pid)]
    return bool(states) and all(state.st_blocks * 512 >= state.st_size for state in states)


def _stores(raylet_pid: int) -> list[Path]:
    """The open files of a raylet's object store; none where they cannot be seen from here."""
    found = []
    with suppress(OSError):
        for link in Path(f"/proc/{raylet_pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # the raylet has closed it meanwhile
                if os.readlink(link).startswith(f"{SHARED_MEMORY}/plasma"):
                    found.append(link)
    return found


def require_in_memory(arena: np.ndarray) -> None:
    """Raise ServiceError where the pages of `arena`, from the object store, are a disk's."""
    file = _mapped_file(arena.ctypes.data)
    if file and _file_system(file) not in _IN_MEMORY:
        raise ServiceError(
            f"Ray has put shared memory into a file on disk, {file}: its object store is full, or "
            f"{SHARED_MEMORY} too small; start Ray with more --object-store-memory and a larger "
            f"{SHARED_MEMORY}"
        )


def _mapped_file(address: int) -> str:
    """The file that is mapped at an address of this process; "" where it is none."""
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
