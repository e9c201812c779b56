"""Where compiled kernels are kept on disk, and which two of one function are told apart.

Numba keys its cache by the path of a function's source and by that file's content alone. Kernels
here call kernels of other files, whose change would go unnoticed; and every upload of a job unpacks
the same sources under another path, which would compile everything again. So compiled kernels of
this package are in one folder named after a hash of all its sources, wherever they stand.
"""

import functools
import hashlib
from pathlib import Path
from typing import Any

import numba

from hotcold.numba_kernels.own_cache import cache_home, own_folder

_ROOM = "numba"
_PACKAGE = Path(__file__).resolve().parent
being_compiled: list[Any] = []  # functions, each for the one before it: `called_kernels` notes them


@functools.cache
def cache_folder() -> Path:
    """The folder of this version's compiled kernels, below XDG_CACHE_HOME or ~/.cache."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(_PACKAGE.rglob("*.py")):
        digest.update(source.relative_to(_PACKAGE).as_posix().encode())
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return cache_home() / "hotcold" / _ROOM / digest.hexdigest()[:16]


def own_cache_folder() -> Path:
    """`cache_folder`, made. Errors: those of `own_folder`."""
    return own_folder(_ROOM, cache_folder().name)


def is_ours(py_file: str) -> bool:
    """Whether it is a source of this package."""
    return _PACKAGE in Path(py_file).resolve().parents


def is_called() -> bool:
    """Whether what is compiled now is for a function that calls it, not for Python."""
    return len(being_compiled) > 1
