"""The folder in which a user's running systems can be found; it is for that user alone.

Whoever came to the sockets in it could read what is asked. So it has mode 700, and one that is
another user's, or open to others, is never used.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hotcold.model.errors import UsageError

_LONGEST = 60  # bytes; with more, a socket's path could be too long for the system
_MODE = 0o700


def systems_folder() -> Path:
    """Where the folder is, whether it is there or not: below XDG_RUNTIME_DIR, else temporary.

    The one of another user, as `su` and `sudo` may leave it, is not for this one.
    """
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(given) and len(os.fsencode(given)) <= _LONGEST and _is_own_folder(given):
        return Path(given, "hotcold")
    temporary = os.environ.get("TMPDIR", "")
    if not os.path.isabs(temporary) or len(os.fsencode(temporary)) > _LONGEST:
        temporary = "/tmp"
    return Path(temporary, f"hotcold-{os.geteuid()}")


def own_folder() -> Path:
    """The folder, made where it was not there. Errors: UsageError where others may come in."""
    folder = systems_folder()
    try:
        folder.mkdir(mode=_MODE, exist_ok=True)
        found = folder.lstat()
    except OSError as problem:
        raise UsageError(f"{folder} cannot be used ({problem.strerror})") from None
    if refused := _refused(found):
        raise UsageError(
            f"{folder} {refused}, so no system is kept there; remove it, or name another folder "
            "in XDG_RUNTIME_DIR"
        )
    return folder


def found_folder() -> Path | None:
    """The folder where it is there and is this user's alone, else None."""
    folder = systems_folder()
    try:
        return None if _refused(folder.lstat()) else folder
    except OSError:
        return None


def may_be_running() -> bool:
    """Whether any system may be found."""
    folder = found_folder()
    return folder is not None and next(folder.glob("*.json"), None) is not None


def _is_own_folder(path: str) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _refused(found: os.stat_result) -> str:
    """Why a folder, looked at without following a link, is not to be trusted; "" where it is."""
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    if found.st_uid != os.geteuid():
        return f"belongs to another user ({found.st_uid})"
    mode = stat.S_IMODE(found.st_mode)
    return f"is open to others (mode {mode:o}, not {_MODE:o})" if mode & 0o077 else ""
