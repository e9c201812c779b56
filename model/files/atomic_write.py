"""Atomic writes: readers find all of a file or none of it, after a power loss too."""

from __future__ import annotations

import glob
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_OLD_S = 3600.0  # age of a partial file whose writer was killed


def write_atomic(path: Path, content: bytes) -> None:
    """Write `path`, making its folders, by way of a temporary name. Errors: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_atomic(path, content)


def replace_atomic(path: Path, content: bytes, mode: int = 0o666) -> None:
    """As `write_atomic`, in a folder that exists. Errors: OSError."""
    _write(path, content, mode, os.replace)


def write_if_absent(path: Path, content: bytes) -> None:
    """Write `path` unless it exists: the first writer's file stays. Errors: OSError."""
    with suppress(FileExistsError):
        _write(path, content, 0o666, os.link)


def part_of(path: Path) -> Path:
    """Return a temporary name beside `path` that no other writer has."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")


def sync_folder(folder: Path) -> None:
    """Flush new and removed names of a folder to the disk. Errors: OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes, mode: int, name: Callable[[Path, Path], None]) -> None:
    remove_old_parts(path)
    part = part_of(path)
    try:
        # O_EXCL: another program's file or link of that name is not written to.
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        name(part, path)
        sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def remove_old_parts(path: Path) -> None:
    """Remove partial files of killed writers: no write takes an hour."""
    ours = re.compile(re.escape(path.name) + r"\.[0-9a-f]+\.part")
    for part in path.parent.glob(f"{glob.escape(path.name)}.*.part"):
        with suppress(OSError):
            if ours.fullmatch(part.name) and time.time() - part.stat().st_mtime > _OLD_S:
                part.unlink()
