"""Pages of this service's KV cache in a file that outlives it (`model/files/page_file.py`).

One file for each arithmetic, and one of recurrent layers' pages, in a folder of the model's
artifacts, or in the user's cache where that cannot be written. All files there together stay within
a limit: those of other arithmetics go first.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from hotcold.actors.kv_cache.pool import OpenedPages, Page, SavedPages
from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact_places import artifact_base, artifact_folders
from hotcold.model.files.locate import resolved_model
from hotcold.model.files.page_file import LockedFileError, PageFile
from hotcold.numba_kernels.loops.mailbox import RECURRENT
from hotcold.numba_kernels.own_cache import own_folder
from hotcold.numba_kernels.recurrent_arrays import NO_PAGE

FOLDER = "prefix-cache"
_SUFFIX = ".pages"
_NAME = re.compile(rf"[0-9a-f]{{32}}(-\d+-\d+)?{re.escape(_SUFFIX)}")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NICENESS = 10  # of the thread that writes
_READERS = 4
# A disk that takes longer counts as hung. The engine waits for the first two.
_LONGEST_LOAD_S, _LONGEST_OPEN_S, _LONGEST_SAVE_S = 10.0, 20.0, 60.0

_Result = TypeVar("_Result")


class PrefixFile:
    """A service's part of the store: `PageStore` of `actors.kv_cache.page_store` calls it.

    Calls name the session that `open` began, so none of an earlier process's is answered. What
    waits for the disk does so in threads that may be left behind: where one takes too long, all
    later calls do nothing.
    """

    def __init__(
        self,
        model_path: str | Path,
        arrays: Sequence[tuple[int, np.ndarray]],
        limit_bytes: int,
        part: str,
        keeps_cached: bool = True,
        states: int = -1,
    ) -> None:
        """arrays: of the KV cache: a layer's, with its place in a `Page`, each (pages, ...)
        limit_bytes: of all files in the folder
        part: names the layers, where several services have some
        keeps_cached: whether the system may keep the file in its page cache
        states: the place of recurrent layers', which have a file of their own
        """
        self._model_path, self._limit, self._part = Path(model_path), limit_bytes, part
        flat = [(place, array.reshape(len(array), -1).view(np.uint8)) for place, array in arrays]
        kinds = [
            [(place, one) for place, one in flat if (place == states) == of_states]
            for of_states in (False, True)
        ]
        self._kinds = [kind for kind in kinds if kind]
        self._states = states if len(self._kinds) > 1 else -1
        self._keeps_cached = keeps_cached
        self._files: list[PageFile] = []  # of each kind, when they are open
        self._folder: int | None = None  # its folder's descriptor
        self._session = b""
        self._is_off = False  # the disk has not answered
        self._on_disk = threading.Lock()  # held while the file is written, opened or closed
        # Held for a moment, never while anything waits for the disk.
        self._changing = threading.Condition(threading.Lock())
        self._num_loading = 0  # calls, which use the file

    @classmethod
    def of(
        cls, spec: ServiceSpec, pages: Sequence[tuple[int, np.ndarray]], config: ModelConfig
    ) -> PrefixFile:
        """Those of a service with the `cache_pages`, of a model of `config`."""
        own, num_layers = spec.attention, config.num_layers
        limit = (spec.system.prefix_cache_bytes or 0) * len(own) // num_layers
        part = "" if len(own) == num_layers else f"-{own.start}-{own.stop}"
        groups = config.page_groups
        arrays = [(groups.index(group), array) for group, array in pages]
        states = groups.index(RECURRENT) if RECURRENT in groups else -1
        return cls(spec.path, arrays, limit, part, spec.keeps_pages, states)

    def open(self, session: bytes, identity: bytes, anew: bool = False) -> OpenedPages:
        """Begin a session with the file of this arithmetic, without its pages if `anew`.

        Ends the earlier one: when this returns, no page is read or filled for it any more.
        """
        self._end_session()
        work = partial(self._open, session, identity, anew)
        return self._answered(work, _LONGEST_OPEN_S, OpenedPages(note=self._off_note))

    def _open(self, session: bytes, identity: bytes, anew: bool) -> OpenedPages:
        with self._on_disk:
            self._close_file()
            return self._opened(session, identity, anew)

    def _opened(self, session: bytes, identity: bytes, anew: bool) -> OpenedPages:
        lacks = []
        try:
            folder, self._folder = _open_folder(self._model_path)
            for kind, arrays in enumerate(self._kinds):
                digest = hashlib.sha256(identity + b"states" * kind).hexdigest()[:32]
                name = f"{digest}{self._part}{_SUFFIX}"
                budget = FolderBudget(folder, self._folder, name, self._limit)
                num_bytes = sum(flat.shape[1] for _, flat in arrays)
                file = PageFile(folder / name, identity, num_bytes, budget.may_grow, self._folder)
                self._files.append(file)
                if anew:
                    file.clear()
                lacks.append(file.note or budget.lack(file, bool(file.keys())))
        except LockedFileError:
            self._close_file()
            return OpenedPages(note=f"{folder / name}: another running system uses it, {_WITHOUT}")
        except OSError as problem:
            self._close_file()
            where = problem.filename or self._model_path
            return OpenedPages(note=f"{where}: {problem.strerror}, {_WITHOUT}")
        with self._changing:
            self._session = b"" if self._is_off else session
        keys = set[bytes]().union(*(file.keys() for file in self._files))
        num_bytes = sum(file.num_bytes for file in self._files)
        return OpenedPages(str(self._files[0].path), keys, num_bytes, next(filter(None, lacks), ""))

    def save(
        self, session: bytes, used: Sequence[bytes], keys: Sequence[bytes], pages: Sequence[Page]
    ) -> SavedPages | None:
        """Count `used` as used, and write pages; returns once they are written.

        None for an ended session.
        """
        work = partial(self._save, session, used, keys, pages)
        nothing: SavedPages | None = SavedPages([], [], self._off_note)
        return self._answered(work, _LONGEST_SAVE_S, nothing)

    def _save(
        self, session: bytes, used: Sequence[bytes], keys: Sequence[bytes], pages: Sequence[Page]
    ) -> SavedPages | None:
        _be_nice()
        saved: list[bytes] = []
        given_up: list[bytes] = []
        note = ""
        with self._on_disk:
            for key, page in zip(keys, pages, strict=True):
                if not self._files or session != self._session:
                    return None
                kind = self._kind(page)
                file = self._files[kind]
                try:
                    is_page = partial(self._is_session, session)
                    given_up += file.write(key, self._pieces(page, kind), is_page)
                    saved.append(key)
                except OSError as problem:
                    note = f"{file.path}: {problem.strerror}; no page is added"
                    break
            if not self._files or session != self._session:
                return None
            for file in self._files:
                with suppress(OSError):
                    file.touch(used)
                    file.flush()  # nobody else waits for what is left to write
                    self._drop_cached(file)
        return SavedPages(saved, given_up, note)

    def load(self, session: bytes, keys: Sequence[bytes], pages: Sequence[Page]) -> int:
        """Fill pages; returns how many of the first ones are good. 0 for an ended session.

        No page is filled after it has returned.
        """
        with self._changing:
            files = list(self._files)
            if not files or session != self._session:
                return 0
            self._num_loading += 1
        work = partial(self._load, files, session, keys, pages)
        return self._answered(work, _LONGEST_LOAD_S, 0)

    def _load(
        self, files: list[PageFile], session: bytes, keys: Sequence[bytes], pages: Sequence[Page]
    ) -> int:
        def fill(piece: memoryview, content: memoryview) -> bool:
            with self._changing:
                if session == self._session:
                    piece[:] = content
                return session == self._session

        def read(first: int) -> list[bool]:
            own = zip(keys[first::_READERS], pages[first::_READERS], strict=True)
            kinds = ((key, page, self._kind(page)) for key, page in own)
            return [
                files[kind].read(key, self._pieces(page, kind), fill) for key, page, kind in kinds
            ]

        try:
            readers = [_in_thread(partial(read, first)) for first in range(_READERS)]
            good = [False] * len(keys)
            for first, reader in enumerate(readers):
                good[first::_READERS] = reader.result()
            for file in files:
                self._drop_cached(file)
            return good.index(False) if False in good else len(good)
        finally:
            with self._changing:
                self._num_loading -= 1
                self._changing.notify_all()

    def close(self) -> None:
        """Close the file, as the end of the process does; it is left open on a hung disk."""
        self._end_session()
        self._answered(self._close, _LONGEST_OPEN_S, None)

    def _close(self) -> None:
        with self._on_disk:
            self._close_file()

    def _end_session(self) -> None:
        """End what is saved after a page, and what is loaded after a piece of one."""
        with self._changing:
            self._session = b""

    def _is_session(self, session: bytes) -> bool:
        with self._changing:
            return session == self._session

    def _answered(
        self, work: Callable[[], _Result], longest_s: float, otherwise: _Result
    ) -> _Result:
        """What `work` returns; `otherwise` from the first time on that one takes too long."""
        if not self._is_off:
            with suppress(TimeoutError):
                return _in_thread(work).result(longest_s)
            with self._changing:
                self._session, self._is_off = b"", True
        return otherwise

    @property
    def _off_note(self) -> str:
        return f"{self._model_path}: the disk with its pages does not answer, {_NO_MORE}"

    def _close_file(self) -> None:
        with self._changing:
            self._changing.wait_for(lambda: not self._num_loading)
        while self._files:
            self._files.pop().close()
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def _drop_cached(self, file: PageFile) -> None:
        if not self._keeps_cached:
            file.drop_cache()

    def _kind(self, page: Page) -> int:
        """Which of the files has such pages."""
        return int(self._states >= 0 and page[self._states] != NO_PAGE)

    def _pieces(self, page: Page, kind: int) -> list[memoryview]:
        return [memoryview(flat[page[place]]) for place, flat in self._kinds[kind]]


_WITHOUT = "so no prefix is kept on disk"
_NO_MORE = "so no prefix is kept on disk any more"


class FolderBudget:
    """How large a file may become so that all files of its folder stay within a limit."""

    def __init__(self, path: Path, folder: int, name: str, limit_bytes: int) -> None:
        """`folder` is the descriptor of the one at `path`; `name` is the file's."""
        self._path, self._folder, self._name, self._limit = path, folder, name, limit_bytes

    def may_grow(self, num_bytes: int) -> bool:
        """Whether the file may have so many bytes; removes others' files, the oldest first."""
        if num_bytes > self._limit:
            return False
        others = self._others()
        excess = num_bytes + sum(size for _, size, _ in others) - self._limit
        for _, size, name in others:
            if excess <= 0:
                break
            if _removed(name, self._folder):
                excess -= size
        return excess <= 0

    def lack(self, file: PageFile, has_pages: bool) -> str:
        """A line where not even one page fits; else ""."""
        if has_pages or self.may_grow(file.least_bytes):
            return ""
        return (
            f"{self._path}: {self._limit / 1e6:.1f} MB, less what other running systems have "
            f"there, are too few for a page of {file.page_bytes / 1e6:.1f} MB; give a larger "
            "--prefix-cache"
        )

    def _others(self) -> list[tuple[float, int, str]]:
        """When they were changed, their sizes and names: of files that are ours, no others."""
        found = []
        for name in os.listdir(self._folder):
            if name == self._name or not _NAME.fullmatch(name):
                continue
            with suppress(OSError):
                state = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
                if stat.S_ISREG(state.st_mode) and _is_ours(state, 0o077):
                    found.append((state.st_mtime, state.st_size, name))
        return sorted(found)


def _removed(name: str, folder: int) -> bool:
    """Remove a file that no running system uses; whether it is gone."""
    try:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _open_folder(model_path: Path) -> tuple[Path, int]:
    """The folder of a model's files, of this user alone, and its descriptor. Errors: OSError."""
    written = artifact_folders(model_path)[0] / FOLDER
    base = artifact_base(model_path)
    with suppress(OSError):
        base.mkdir(parents=True, exist_ok=True)
        return written, _open_beside(written, base)
    digest = hashlib.sha256(os.fsencode(resolved_model(model_path))).hexdigest()[:16]
    own = own_folder(FOLDER, digest)
    return own, os.open(own, _FOLDER_FLAGS)


def _open_beside(folder: Path, base: Path) -> int:
    """Open a folder below `base`, which may be another's: no link is followed from there on.

    Errors:  OSError, also where others may write on the way there, or read what is in it
    """
    opened = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in folder.relative_to(base).parts:
        above = opened
        try:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=above)
            opened = os.open(name, _FOLDER_FLAGS, dir_fd=above)
        finally:
            os.close(above)
        if not _is_ours(os.fstat(opened), 0o077 if name == folder.name else 0o022):
            os.close(opened)
            raise PermissionError(errno.EPERM, "is another user's, or open to others")
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=opened):
        os.close(opened)
        raise PermissionError(errno.EACCES, "cannot be written")
    return opened


def _is_ours(state: os.stat_result, others: int) -> bool:
    """Whether it is this user's, and others have none of these rights."""
    return state.st_uid == os.geteuid() and not state.st_mode & others


def _in_thread(work: Callable[[], _Result]) -> Future[_Result]:
    """Call it in a thread that no end of the process waits for, unlike an executor's."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="pages", daemon=True).start()
    return future


def _be_nice() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
