"""Whether a model's weights are the same, to the last bit: a digest of all of them.

To make it takes as long as reading the model. So it is kept in this user's cache together with the
state of the model's files, and made again only once that is another. A copy has the same digest,
on any host. Imports little at once: every command says how a digest that is made is shown.
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
_SHOWN_BYTES = 1 << 30  # of a model for which a bar is shown
# The kernel's clock for files ticks at least so often: a later write has another time than the last
# one that was seen.
_SETTLED_NS = 20_000_000
_known: dict[Path, tuple[str, str]] = {}  # of this process: the files' state, the digest


def show_nothing(text: str) -> AbstractContextManager[OnBytes]:
    """As a bar with the description `text`, in a process that nobody looks at."""
    return nullcontext(lambda done, total: None)


progress: Callable[[str], AbstractContextManager[OnBytes]] = (
    show_nothing  # what shows a bar; commands set it
)


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model as they were looked at: name, then `file_state`, of each in order."""

    model: Path
    paths: tuple[Path, ...]
    states: tuple[tuple[str | int, ...], ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelFiles:
        """As they are now. Errors: CheckpointError where one is gone."""
        paths = tuple(checkpoint.files())
        return cls(checkpoint.path, paths, _states(paths))

    def require_unchanged(self) -> None:
        """Raise CheckpointError where the files are no longer as they were looked at."""
        if _states(self.paths) != self.states:
            raise CheckpointError(
                f"{self.model}: its files have changed meanwhile; try again once nobody writes them"
            )

    @property
    def digest(self) -> str:
        """Equal for as long as nobody has touched them; another for any copy."""
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
    """Of the bytes of all tensors, by their names: 64 hexadecimal digits; kept.

    Errors:  CheckpointError where the files are others than `files` says, or cannot be read
    """
    place, state = files.model.resolve(), files.digest
    found = _known.get(place, ("", ""))
    if found[0] != state:
        with _kept(place) as kept:
            if kept.read()[0] != state:
                kept.write(state, _hashed(files))
            found = kept.read()
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


class _Kept:
    """What is known of a model: in a file that is locked, or without one for this process alone."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._own = "", ""

    def read(self) -> tuple[str, str]:
        """The state of the files, and their digest; empty where that is not known."""
        if self._descriptor is not None and not self._own[0]:
            with suppress(OSError, ValueError, TypeError, KeyError):
                found = json.loads(os.pread(self._descriptor, 4096, 0))
                return str(found["files"]), str(found["weights"])
        return self._own

    def write(self, state: str, digest: str) -> None:
        """Keep it. A write that was cut short is no JSON, and as good as none."""
        self._own = state, digest
        if self._descriptor is not None:
            content = json.dumps({"files": state, "weights": digest}).encode()
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, content, 0)


@contextmanager
def _kept(place: Path) -> Iterator[_Kept]:
    """One process at a time makes a model's digest, and the others find it."""
    try:
        name = hashlib.sha256(os.fsencode(place)).hexdigest()[:32]
        file = own_folder("weights") / f"{name}.json"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield _Kept(None)
        return
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield _Kept(descriptor)
    finally:
        os.close(descriptor)
