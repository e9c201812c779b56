"""Pages of this service's KV cache in a file that outlives it (`model/files/page_file.py`).

One file for each arithmetic, in a folder beside the model, or in the user's cache where that cannot
be written. All files there together stay within a limit: those of other arithmetics go first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.actors.protocol.page_store import OpenedPages, Page, SavedPages
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact import artifact_path
from hotcold.model.files.locate import resolved_model
from hotcold.model.files.page_file import LockedFileError, PageFile
from hotcold.numba_kernels.own_cache import own_folder
from hotcold.numba_kernels.serve.mailbox import FULL, WINDOWED

FOLDER = "prefix-cache"
_SUFFIX = ".pages"
_NICENESS = 10  # of the thread that writes
_READERS = 4


class KeptPages:
    """A service's part of the store; its calls are those that `ServicePageStore` makes.

    Calls name the session that `open` began, so none of an earlier process's is answered.
    """

    def __init__(
        self,
        model_path: str | Path,
        arrays: Sequence[np.ndarray],
        limit_bytes: int,
        part: str,
        keeps_cached: bool = True,
        windowed: Sequence[bool] = (),
    ) -> None:
        """arrays: of the KV cache, each (layers, pages, ...), contiguous
        limit_bytes: of all files in the folder
        part: names the layers, where several services have some
        keeps_cached: whether the system may keep the file in its page cache
        windowed: which of the layers have a window; () for none
        """
        self._model_path, self._limit, self._part = Path(model_path), limit_bytes, part
        self._flat = [
            array.reshape(array.shape[0], array.shape[1], -1).view(np.uint8) for array in arrays
        ]
        self._page_bytes = sum(flat.shape[0] * flat.shape[2] for flat in self._flat)
        self._keeps_cached = keeps_cached
        num_layers = arrays[0].shape[0]
        self._groups = [WINDOWED if has else FULL for has in windowed] or [FULL] * num_layers
        self._file: PageFile | None = None
        self._session = b""
        self._changing = threading.Lock()  # held while a page is written, and for a new session
        self._writer = ThreadPoolExecutor(1, "pages", _be_nice)
        self._readers = ThreadPoolExecutor(_READERS, "pages")

    @classmethod
    def of(cls, spec: ServiceSpec, arrays: Sequence[np.ndarray], config: ModelConfig) -> KeptPages:
        """Those of a service whose KV cache is `arrays`, of a model of `config`."""
        own, num_layers = spec.attention, config.num_layers
        limit = (spec.system.prefix_cache_bytes or 0) * len(own) // num_layers
        part = "" if len(own) == num_layers else f"-{own.start}-{own.stop}"
        windowed = [bool(config.layers[layer].attention.window) for layer in own]
        return cls(spec.path, arrays, limit, part, spec.keeps_pages, windowed)

    def open(self, session: bytes, identity: bytes) -> OpenedPages:
        """Begin a session with the file of this arithmetic; ends the earlier one."""
        with self._changing:
            self._close_file()
            try:
                folder = _folder(self._model_path)
                name = f"{hashlib.sha256(identity).hexdigest()[:32]}{self._part}{_SUFFIX}"
                budget = FolderBudget(folder, name, self._limit)
                self._file = PageFile(folder / name, identity, self._page_bytes, budget.may_grow)
            except LockedFileError:
                return OpenedPages(
                    note=f"{folder / name}: another running system uses it, {_WITHOUT}"
                )
            except OSError as problem:
                where = problem.filename or self._model_path
                return OpenedPages(note=f"{where}: {problem.strerror}, {_WITHOUT}")
            self._session = session
            file, keys = self._file, self._file.keys()
            note = file.note or budget.lack(file, bool(keys))
            return OpenedPages(str(file.path), keys, file.num_bytes, note)

    def save(
        self, session: bytes, used: Sequence[bytes], keys: Sequence[bytes], pages: Sequence[Page]
    ) -> SavedPages | None:
        """Count `used` as used, and write pages; returns once they are written.

        None for an ended session.
        """
        return self._writer.submit(self._save, session, used, keys, pages).result()

    def _save(
        self, session: bytes, used: Sequence[bytes], keys: Sequence[bytes], pages: Sequence[Page]
    ) -> SavedPages | None:
        saved: list[bytes] = []
        given_up: list[bytes] = []
        note = ""
        for key, page in zip(keys, pages, strict=True):
            with self._changing:
                if self._file is None or session != self._session:
                    return None
                try:
                    given_up += self._file.write(key, self._pieces(page))
                    saved.append(key)
                except OSError as problem:
                    note = f"{self._file.path}: {problem.strerror}; no page is added"
                    break
        with self._changing, suppress(OSError):
            if self._file is not None and session == self._session:
                self._file.touch(used)
                self._file.flush()  # nobody else waits for what is left to write
                self._drop_cached()
        return SavedPages(saved, given_up, note)

    def load(self, session: bytes, keys: Sequence[bytes], pages: Sequence[Page]) -> int:
        """Fill pages; returns how many of the first ones are good. 0 for an ended session.

        The caller opens no session meanwhile.
        """
        file = self._file
        if file is None or session != self._session:
            return 0
        pieces = [self._pieces(page) for page in pages]
        good = list(self._readers.map(file.read, keys, pieces))
        num_good = good.index(False) if False in good else len(good)
        with suppress(OSError):
            file.touch(keys[:num_good])
        self._drop_cached()
        return num_good

    def close(self) -> None:
        """Close the file, as the end of the process does."""
        self._writer.shutdown()
        self._readers.shutdown()
        with self._changing:
            self._close_file()

    def _close_file(self) -> None:
        self._session = b""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _drop_cached(self) -> None:
        if self._file is not None and not self._keeps_cached:
            self._file.drop_cache()

    def _pieces(self, page: Page) -> list[memoryview]:
        return [
            memoryview(layer[page[group]])
            for flat in self._flat
            for layer, group in zip(flat, self._groups, strict=True)
        ]


_WITHOUT = "so no prefix is kept on disk"


class FolderBudget:
    """How large a file may become so that all files of its folder stay within a limit."""

    def __init__(self, folder: Path, name: str, limit_bytes: int) -> None:
        """`name` is the file's."""
        self._folder, self._name, self._limit = folder, name, limit_bytes

    def may_grow(self, num_bytes: int) -> bool:
        """Whether the file may have so many bytes; removes others' files, the oldest first."""
        if num_bytes > self._limit:
            return False
        others = self._others()
        excess = num_bytes + sum(size for _, size, _ in others) - self._limit
        for _, size, path in others:
            if excess <= 0:
                break
            if _removed(path):
                excess -= size
        return excess <= 0

    def lack(self, file: PageFile, has_pages: bool) -> str:
        """A line where not even one page fits; else ""."""
        if has_pages or self.may_grow(file.least_bytes):
            return ""
        return (
            f"{self._folder}: {self._limit / 1e6:.1f} MB, less what other running systems have "
            f"there, are too few for a page of {file.page_bytes / 1e6:.1f} MB; give a larger "
            "--prefix-cache"
        )

    def _others(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with suppress(OSError):
                if path.name != self._name:
                    state = path.stat()
                    found.append((state.st_mtime, state.st_size, path))
        return sorted(found)


def _removed(path: Path) -> bool:
    """Remove a file that no running system uses; whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _folder(model_path: Path) -> Path:
    """The folder of a model's files, of this user alone. Errors: OSError."""
    beside = artifact_path(model_path, FOLDER)
    with suppress(OSError):
        beside.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = beside.stat()
        is_ours = found.st_uid == os.geteuid() and not found.st_mode & 0o077
        if is_ours and os.access(beside, os.W_OK | os.X_OK):
            return beside
    digest = hashlib.sha256(os.fsencode(resolved_model(model_path))).hexdigest()[:16]
    return own_folder(FOLDER, digest)


def _be_nice() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
