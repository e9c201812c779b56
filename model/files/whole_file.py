"""Writing a file so that others find all of it or none."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write `path`, and the folders above it, under another name first. Errors: OSError."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_first(path: Path, content: bytes) -> None:
    """Write `path` whole, unless somebody has: what is there first stays. Errors: OSError."""
    own = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        own.write_bytes(content)
        with suppress(FileExistsError):
            os.link(own, path)
    finally:
        own.unlink(missing_ok=True)
