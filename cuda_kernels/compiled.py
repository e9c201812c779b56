"""Kernels compiled by NVRTC for the current device, and cached on disk."""

from __future__ import annotations

import hashlib
from contextlib import suppress

from hotcold.cuda_kernels.source import OPTIONS, Entry, entry_source
from hotcold.numba_kernels.own_cache import own_folder, read_checked, tell_full, write_checked


def compiled_code(entry: Entry) -> bytes:
    """The compiled kernel, from this user's cache where it is there and whole.

    CuPy's RawModule would do nearly the same but flush subnormals to zero (-ftz=true), which the
    CPU's kernels do not.
    """
    from cupy.cuda import Device, compiler, nvrtc

    source = entry_source(entry)
    key = repr((source, OPTIONS, Device().compute_capability, nvrtc.getVersion()))
    name = f"{entry.name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"
    with suppress(OSError, ValueError):
        return read_checked(own_folder("cuda") / name)
    code: bytes
    code, _ = compiler.compile_using_nvrtc(source, OPTIONS, filename=f"{entry.file}.cu")
    _keep(name, code)
    return code


def _keep(name: str, code: bytes) -> None:
    with suppress(OSError):  # a line on standard error has said why
        folder = own_folder("cuda")
        try:
            write_checked(folder / name, code)
        except OSError as problem:
            tell_full(folder, problem)
