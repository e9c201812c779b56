"""A digest of all of a model's weights, equal only where they are the same to the last bit.

It takes as long as reading the model, so it is cached for this user with the state of the model's
files, and computed again when that changes. A copy has the same digest, on any host. Imports
little: every command sets `progress`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hotcold.model.errors import CheckpointError
from hotcold.model.mapped_file import file_state
from hotcold.numba_kernels.own_cache import own_folder

if TYPE_CHECKING:
    from hotcold.model.files.checkpoint import Checkpoint

OnBytes = Callable[[int, int], None]
_PIECE_BYTES = 4 << 20  # hashed by one thread; another number makes other digests
_MAX_THREADS = 8
_SHOWN_BYTES = 1 << 30  # from this size on a progress bar is shown
# The kernel's clock for files ticks at least so often: a write so long after the last one that was
# seen has another time.
_SETTLED_NS = 20_000_000
_known: dict[Path, tuple[str, str]] = {}  # in this process: state of the files, digest


def show_nothing(text: str) -> AbstractContextManager[OnBytes]:
    """Show no progress bar."""
    return nullcontext(lambda done, total: None)


# Shows a progress bar with a description; commands replace it.
progress: Callable[[str], AbstractContextManager[OnBytes]] = show_nothing


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model and their states: of each its name, then its `file_state`."""

    model: Path
    paths: tuple[Path, ...]
    states: tuple[tuple[str | int, ...], ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelFiles:
        """Read the states now. Errors: CheckpointError where a file is gone."""
        paths = tuple(checkpoint.files())
        return cls(checkpoint.path, paths, _states(paths))

    def require_unchanged(self) -> None:
        """Raise CheckpointError where a file has changed since."""
        if _states(self.paths) != self.states:
            raise CheckpointError(
                f"{self.model}: its files have changed meanwhile; try again once nobody writes them"
            )

    @property
    def digest(self) -> str:
        """Equal while the files are untouched; another for any copy."""
        return hashlib.sha256(json.dumps(self.states).encode()).hexdigest()

    @property
    def changed_ns(self) -> int:
        """When the last of them was written or changed, nanoseconds since 1970."""
        return max(int(time) for state in self.states for time in state[2:4])


def _states(paths: tuple[Path, ...]) -> tuple[tuple[str | int, ...], ...]:
    try:
        return tuple((path.name, *file_state(path)) for path in paths)
    except OSError as problem:
        text = f"{problem.filename}: cannot be read ({problem.strerror})"
        raise CheckpointError(text) from None


def weights_digest(files: ModelFiles) -> str:
    """Return the digest of all tensors' bytes, in order of their names: 64 hexadecimal digits.

    Errors:  CheckpointError where the files are not in the states of `files`, or unreadable
    """
    place, state = files.model.resolve(), files.digest
    found = _known.get(place, ("", ""))
    if found[0] != state:
        with _locked(place) as cached:
            found = _read(cached)
            if found[0] != state:
                found = state, _hashed(files)
                _write(cached, *found)
        _known[place] = found
    files.require_unchanged()
    return found[1]


def _hashed(files: ModelFiles) -> str:
    """SHA-256 of the pieces' SHA-256, tensor by tensor in the order of their names."""
    from concurrent.futures import ThreadPoolExecutor

    from hotcold.model.files.checkpoint import Checkpoint

    wait_ns = files.changed_ns + _SETTLED_NS - time.time_ns()
    if 0 < wait_ns <= _SETTLED_NS:
        time.sleep(wait_ns / 1e9)
    checkpoint, whole = Checkpoint(files.model), hashlib.sha256()
    names = checkpoint.names()
    total, done = sum(checkpoint.stored_bytes(name).size for name in names), 0
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    bar = progress if total >= _SHOWN_BYTES else show_nothing
    with (
        bar(f"reading {files.model.name} to know it again") as on_bytes,
        ThreadPoolExecutor(num_threads, "hash") as pool,
    ):
        for name in names:
            checkpoint.read_ahead(name)
            stored = checkpoint.stored_bytes(name)
            pieces = [
                stored[first : first + _PIECE_BYTES].data
                for first in range(0, stored.size, _PIECE_BYTES)
            ]
            whole.update(f"{name} {stored.size}\n".encode())
            for piece, digest in zip(pieces, pool.map(_sha256, pieces), strict=True):
                whole.update(digest)
                done += piece.nbytes
                on_bytes(done, total)
            checkpoint.release(name)
    files.require_unchanged()
    return whole.hexdigest()


def _sha256(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


def _read(cached: int | None) -> tuple[str, str]:
    """The state of the files and their digest, or empty strings; a file cut short is no JSON."""
    if cached is not None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            found = json.loads(os.pread(cached, 4096, 0))
            return str(found["files"]), str(found["weights"])
    return "", ""


def _write(cached: int | None, state: str, digest: str) -> None:
    if cached is not None:
        with suppress(OSError):
            os.ftruncate(cached, 0)
            os.pwrite(cached, json.dumps({"files": state, "weights": digest}).encode(), 0)


@contextmanager
def _locked(place: Path) -> Iterator[int | None]:
    """A model's file, None where it cannot be had.

    One process at a time computes the digest; the others wait and read it.
    """
    try:
        name = hashlib.sha256(os.fsencode(place)).hexdigest()[:32]
        file = own_folder("weights") / f"{name}.json"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield None
        return
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
