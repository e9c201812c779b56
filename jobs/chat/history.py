"""What was typed, kept for the next conversation: a file for its user alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from hotcold.model.errors import UsageError

_MAX_BYTES = 1 << 20  # beyond that the older half is forgotten
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600


def history_path() -> Path:
    """The file, whether it is there or not: in the user's folder for what programs remember."""
    given = os.environ.get("XDG_STATE_HOME", "")
    state = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    return state / "hotcold" / "chat-history"


def open_history() -> Path:
    """Make the file where it is not there, and see that nobody else can read it; its path.

    Errors:  UsageError where it cannot be opened, or is another user's
    """
    path = history_path()
    try:
        path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _FILE_MODE)
        with open(descriptor, "r+b") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise UsageError(f"{path} is no file of yours")
            os.fchmod(descriptor, _FILE_MODE)
            if found.st_size > _MAX_BYTES:
                _forget_older(file)
    except OSError as error:
        raise UsageError(f"{path} cannot be used: {error.strerror}") from None
    return path


def _forget_older(file: BinaryIO) -> None:
    """Keep the last entries, which each begin with an empty line."""
    file.seek(-_MAX_BYTES // 2, os.SEEK_END)
    _, begin, kept = file.read().partition(b"\n\n")
    file.seek(0)
    file.truncate()
    file.write(begin and b"\n" + kept)
