"""What can happen to a running system: each kind of fault, done to its processes from outside."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

from benchmarks.limited_run import disk_cgroup, unlimit
from hotcold.actors.system import System
from hotcold.model.errors import HotcoldError

SHM = Path("/dev/shm")
SCALED, STARVED, SLOW_READS = "scaled", "out of memory", "slow reads"
_SHM_BYTES = 256 << 20  # of the /dev/shm that is ours alone, so that filling it harms nobody
_CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
_LIMIT_FILES = ("memory.limit_in_bytes", "memory.max")
_PRESSURE_BYTES = 64 << 20
_KILLED_S = 20.0
_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
_MOUNT_PRIVATELY = (1 << 14) | (1 << 18)  # MS_REC | MS_PRIVATE
# Takes memory until somebody is killed for it: who has more, and that is a service.
_EATER = """
import sys, time
sys.stdin.readline()
taken = bytearray(int(sys.argv[1]))
for at in range(0, len(taken), 4096):
    taken[at] = 1
time.sleep(1000)
"""


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `do` returns when what it did is over; recovery may take longer.

    `loses`: a service, always (True), perhaps (None) or never (False); how often the system allows
    that is bounded. `num_lost`: services at most. `rest_s`: seconds until the next of this kind.
    """

    name: str
    do: Callable[[System, dict[str, int], random.Random], None]
    loses: bool | None
    rest_s: float = 0.0
    num_lost: int = 1


def _service(processes: dict[str, int], chance: random.Random) -> int:
    return processes[chance.choice(sorted(set(processes) - {"driver"}))]


def _kill(system: System, processes: dict[str, int], chance: random.Random) -> None:
    os.kill(_service(processes, chance), signal.SIGKILL)


def _kill_two(system: System, processes: dict[str, int], chance: random.Random) -> None:
    for name in chance.sample(sorted(set(processes) - {"driver"}), 2):
        os.kill(processes[name], signal.SIGKILL)


def _stop(system: System, processes: dict[str, int], chance: random.Random) -> None:
    os.kill(_service(processes, chance), signal.SIGSTOP)


def _pause(process_ids: Iterable[int], chance: random.Random, longest_s: float) -> None:
    """Stop processes, and let them go on after a while."""
    process_ids = list(process_ids)
    for signal_number in (signal.SIGSTOP, signal.SIGCONT):
        for process_id in process_ids:
            with suppress(ProcessLookupError):  # given up as stuck, and ended
                os.kill(process_id, signal_number)
        if signal_number == signal.SIGSTOP:
            time.sleep(chance.uniform(0.05, longest_s))


def _pause_service(system: System, processes: dict[str, int], chance: random.Random) -> None:
    _pause([_service(processes, chance)], chance, 3.0)


def _pause_driver(system: System, processes: dict[str, int], chance: random.Random) -> None:
    _pause([processes["driver"]], chance, 2.0)


def _pause_all(system: System, processes: dict[str, int], chance: random.Random) -> None:
    _pause(processes.values(), chance, 4.0)


def _fill_shared_memory(system: System, processes: dict[str, int], chance: random.Random) -> None:
    """Leave nothing of /dev/shm while a service is replaced, which maps the arena anew."""
    state = os.statvfs(SHM)
    full = SHM / "full"
    with open(full, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_frsize)
        _kill(system, processes, chance)
        time.sleep(chance.uniform(0.5, 3.0))
        full.unlink()


def _scale(system: System, processes: dict[str, int], chance: random.Random) -> None:
    """One CPU service becomes two, two become one; what cannot be had is told, and all goes on."""
    count = sum(name.startswith("cpu") for name in processes)
    with suppress(HotcoldError):
        system.call("scale", 3 - count)


def _slow_reads(system: System, processes: dict[str, int], chance: random.Random) -> None:
    """The disk gives services hardly anything for a while: 10 kB/s to 10 MB/s."""
    services = {pid for name, pid in processes.items() if name != "driver"}
    file = next((file for pid in services for file in _bundle_files(pid)), None)
    if file is None:
        return  # all are being replaced
    with disk_cgroup(file, round(10 ** chance.uniform(4, 7))) as group:
        for pid in services:
            with suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))
        time.sleep(chance.uniform(0.5, 5.0))
        unlimit(group)
        for pid in services:
            with suppress(ProcessLookupError):
                (group.parent / "cgroup.procs").write_text(str(pid))


def _bundle_files(process_id: int) -> Iterator[Path]:
    """The files with neurons that a process has open."""
    links: list[Path] = []
    with suppress(OSError):
        links += Path(f"/proc/{process_id}/fd").iterdir()
    for link in links:
        with suppress(OSError):
            file = link.readlink()
            if file.name.startswith("bundles-"):
                yield file


def _take_memory(system: System, processes: dict[str, int], chance: random.Random) -> None:
    """The kernel kills a service for memory that its cgroup has not."""
    group = new_cgroup()
    if group is None:
        raise RuntimeError("a cgroup was to be had before")
    limit = next(group / name for name in _LIMIT_FILES if (group / name).exists())
    service = psutil.Process(_service(processes, chance))
    limit.write_text(str(_PRESSURE_BYTES))
    command = [sys.executable, "-S", "-c", _EATER, str(2 * _PRESSURE_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as eater:
        try:
            for process_id in (service.pid, eater.pid):
                (group / "cgroup.procs").write_text(str(process_id))
            assert eater.stdin is not None
            eater.stdin.write(b"\n")
            eater.stdin.flush()
            if psutil.wait_procs([service], timeout=_KILLED_S)[1]:
                raise RuntimeError("the kernel has killed nobody")
        finally:
            eater.kill()
    end_s = time.monotonic() + _KILLED_S
    while time.monotonic() < end_s:
        with suppress(OSError):  # until the last of its processes is gone
            group.rmdir()
            return
        time.sleep(0.05)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill -9", _kill, loses=True),
        Kind("kill -9 of two", _kill_two, loses=True, num_lost=2),
        Kind("SIGSTOP", _stop, loses=True),
        Kind("service paused", _pause_service, loses=None),
        Kind("driver paused", _pause_driver, loses=False),
        Kind("all paused", _pause_all, loses=False),
        Kind(SCALED, _scale, loses=False),
        Kind(SLOW_READS, _slow_reads, loses=False),
        Kind("kill -9, /dev/shm full", _fill_shared_memory, loses=True),
        # Killed so twice within a minute, a service is given up.
        Kind(STARVED, _take_memory, loses=True, rest_s=120.0),
    )
}


def new_cgroup() -> Path | None:
    """A new cgroup whose memory can be bounded; None where that is not allowed."""
    for top in _CGROUPS:
        with suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="hotcold-faults-", dir=top))
            if any((folder / name).exists() for name in _LIMIT_FILES):
                return folder
            folder.rmdir()
    return None


def own_shared_memory() -> bool:
    """Give this process, and those that it starts, a small /dev/shm of their own.

    To be called before there are threads. Returns False where that is not allowed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) or libc.mount(b"none", b"/", None, _MOUNT_PRIVATELY, None):
        return False
    size = f"size={_SHM_BYTES}".encode()
    return libc.mount(b"tmpfs", os.fsencode(SHM), b"tmpfs", 0, size) == 0


def possible_kinds() -> list[str]:
    """The kinds that can be had here. Changes /dev/shm; see `own_shared_memory`."""
    kinds = list(KINDS)
    if not own_shared_memory():
        kinds.remove("kill -9, /dev/shm full")
    group = new_cgroup()
    if group is None:
        kinds.remove(STARVED)
    else:
        group.rmdir()
    try:
        with disk_cgroup(Path(__file__), 1 << 20):
            pass
    except click.ClickException:
        kinds.remove(SLOW_READS)
    return kinds
