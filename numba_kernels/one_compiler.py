"""One process compiles a kernel for given types, and the others wait for what it writes.

The services of a system start at the same time and need the same kernels, so this takes half of the
time. Meanwhile others compile it for other types. Numba's index of a function's kernels, which it
reads, changes and writes again, is changed by one process at a time.
This leans on parts of Numba that are its own (`numba_kernels.numba_parts`).
"""

import fcntl
import gc
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numba.core.dispatcher
from numba.core import event, types
from numba.core.caching import FunctionCache, NullCache, UserProvidedCacheLocator
from numba.core.compiler_lock import global_compiler_lock

from hotcold.numba_kernels.kernel_cache import (
    is_called,
    is_ours,
    kernel_folder,
    own_kernel_folder,
)
from hotcold.numba_kernels.own_cache import tell_full


class SourceHashLocator(UserProvidedCacheLocator):  # type: ignore[misc]
    """Numba's cache locator for this package; others are left to Numba's own."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        """See numba.core.caching."""
        super().__init__(py_func, py_file)
        self._cache_path = str(kernel_folder(Path(py_file)))

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "SourceHashLocator | None":
        """A locator for a function of this package."""
        return cls(py_func, py_file) if is_ours(py_file) else None


def _cache_of(py_func: Any) -> Any:
    """A function's cache; none on disk where the folder of this package's is not to be trusted."""
    source = py_func.__code__.co_filename
    if is_ours(source):
        try:
            own_kernel_folder(Path(source))
        except OSError:
            return NullCache()
    return OneCompilerCache(py_func)


class OneCompilerCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of a function, to which at most one process at a time adds some types."""

    _is_full = False  # nothing can be kept: nobody is to wait for what this process compiles

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """See numba.core.caching; what is not there is nobody else's to compile from now on."""
        found = self._load(sig, target_context)
        if found is None and self._is_shared and _locks:
            _locks[-1].enter_context(_locked(self._file(_digest_of(sig))))
            found = self._load(sig, target_context)
        return found

    def _load(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # it is damaged, as a loss of power may leave it
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """See numba.core.caching; what cannot be kept is compiled again by whoever needs it."""
        try:
            with _locked(self._file("index")) if self._is_shared else nullcontext():
                self._save(sig, data)
        except OSError as problem:
            OneCompilerCache._is_full = True
            tell_full(Path(self._cache_path), problem)

    def _save(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError:
            raise
        except Exception:  # the index is damaged
            self.flush()
            super().save_overload(sig, data)

    @property
    def _is_shared(self) -> bool:
        return not self._is_full and isinstance(self._impl.locator, SourceHashLocator)

    def _file(self, name: str) -> Path:
        return Path(self._cache_path) / f"{self._impl.filename_base}.{name}"

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), is_called(), _field_names(sig))


def _field_names(sig: Any) -> tuple[Any, ...]:
    """The fields' names of all named tuples that are passed, whatever source their class is in."""
    names: list[Any] = []
    waiting = list(sig if isinstance(sig, tuple) else sig.args)
    while waiting:
        each = waiting.pop()
        names += [each.fields] if isinstance(each, types.BaseNamedTuple) else []
        waiting += each.types if isinstance(each, types.BaseTuple) else []
    return tuple(names)


_MANY_OBJECTS = 100_000  # that were made since the last collection; some hundred bytes each
_collects = True
_locks: list[ExitStack] = []  # of the functions that this process compiles, the innermost last


def _digest_of(sig: Any) -> str:
    """The same for the same types, and a caller's or Python's variant, in every process."""
    types = re.sub(" at 0x[0-9a-f]+", "", str(sig))
    return hashlib.sha256(f"{is_called()} {types}".encode()).hexdigest()[:16]


@contextmanager
def _locked(what: Path) -> Iterator[None]:
    """Hold a lock; without one where the file system has none."""
    with ExitStack() as opened:
        with suppress(OSError):
            file = opened.enter_context(what.with_name(f"{what.name}.lock").open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # to who looks on, waiting for a compiler is compiling
                with event.trigger_event("numba:compile"):
                    fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _few_collections() -> Iterator[None]:
    """Python's garbage collection takes a tenth of a compiler's time, and finds little before a
    function is compiled. It runs once then, for a caller's callees as well: a CPU service's kernels
    leave hundreds of megabytes behind.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _collects and gc.get_count()[0] > _MANY_OBJECTS:
            gc.collect(0)
        if was_on:
            gc.enable()


def never_collect() -> None:
    """For a process that ends once it has compiled."""
    global _collects
    _collects = False
    gc.disable()


@contextmanager
def _on_any_core() -> Iterator[None]:
    """Compile unpinned: a service's threads have a core each, which other services' have too."""
    own, every = os.sched_getaffinity(0), os.sched_getaffinity(os.getpid())  # the main thread's
    with suppress(OSError):  # no core of those is left
        os.sched_setaffinity(0, every)
    try:
        yield
    finally:
        if os.sched_getaffinity(0) == every:  # nobody has pinned it anew
            with suppress(OSError):
                os.sched_setaffinity(0, own)


def share_compilers() -> None:
    """Let every function that Numba compiles from now on hold its locks until it is written."""
    compile_function = numba.core.dispatcher.Dispatcher.compile

    def compile_alone(self: Any, sig: Any) -> Any:
        with global_compiler_lock, _few_collections(), _on_any_core(), ExitStack() as locks:
            _locks.append(locks)
            try:
                return compile_function(self, sig)
            finally:
                _locks.pop()

    numba.core.dispatcher.Dispatcher.compile = compile_alone
    numba.core.dispatcher.FunctionCache = _cache_of
