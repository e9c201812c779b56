"""Whether this Numba is the one whose own parts this package leans on.

Numba may change them in any version, also in ways that no name tells: a later version compiles as
it does by itself. Kernels then compute the same and take longer to compile.
"""

import atexit
import importlib
import inspect
import os
import shutil
import tempfile
from typing import Any

import numba

from hotcold.numba_kernels.kernel_cache import sources_digest
from hotcold.numba_kernels.own_cache import own_folder

_KNOWN = (0, 68)
# What `numba_kernels.content_names` needs, with the names of its arguments.
_NAMING = {
    "base:BaseContext.mangler": "self name types abi_tags uid",
    "bytecode:FunctionIdentity.from_function": "pyfunc",
}


def is_known_numba() -> bool:
    """Whether `numba_kernels.called_kernels` and `one_compiler` work with this Numba."""
    return bool(numba.version_info.short == _KNOWN)


def has_naming_parts() -> bool:
    """Whether `numba_kernels.content_names` works with this Numba."""
    return all(_is_as_tried(*part) for part in _NAMING.items())


def _is_as_tried(name: str, arguments: str) -> bool:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(f"numba.core.{module}")
        for part in path.split("."):
            found = getattr(found, part)
        return list(inspect.signature(found).parameters) == arguments.split()
    except (ImportError, AttributeError, TypeError, ValueError):
        return False


def use_numbas_cache() -> None:
    """Keep kernels in one folder of all sources, by Numba's own cache alone.

    Where that folder is not to be trusted, or names in code are not those of other processes, they
    are kept until this process ends.
    """
    try:
        if not has_naming_parts():
            raise PermissionError
        folder = str(own_folder("numba", sources_digest()))
    except OSError:
        folder = tempfile.mkdtemp(prefix="hotcold-kernels-")
        atexit.register(_remove, folder, os.getpid())
    numba.config.CACHE_DIR = folder  # type: ignore[attr-defined]


def _remove(folder: str, maker: int) -> None:
    if os.getpid() == maker:  # and not one that was forked from it
        shutil.rmtree(folder, ignore_errors=True)
