"""Where compiled kernels are kept on disk, and which two of one function are told apart.

Numba keys its cache by the path of a function's source and by that file's content alone. Kernels
here call kernels of other files, whose change would go unnoticed; and every upload of a job unpacks
the same sources under another path, which would compile everything again. So each source of this
package has a folder for its compiled kernels, named after a digest of that source and of all that
it imports of this package, wherever they stand. A changed line compiles what can reach it again.
"""

import functools
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np

from hotcold.numba_kernels.amx import may_use_amx
from hotcold.numba_kernels.own_cache import cache_home, own_folder

_FOLDER = "numba"
_PACKAGE = Path(__file__).resolve().parent
# `from hotcold.numba_kernels.decode import rows, ffn` and the same in parentheses, on any line.
_IMPORT = re.compile(
    rf"^[ \t]*from {re.escape(__package__)}([.\w]*) import (?:\(([^)]*)\)|(.*))", re.MULTILINE
)
_DAY_S = 24 * 3600
_MAX_UNUSED_DAYS = 30
LOCK_SUFFIX = ".lock"  # of the file, beside a kernel's own, that who compiles it has open
_reads_cache = True
being_compiled: list[Any] = []  # functions, each for the one before it: `called_kernels` notes them


def kernel_folder(source: Path) -> Path:
    """The folder of a source's compiled kernels, below XDG_CACHE_HOME or ~/.cache."""
    return cache_home() / "hotcold" / _FOLDER / _folder_name(source.resolve())


def own_kernel_folder(source: Path) -> Path:
    """`kernel_folder`, made; its modification time says on which day it was used last.

    Once a day folders that nobody has used for a month are removed: those of earlier sources.
    Errors: those of `own_folder`
    """
    folder = own_folder(_FOLDER, _folder_name(source.resolve()))
    now = time.time()
    with suppress(OSError):
        if now - folder.stat().st_mtime > _DAY_S:
            os.utime(folder)
            _remove_unused(folder.parent, now - _MAX_UNUSED_DAYS * _DAY_S)
    return folder


def kernels_since(begin: float) -> tuple[int, int]:
    """How many of the kernels that were missing since `begin` (s, as `time.time`) are there now,
    and how many these are: processes look for what a kernel calls before they compile it.
    """
    asked = done = 0
    for lock in (cache_home() / "hotcold" / _FOLDER).glob(f"*/*{LOCK_SUFFIX}"):
        with suppress(OSError):
            if lock.stat().st_mtime >= begin:
                asked, done = asked + 1, done + lock.with_suffix("").exists()
    return done, asked


def _remove_unused(parent: Path, since: float) -> None:
    for folder in parent.iterdir():
        if folder.is_dir() and folder.stat().st_mtime < since:
            shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def sources_digest() -> str:
    """16 characters that change with any source of this package, with Numba and with Python."""
    return _digest(sorted(_PACKAGE.rglob("*.py")))


def reached_sources(source: Path) -> set[Path]:
    """This source of the package and those that it imports, directly or not."""
    found: set[Path] = set()
    new = {source}
    while new:
        found |= new
        new = {each for path in new for each in _read(path)[1]} - found
    return found


@functools.cache
def _folder_name(source: Path) -> str:
    return f"{source.stem}-{_digest(sorted(reached_sources(source)))}"


def _digest(sources: list[Path]) -> str:
    # Numba tells CPUs apart, but not where AMX works.
    versions = sys.version, *(each.__version__ for each in (numba, llvmlite, np))
    digest = hashlib.sha256(repr((*versions, may_use_amx())).encode())
    for source in sources:
        digest.update(source.relative_to(_PACKAGE).as_posix().encode())
        digest.update(_read(source)[0])
    return digest.hexdigest()[:16]


@functools.cache
def _read(source: Path) -> tuple[bytes, frozenset[Path]]:
    """A source's digest, and the sources of this package that it imports itself."""
    content = source.read_bytes()
    return hashlib.sha256(content).digest(), frozenset(_imported(content.decode()))


def _imported(text: str) -> Iterator[Path]:
    for module, in_parentheses, on_line in _IMPORT.findall(text):
        folder = _PACKAGE.joinpath(*module.split("."))
        if module and folder.with_suffix(".py").is_file():
            yield folder.with_suffix(".py")
            continue
        yield folder / "__init__.py"
        for name in re.findall(r"\w+", in_parentheses or on_line):
            if (folder / f"{name}.py").is_file():
                yield folder / f"{name}.py"


def is_ours(py_file: str) -> bool:
    """Whether it is a source of this package."""
    return _PACKAGE in Path(py_file).resolve().parents


def reads_cache() -> bool:
    """Whether this process uses what others have compiled."""
    return _reads_cache


def read_no_more() -> None:
    """Let this process compile all that it needs, and keep it in the place of what is kept."""
    global _reads_cache
    _reads_cache = False


def is_called() -> bool:
    """Whether what is compiled now is for a function that calls it, not for Python."""
    return len(being_compiled) > 1
