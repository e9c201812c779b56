"""What transformers makes and says, kept on disk: it is slow, and the same in every run."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np

_TESTS = Path(__file__).parent
_SOURCES = ("kept.py", "tiny_models.py", "tiny_checkpoint.py")
_PACKAGES = ("numpy", "safetensors", "torch", "transformers")


def digest_of(*parts: str | bytes) -> str:
    """Sixteen letters that other parts do not have."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(hashlib.sha256(data).digest())
    return found.hexdigest()[:16]


@functools.cache
def kept_folder() -> Path:
    """Of these sources and packages alone; below XDG_CACHE_HOME or ~/.cache."""
    sources = [(_TESTS / name).read_bytes() for name in _SOURCES]
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = base / "hotcold-tests" / f"kept-{digest_of(*sources, *map(version, _PACKAGES))}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def kept(name: str, make: Callable[[Path], object]) -> Path:
    """The file or folder `name`, which make(path) writes for the first process that asks.

    Nobody changes it.
    """
    place = kept_folder() / name
    if place.exists():
        return place
    with (kept_folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            with tempfile.TemporaryDirectory(dir=kept_folder()) as own:
                make(Path(own) / name)
                (Path(own) / name).rename(place)
    return place


def kept_array(name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """What `compute` returns, or returned to the first process that asked."""

    def make(path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, compute())

    found: np.ndarray = np.load(kept(f"{name}.npy", make))
    return found


def copy_kept(name: str, target: Path, make: Callable[[Path], object]) -> None:
    """Copy the folder `name` of `kept` to `target`, where it may be changed."""
    shutil.copytree(kept(name, make), target, dirs_exist_ok=True)
