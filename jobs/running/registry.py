"""The registry of running systems: a record each, and each server's Unix socket, in a folder.

Only its user may enter the folder, as the sockets in it ask for no key: it has mode 700, and one of
another user, or one that is open to others, is never used. The process of a system locks its
record. The kernel releases the lock when that process ends, in any way. So a record without a lock
is stale, and the next process that finds it removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hotcold.jobs.running.identity import Identity, is_same
from hotcold.model.errors import UsageError
from hotcold.model.files.atomic_write import part_of, remove_old_parts

_LONGEST = 60  # bytes; with more, a socket's path could be too long for the system
_MODE = 0o700
_SUFFIX, _SOCKET = ".json", ".sock"
_LONGEST_NAME = 32
_BACKLOG = 512


@dataclass(frozen=True)
class Record:
    """One running system, as other processes find it."""

    name: str
    pid: int  # of the server that holds it
    started: int = 0  # `start_of` that process: in another container its pid is another process
    url: str = ""  # where the server listens; "" where it is kept: for this user's commands alone
    socket: str = ""  # the name of the server's Unix socket
    model: str = ""  # as requests name it
    identity: Identity = field(default_factory=dict)
    # The values of options that were left open, once they are known.
    resolved: dict[str, Any] = field(default_factory=dict)

    @property
    def is_kept(self) -> bool:
        """Whether it was started by --keep; else it is one of `hotcold serve`."""
        return not self.url


class Registration:
    """What one server has in the registry: its socket, and a record of each loaded model.

    May be used by several threads. Errors: UsageError, OSError where the folder cannot be used
    """

    def __init__(self, name: str, url: str) -> None:
        """Listens at a socket of that name, or of that name with a number."""
        pid = os.getpid()
        self._server = Record("", pid, start_of(pid), url)
        self._changing = threading.Lock()
        self._locks: dict[str, tuple[Record, int]] = {}  # by model: its record, a descriptor
        self._folder = own_folder()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _locked(self._folder):
            self._stem = _free_name(self._folder, name)
            path = self._folder / f"{self._stem}{_SOCKET}"
            path.unlink(missing_ok=True)
            self.listener.bind(str(path))
            path.chmod(0o600)
            self.listener.listen(_BACKLOG)

    def add(self, model: str, identity: Identity, is_only: bool = False) -> None:
        """Add the record of a model that loads now.

        `is_only`: raise UsageError where another server has a system of that identity
        """
        with self._changing, _locked(self._folder):
            others = _remove_dead(self._folder)
            if is_only and any(is_same(identity, one.identity, one.resolved) for one in others):
                raise UsageError("another command has just started this system")
            name = _free_name(self._folder, model, self._stem)
            record = replace(
                self._server,
                name=name, model=model, identity=identity, socket=f"{self._stem}{_SOCKET}",
            )  # fmt: skip
            self._locks[model] = record, _write(self._folder, record)

    def publish(self, model: str, **changes: Any) -> None:
        """Replace a model's record by one with these changes, unless it was removed."""
        with self._changing:
            if model in self._locks:
                record, earlier = self._locks[model]
                record = replace(record, **changes)
                self._locks[model] = record, _write(self._folder, record)
                os.close(earlier)

    def remove(self, model: str) -> None:
        """Remove a model's record; may be repeated."""
        with self._changing:
            if model in self._locks:
                record, lock = self._locks.pop(model)
                (self._folder / f"{record.name}{_SUFFIX}").unlink(missing_ok=True)
                os.close(lock)

    def close(self) -> None:
        """Remove all of it, so that no command finds it; may be repeated."""
        for model in list(self._locks):
            self.remove(model)
        (self._folder / f"{self._stem}{_SOCKET}").unlink(missing_ok=True)


def start_of(pid: int) -> int:
    """When a process was started, in clock ticks since boot. Errors: OSError."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[19])


def running() -> list[Record]:
    """The running systems of this user, by name; stale records are removed."""
    folder = found_folder()
    if folder is None:
        return []
    found, stale = _read_all(folder)
    if stale:
        with suppress(OSError, UsageError), _locked(folder):
            return _remove_dead(folder)
    return found


def listed() -> list[Record]:
    """As `running`. Errors: UsageError for a folder that is not this user's alone."""
    if systems_folder().is_symlink() or systems_folder().exists():
        own_folder()
    return running()


def named(name: str, records: list[Record]) -> Record:
    """The running system of that name. Errors: UsageError."""
    for one in records:
        if one.name == name:
            return one
    names = ", ".join(one.name for one in records)
    others = f"these do: {names}" if names else "none does"
    raise UsageError(
        f"no system named {name!r} is running; {others} (those of a Ray cluster are not listed)"
    )


def systems_folder() -> Path:
    """The folder's path, whether it exists or not: in XDG_RUNTIME_DIR, else in TMPDIR or /tmp.

    One of another user, which `su` and `sudo` may leave in the environment, is not used.
    """
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(given) and len(os.fsencode(given)) <= _LONGEST and _is_own_folder(given):
        return Path(given, "hotcold")
    temporary = os.environ.get("TMPDIR", "")
    if not os.path.isabs(temporary) or len(os.fsencode(temporary)) > _LONGEST:
        temporary = "/tmp"
    return Path(temporary, f"hotcold-{os.geteuid()}")


def own_folder() -> Path:
    """The folder, created where needed. Errors: UsageError where others may enter it."""
    folder = systems_folder()
    try:
        folder.mkdir(mode=_MODE, exist_ok=True)
        found = folder.lstat()
    except OSError as problem:
        raise UsageError(
            f"{folder} cannot be used ({problem.strerror}); name another folder in XDG_RUNTIME_DIR"
        ) from None
    if refused := _refused(found):
        raise UsageError(
            f"{folder} {refused}, so no system is kept there; remove it, or name another folder "
            "in XDG_RUNTIME_DIR"
        )
    return folder


def found_folder() -> Path | None:
    """The folder if it exists and only this user may enter it, else None."""
    folder = systems_folder()
    try:
        return None if _refused(folder.lstat()) else folder
    except OSError:
        return None


def may_be_running() -> bool:
    """Whether the registry has any record."""
    folder = found_folder()
    return folder is not None and next(folder.glob("*.json"), None) is not None


def _is_own_folder(path: str) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _refused(found: os.stat_result) -> str:
    """Why a folder, by its lstat, is not trusted; "" where it is."""
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    if found.st_uid != os.geteuid():
        return f"belongs to another user ({found.st_uid})"
    mode = stat.S_IMODE(found.st_mode)
    return f"is open to others (mode {mode:o}, not {_MODE:o})" if mode & 0o077 else ""


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Within it no other process adds a system. Errors: OSError, UsageError."""
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


def _free_name(folder: Path, wanted: str, own: str = "") -> str:
    """A name that no system and no socket but `own` has; within `_locked`."""
    _remove_dead(folder)
    taken = {path.stem for end in (_SUFFIX, _SOCKET) for path in folder.glob(f"*{end}")} - {own}
    taken |= {path.stem for path in folder.glob(f"*{_SUFFIX}")}
    base = re.sub(r"[^\w.-]+", "-", wanted, flags=re.ASCII).strip(".-")[:_LONGEST_NAME] or "model"
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name


def _remove_dead(folder: Path) -> list[Record]:
    """Remove what ended processes have left; the running systems. Within `_locked`."""
    found, stale = _read_all(folder)
    used = {record.socket for record in found}
    # While a process ends, its socket may still listen when its record's lock is gone.
    ended = set()
    for path in stale:
        with suppress(OSError, ValueError, TypeError, AttributeError):
            ended.add(_read(path).socket)
        path.unlink(missing_ok=True)
    for path in folder.glob(f"*{_SOCKET}"):
        if path.name not in used and (path.name in ended or not _is_listening(path)):
            path.unlink(missing_ok=True)
    return found


def _read_all(folder: Path) -> tuple[list[Record], list[Path]]:
    """The running systems, and the stale records."""
    found, stale = [], []
    for path in sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stem):
        with suppress(OSError, ValueError, TypeError, AttributeError):  # it may end meanwhile
            if _is_locked(path):
                found.append(_read(path))
            else:
                stale.append(path)
    return found, stale


def _read(path: Path) -> Record:
    """A record's content; of one of another version what is known here."""
    known = {one.name for one in fields(Record)}
    values = json.loads(path.read_bytes()).items()
    record = Record(**{key: value for key, value in values if key in known})
    return replace(record, socket=record.socket or f"{path.stem}{_SOCKET}")


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


def _is_listening(path: Path) -> bool:
    """Whether a process listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except BlockingIOError:  # it has many to accept
            return True
        except OSError:
            return False
    return True
