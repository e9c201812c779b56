"""Kernels compiled by NVRTC for the current device, and cached on disk."""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from hotcold.cuda_kernels.source import OPTIONS, Entry, entry_source

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def compiled_file(entry: Entry) -> Path:
    """The compiled kernel's file in `cache_folder`, compiled first where there is none.

    CuPy's RawModule would do nearly the same but flush subnormals to zero (-ftz=true), which the
    CPU's kernels do not.
    """
    from cupy.cuda import Device, compiler, nvrtc

    source = entry_source(entry)
    key = repr((source, OPTIONS, Device().compute_capability, nvrtc.getVersion()))
    name = f"{entry.name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"
    path = cache_folder() / name
    if not path.exists():
        code, _ = compiler.compile_using_nvrtc(source, OPTIONS, filename=f"{entry.file}.cu")
        path = _kept(path, code)
    return path


@functools.cache
def cache_folder() -> Path:
    """hotcold/cuda below XDG_CACHE_HOME or, if that is not absolute, ~/.cache.

    A temporary folder of this process where that is not writeable, or others can write to it.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (base if base.is_absolute() else Path.home() / ".cache") / "hotcold" / "cuda"
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if os.access(folder, os.W_OK) and all(map(_only_we_write, (folder, folder.parent))):
            return folder
    except OSError:
        pass
    return _process_folder()


@functools.cache
def _process_folder() -> Path:
    own = tempfile.TemporaryDirectory(prefix="hotcold-cuda-")
    atexit.register(own.cleanup)
    return Path(own.name)


def _only_we_write(folder: Path) -> bool:
    found = folder.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE


def _kept(path: Path, code: bytes) -> Path:
    """The written file: `path`, or where the disk is full one in this process's folder."""
    try:
        _write(path, code)
    except OSError:
        path = _process_folder() / path.name
        _write(path, code)
    return path


def _write(path: Path, code: bytes) -> None:
    """Write atomically: other processes find the whole file or none, also after a power loss."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(code)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
