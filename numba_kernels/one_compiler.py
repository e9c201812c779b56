"""One process compiles a kernel for given types, and the others wait for what it writes.

The services of a system start at the same time and need the same kernels, so this takes half of the
time. Meanwhile others compile it for other types. Each kernel is a file, named after the function
and the types that it is compiled for, with a checksum.
This leans on parts of Numba that are its own (`numba_kernels.numba_parts`).
"""

import fcntl
import gc
import os
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numba.core.dispatcher
from numba.core import event
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

from hotcold.numba_kernels.content_names import NotLastingError, digest_of
from hotcold.numba_kernels.kernel_cache import (
    LOCK_SUFFIX,
    is_called,
    is_ours,
    own_kernel_folder,
    reads_cache,
)
from hotcold.numba_kernels.own_cache import read_checked, tell_full, write_checked


class KernelCache(NullCache):  # type: ignore[misc]
    """A function's compiled kernels, each a file, to which one process at a time adds one."""

    _is_full = False  # nothing can be kept: nobody is to wait for what this process compiles

    def __init__(self, py_func: Any, folder: Path) -> None:
        """Errors: NotLastingError for a function that another process may have otherwise."""
        self._folder = folder
        self._name = f"{Path(py_func.__code__.co_filename).stem}.{py_func.__qualname__}"
        self._function = digest_of(py_func)

    @property
    def cache_path(self) -> str:
        """See numba.core.caching."""
        return str(self._folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """See numba.core.caching; what is not there is nobody else's to compile from now on."""
        target_context.refresh()
        if not reads_cache():
            return None
        try:
            path = self._path(sig, target_context)
        except NotLastingError:
            return None
        found = _read(path, target_context)
        if found is None and not self._is_full and _locks:
            _locks[-1].enter_context(_locked(path))
            found = _read(path, target_context)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """See numba.core.caching; what cannot be kept is compiled again by whoever needs it."""
        if data.library.has_dynamic_globals:  # addresses of this process
            return
        try:
            write_checked(self._path(sig, data.target_context), dumps(data._reduce()))
        except NotLastingError:
            return
        except OSError as problem:
            KernelCache._is_full = True
            tell_full(self._folder, problem)

    def _path(self, sig: Any, target_context: Any) -> Path:
        """The file of a caller's or Python's variant for these types, on this CPU."""
        cpu = target_context.codegen().magic_tuple()
        digest = digest_of(self._function, normalize_signature(sig), is_called(), cpu)
        return self._folder / f"{self._name}-{digest}.nbc"


def _read(path: Path, target_context: Any) -> Any:
    try:
        return CompileResult._rebuild(target_context, *pickle.loads(read_checked(path)))
    except Exception:  # it is not there, or damaged
        return None


def _cache_of(py_func: Any) -> Any:
    """A function's cache; none on disk where the folder of this package's is not to be trusted."""
    source = py_func.__code__.co_filename
    if not is_ours(source):
        return _numbas_cache(py_func)
    try:
        return KernelCache(py_func, own_kernel_folder(Path(source)))
    except (OSError, NotLastingError):
        return NullCache()


_numbas_cache = numba.core.dispatcher.FunctionCache
_MANY_OBJECTS = 100_000  # that were made since the last collection; some hundred bytes each
_collects = True
_locks: list[ExitStack] = []  # of the functions that this process compiles, the innermost last


@contextmanager
def _locked(what: Path) -> Iterator[None]:
    """Hold a lock; without one where the file system has none."""
    with ExitStack() as opened:
        with suppress(OSError):
            file = opened.enter_context(what.with_name(what.name + LOCK_SUFFIX).open("w"))
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
