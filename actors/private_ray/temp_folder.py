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
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base_folder()))
            with suppress(FileNotFoundError):  # another process took it for a dead one's
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                # On a file system without locks nobody gets one, and nobody removes what is in use.
                with suppress(OSError):
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                if self.path.exists():
                    return
                os.close(self._lock)

    @property
    def temp_dir(self) -> Path:
        """Ray's `_temp_dir`, which it makes accessible to everybody."""
        return self.path / "ray"

    def remove(self) -> None:
        """Remove the folder with its content, and release the lock; idempotent."""
        deadline = time.monotonic() + _ENDING_S
        while self.path.exists() and time.monotonic() < deadline:
            shutil.rmtree(self.path, ignore_errors=True)
            time.sleep(0.01)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    @staticmethod
    def all() -> list[Path]:
        """All existing folders, of any owner."""
        return list(base_folder().glob(f"{PREFIX}*"))

    @staticmethod
    def remove_dead() -> None:
        """Remove this user's folders whose owning processes have ended."""
        for path in TempFolder.all():
            with suppress(OSError):  # no folder, another user's, in use, or removed meanwhile
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.fstat(lock).st_uid == os.geteuid():
                        shutil.rmtree(path, ignore_errors=True)
                finally:
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
