"""Where compiled kernels are kept on disk.

Numba keys its cache by the path of a function's source and by that file's content alone. Kernels
here call kernels of other files, whose change would go unnoticed; and every upload of a job unpacks
the same sources under another path, which would compile everything again. So compiled kernels of
this package lie in one folder named after a hash of all its sources, wherever they stand.
"""

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import UserProvidedCacheLocator

_PACKAGE = Path(__file__).resolve().parent


@functools.cache
def cache_folder() -> Path:
    """The folder of this version's compiled kernels, below XDG_CACHE_HOME or ~/.cache."""
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(_PACKAGE.rglob("*.py")):
        digest.update(source.relative_to(_PACKAGE).as_posix().encode())
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return base / "hotcold" / "numba" / digest.hexdigest()[:16]


class SourceHashLocator(UserProvidedCacheLocator):  # type: ignore[misc]
    """Numba's cache locator for this package; others are left to Numba's own."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        """See numba.core.caching."""
        super().__init__(py_func, py_file)
        self._cache_path = str(cache_folder())

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "SourceHashLocator | None":
        """A locator for a function of this package; None where its folder cannot be written."""
        if _PACKAGE not in Path(py_file).resolve().parents:
            return None
        locator = cls(py_func, py_file)
        try:
            locator.ensure_cache_path()
        except OSError:
            return None
        return locator
