"""The folder in which a private Ray keeps its sockets and logs, for as long as its owner lives.

It is for its owner alone. What Ray makes in it is open to everybody: whoever came to the sockets
could read the object store, and have workers run what he likes.

The owner holds a lock on the folder, which the system lets go of when the process ends, in
whatever way. Whoever can take it may remove the folder.
"""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "hotcold-ray-"
_LONGEST_BASE = 45  # bytes; with more, a socket's path may be too long for the system
LONGEST_CHOSEN = 53  # bytes; with more, it is
_ENDING_S = 2.0  # for the last of Ray's processes to end, which may still write


class SessionFolder:
    """A new folder, locked by this process. Errors: OSError."""

    def __init__(self) -> None:
        self._lock = -1
        while self._lock < 0:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base_folder()))
            self._lock = _locked(self.path, wait=True)
            if self._lock < 0 and self.path.exists():
                self.path.rmdir()
                raise OSError(f"{self.path} cannot be locked")

    @property
    def temp_dir(self) -> Path:
        """What Ray is given for its temporary folder, which it would open to everybody."""
        return self.path / "ray"

    def remove(self) -> None:
        """Remove the folder with all that is in it, and let go of the lock; may be repeated."""
        if self._lock < 0:
            return
        deadline = time.monotonic() + _ENDING_S
        while self.path.exists():
            shutil.rmtree(self.path, ignore_errors=True)
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        os.close(self._lock)
        self._lock = -1

    @staticmethod
    def all() -> list[Path]:
        """The folders that there are now, whoever owns them."""
        return list(base_folder().glob(f"{PREFIX}*"))

    @staticmethod
    def remove_dead() -> None:
        """Remove this user's folders whose owners have ended without doing so."""
        for path in SessionFolder.all():
            lock = _locked(path, wait=False)
            if lock >= 0:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def base_folder() -> Path:
    """Where such folders are: as RAY_TMPDIR says, or the temporary folder if its name is short.

    It is made where it is not there. Errors:  OSError
    """
    if chosen := os.environ.get("RAY_TMPDIR"):
        folder = Path(chosen).absolute()
        if not folder.exists():
            folder.mkdir(parents=True)
        return folder
    base = tempfile.gettempdir()
    return Path(base if len(os.fsencode(base)) <= _LONGEST_BASE else "/tmp")


def _locked(path: Path, *, wait: bool) -> int:
    """A descriptor that holds the lock of this user's folder; -1 where it is not to be had."""
    lock = -1
    with suppress(OSError):
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        found = os.fstat(lock)
        # Another process may have removed the folder before it was locked here.
        if found.st_uid == os.geteuid() and os.path.samestat(found, os.stat(path)):
            return lock
    if lock >= 0:
        os.close(lock)
    return -1
