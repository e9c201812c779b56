"""The temporary folder of a private Ray, for its sockets and logs.

Only its owner may enter it: Ray makes its sockets accessible to everybody, and through them one can
read the object store and run code in workers.

The owning process holds a lock on the folder, which the kernel releases when the process ends.
A process that gets the lock may remove the folder.
"""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "hotcold-ray-"
_MAX_DEFAULT_BYTES = 45  # of a path: with more, a socket's path may be too long for the system
MAX_CHOSEN_BYTES = 53  # with more, it is
_ENDING_S = 2.0  # Ray's last processes may still write


class TempFolder:
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
        """Ray's `_temp_dir`, which it makes accessible to everybody."""
        return self.path / "ray"

    def remove(self) -> None:
        """Remove the folder with its content, and release the lock; idempotent."""
        if self._lock < 0:
            return
        deadline = time.monotonic() + _ENDING_S
        while self.path.exists():
            shutil.rmtree(self.path, ignore_errors=True)
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        lock, self._lock = self._lock, -1
        if lock >= 0:  # no other thread has removed it meanwhile
            os.close(lock)

    @staticmethod
    def all() -> list[Path]:
        """All existing folders, of any owner."""
        return list(base_folder().glob(f"{PREFIX}*"))

    @staticmethod
    def remove_dead() -> None:
        """Remove this user's folders whose owning processes have ended."""
        for path in TempFolder.all():
            lock = _locked(path, wait=False)
            if lock >= 0:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def base_folder() -> Path:
    """The parent of these folders: RAY_TMPDIR, created if missing, or the temporary folder if its
    path is short enough, or /tmp. Errors: OSError.
    """
    if chosen := os.environ.get("RAY_TMPDIR"):
        folder = Path(chosen).absolute()
        if not folder.exists():
            folder.mkdir(parents=True)
        return folder
    base = tempfile.gettempdir()
    return Path(base if len(os.fsencode(base)) <= _MAX_DEFAULT_BYTES else "/tmp")


def _locked(path: Path, *, wait: bool) -> int:
    """A descriptor that holds the lock of this user's folder; -1 if it cannot be locked."""
    lock = -1
    with suppress(OSError):
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            if not wait:
                raise
            # On a file system without locks nobody gets one, and nobody removes what is in use.
        found = os.fstat(lock)
        # Another process may have removed the folder before it was locked here.
        if found.st_uid == os.geteuid() and os.path.samestat(found, os.stat(path)):
            return lock
    if lock >= 0:
        os.close(lock)
    return -1
