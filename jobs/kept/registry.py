"""The registry of running systems: a record file and a Unix socket each, in the user's folder.

The process of a system locks its record. The kernel releases the lock when that process ends, in
any way. So a record without a lock is stale, and the next process that finds it removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hotcold.jobs.kept.identity import Identity
from hotcold.model.errors import UsageError
from hotcold.model.files.atomic_write import part_of, remove_old_parts

_SUFFIX, _SOCKET = ".json", ".sock"
_LONGEST_NAME = 32
_BACKLOG = 128


@dataclass(frozen=True)
class Record:
    """One running system, as other processes find it."""

    name: str
    pid: int  # of its daemon or server; 0: not known yet
    is_kept: bool  # by a daemon; else it is one of `hotcold serve`
    model: str  # as it is shown
    url: str  # where `hotcold serve` listens; "" without
    identity: Identity
    # The values of options that were left open, once they are known.
    resolved: dict[str, Any] = field(default_factory=dict)
    started: int = 0  # `start_of` that process: in another container its pid is another process


def start_of(pid: int) -> int:
    """When a process was started, in clock ticks since boot. Errors: OSError."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[19])


@dataclass
class Registration:
    """A system's record and socket, which this process has locked."""

    folder: Path
    record: Record
    lock: int  # a descriptor
    listener: socket.socket
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def publish(self, **changes: Any) -> None:
        """Replace the record by one with these changes, unless it was removed. Errors: OSError."""
        with self._changing:
            if self.lock < 0:
                return
            self.record = replace(self.record, **changes)
            earlier, self.lock = self.lock, _write(self.folder, self.record)
            os.close(earlier)

    def remove(self) -> None:
        """Remove record and socket; may be repeated."""
        with self._changing:
            if self.lock >= 0:
                _remove(self.folder, self.record.name)
                os.close(self.lock)
                self.lock = -1


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within it no other process registers a system. Errors: OSError, UsageError."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as problem:
            raise UsageError(
                f"{folder} cannot be locked ({problem.strerror}), so no system is kept there; name "
                "a folder of a local disk in XDG_RUNTIME_DIR"
            ) from None
        yield
    finally:
        os.close(lock)


def running(folder: Path) -> list[Record]:
    """The running systems, by name; stale records are removed. Not within `locked`."""
    found, has_stale = _read_all(folder)
    if has_stale:
        with suppress(OSError, UsageError), locked(folder):
            return remove_dead(folder)
    return found


def remove_dead(folder: Path) -> list[Record]:
    """As `running`, within `locked`."""
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(OSError):
            if not _is_locked(path):
                _remove(folder, path.stem)
    return _read_all(folder)[0]


def _read_all(folder: Path) -> tuple[list[Record], bool]:
    """The running systems, and whether there are stale records."""
    found, has_stale = [], False
    for path in sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stem):
        with suppress(OSError, ValueError, TypeError):  # it may end meanwhile
            if _is_locked(path):
                found.append(Record(**json.loads(path.read_bytes())))
            else:
                has_stale = True
    return found, has_stale


def is_running(folder: Path, record: Record) -> bool:
    """Whether the same system still runs."""
    return any((one.name, one.pid) == (record.name, record.pid) for one in running(folder))


def socket_path(folder: Path, name: str) -> Path:
    """The socket of the system of that name."""
    return folder / f"{name}{_SOCKET}"


def register(folder: Path, record: Record) -> Registration:
    """Register a system under its name, or that name with a number; within `locked`.

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
    return Registration(folder, record, _write(folder, record), listener)


def _write(folder: Path, record: Record) -> int:
    """Write a record atomically, locked before others see it; returns the lock."""
    place = folder / f"{record.name}{_SUFFIX}"
    remove_old_parts(place)
    path = part_of(place)
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, json.dumps(asdict(record)).encode())
        os.replace(path, place)
    except BaseException:
        os.close(lock)
        path.unlink(missing_ok=True)
        raise
    return lock


def _is_locked(path: Path) -> bool:
    """Whether the process that wrote a record lives. Errors: OSError where the record is gone."""
    lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        # It may have been replaced, by a locked one, before it was locked here.
        return not os.path.samestat(os.fstat(lock), path.stat())
    finally:
        os.close(lock)


def _remove(folder: Path, name: str) -> None:
    for path in (folder / f"{name}{_SUFFIX}", socket_path(folder, name)):
        path.unlink(missing_ok=True)
