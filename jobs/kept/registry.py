"""The register of running systems: a record and a socket of each, in the user's folder.

Who holds a system holds a lock on its record. The kernel lets go of the lock when that process
ends, in whatever way: so a record whose lock can be had is of a system that is gone, and whoever
finds it removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hotcold.jobs.kept.identity import Identity
from hotcold.model.files.whole_file import part_of, remove_old_parts

_SUFFIX, _SOCKET = ".json", ".sock"
_LONGEST_NAME = 32
_BACKLOG = 128


@dataclass(frozen=True)
class Record:
    """One running system, as other processes find it."""

    name: str
    pid: int  # of the process that holds it; 0: not known yet
    is_kept: bool  # and ends by itself; else `hotcold serve` holds it
    model: str  # as it is shown
    url: str  # where `hotcold serve` listens; "" without
    identity: Identity
    # What options that were left open have become, once that is known.
    resolved: dict[str, Any] = field(default_factory=dict)
    started: int = 0  # when that process was, of `start_of`: its number may be another's elsewhere


def start_of(pid: int) -> int:
    """When a process was started, in the kernel's ticks since it runs. Errors: OSError."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[19])


@dataclass
class Claim:
    """The place of a system in the register, held by this process for as long as it lives."""

    folder: Path
    record: Record
    lock: int  # a descriptor
    listener: socket.socket

    def publish(self, **changes: Any) -> None:
        """Replace the record by one with these changes. Errors: OSError."""
        self.record = replace(self.record, **changes)
        earlier, self.lock = self.lock, _write(self.folder, self.record)
        os.close(earlier)

    def leave(self) -> None:
        """Be found no more; may be repeated."""
        if self.lock >= 0:
            _remove(self.folder, self.record.name)
            os.close(self.lock)
            self.lock = -1


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Within it no other process looks and then registers. Errors: OSError."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def running(folder: Path) -> list[Record]:
    """The systems that run, by name; what is left of others is removed. Not within `alone`."""
    found, is_whole = _look(folder)
    if not is_whole:
        with suppress(OSError), alone(folder):
            return remove_dead(folder)
    return found


def remove_dead(folder: Path) -> list[Record]:
    """As `running`, within `alone`."""
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            if not _is_held(path):
                _remove(folder, path.stem)
    return _look(folder)[0]


def _look(folder: Path) -> tuple[list[Record], bool]:
    """The systems that run, and whether there is nothing else."""
    found, is_whole = [], True
    for path in sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stem):
        with suppress(OSError, ValueError, TypeError):  # it may end meanwhile
            if _is_held(path):
                found.append(Record(**json.loads(path.read_bytes())))
            else:
                is_whole = False
    return found, is_whole


def is_running(folder: Path, record: Record) -> bool:
    """Whether the same system still runs."""
    return any((one.name, one.pid) == (record.name, record.pid) for one in running(folder))


def socket_path(folder: Path, name: str) -> Path:
    """Where a system of that name answers."""
    return folder / f"{name}{_SOCKET}"


def claim(folder: Path, record: Record) -> Claim:
    """Register a system under its name, or that name with a number; within `alone`.

    Errors:  OSError
    """
    taken = {one.name for one in remove_dead(folder)}
    base = re.sub(r"[^\w.-]+", "-", record.name, flags=re.ASCII).strip(".-")[:_LONGEST_NAME]
    base, number = base or "model", 2
    name = base
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    path = socket_path(folder, name)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(_BACKLOG)
    record = replace(record, name=name)
    return Claim(folder, record, _write(folder, record), listener)


def _write(folder: Path, record: Record) -> int:
    """Write a record whole, locked before anybody can see it; returns the lock."""
    place = folder / f"{record.name}{_SUFFIX}"
    remove_old_parts(place)
    path = part_of(place)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, json.dumps(asdict(record)).encode())
    os.replace(path, place)
    return lock


def _is_held(path: Path) -> bool:
    """Whether the process that wrote a record lives. Errors: OSError where it is gone."""
    lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        # It may have been replaced before it was locked here, by one that is held.
        return not os.path.samestat(os.fstat(lock), path.stat())
    finally:
        os.close(lock)


def _remove(folder: Path, name: str) -> None:
    for path in (folder / f"{name}{_SUFFIX}", socket_path(folder, name)):
        path.unlink(missing_ok=True)
