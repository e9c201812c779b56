"""Folders of this user in which hotcold keeps what takes long to make, such as compiled kernels.

What is read there is trusted: Numba unpickles compiled kernels, a GPU runs them. So nobody else may
be able to write there.
"""

import functools
import hashlib
import os
import secrets
import stat
import sys
import tempfile
from pathlib import Path

_CHECKSUM_BYTES = hashlib.sha256().digest_size
_SOME_BYTES = 64 << 10  # as large as a compiled kernel
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_home() -> Path:
    """XDG_CACHE_HOME, or ~/.cache where that is unset, empty or relative, as XDG wants it."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return chosen if chosen.is_absolute() else Path.home() / ".cache"


def own_folder(*names: str) -> Path:
    """The folder hotcold/NAMES below `cache_home`, made for this user alone where it is not there.

    Errors:  OSError where it cannot be, or others may write there; a line on standard error says so
    """
    home = cache_home()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder, is_ours = home, not _is_open_to_all(home)
        for name in ("hotcold", *names):
            folder = folder / name
            folder.mkdir(mode=0o700, exist_ok=True)
            is_ours = is_ours and _only_we_write(folder)
        if not is_ours:
            raise PermissionError("other users may write there")
        if not os.access(folder, os.W_OK):
            raise PermissionError("it cannot be written")
    except OSError as problem:
        what = f"{home / 'hotcold'} is not used"
        _tell(what, problem, "make it a folder that only you can write to")
        raise
    return folder


def host_cpu() -> str:
    """LLVM's name of this CPU, and its features: a hypervisor may leave out some of a name's."""
    import llvmlite.binding as llvm

    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def write_checked(path: Path, content: bytes) -> None:
    """Write a file and its checksum; others find all of it or nothing. Errors: OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # which may have been removed
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        part.write_bytes(hashlib.sha256(content).digest() + content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_checked(path: Path) -> bytes:
    """What `write_checked` wrote. Errors: OSError; ValueError where it is damaged."""
    found = path.read_bytes()
    checksum, content = found[:_CHECKSUM_BYTES], found[_CHECKSUM_BYTES:]
    if hashlib.sha256(content).digest() != checksum:
        raise ValueError(f"{path} is damaged")
    return content


def tell_if_full() -> None:
    """Say on standard error, once, where nothing can be kept: services say it to nobody."""
    try:
        folder = own_folder()
    except OSError:  # that has been said
        return
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_SOME_BYTES))
    except OSError as problem:
        tell_full(folder, problem)


def tell_full(folder: Path, problem: OSError) -> None:
    """Say on standard error, once, that nothing more can be kept there."""
    _tell(f"nothing more can be kept in {folder}", problem, "make room there")


def _only_we_write(folder: Path) -> bool:
    found = folder.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE


def _is_open_to_all(folder: Path) -> bool:
    """Whether anybody may put another folder in the place of one that is in it."""
    mode = folder.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def _tell(what: str, problem: OSError, remedy: str) -> None:
    _tell_once(
        f"hotcold: {what} ({problem.strerror or problem}), so kernels are compiled "
        f"at every start; {remedy}, or set XDG_CACHE_HOME to another folder"
    )


@functools.cache
def _tell_once(line: str) -> None:
    print(line, file=sys.stderr)
