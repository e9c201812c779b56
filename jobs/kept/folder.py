"""The folder of a user's registry of running systems; only that user may enter it.

The sockets in it ask for no key. So it has mode 700, and a folder of another user, or one that is
open to others, is never used.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hotcold.model.errors import UsageError

_LONGEST = 60  # bytes; with more, a socket's path could be too long for the system
_MODE = 0o700


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
