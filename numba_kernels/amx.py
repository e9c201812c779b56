"""Whether AMX, matrix registers of x86-64, works here.

A process may use it once it has asked the operating system. What the CPU's flags claim is tried in
a child process first, which may die of it; what came of it is kept for this CPU and system.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import platform
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_TRIAL_S = 120.0  # services that disagreed would differ in bits: it ends in some 0.1
_WRONG = 3  # the status of a child where products are wrong, or not permitted
_WORKS, _FAILS = b"works", b"fails"
# What is kept, by a child's status. One that ended of anything else has said nothing of AMX.
_FOUND = {
    0: _WORKS,
    _WRONG: _FAILS,
    -signal.SIGILL: _FAILS,
    -signal.SIGSEGV: _FAILS,
    -signal.SIGBUS: _FAILS,
}
# Loads the shapes at rdi and two tiles behind them, and stores their products as bfloat16, then as
# int8: ldtilecfg, tileloadd twice, tilezero, tdpbf16ps, tilestored, tilezero, tdpbssd, tilestored,
# tilerelease. The shapes lie in memory whole: compilers know only that 8 of their bytes are read.
_CODE = bytes.fromhex(
    "c4e2784907 b840000000 c4e27b4b4c0740 c4e27b4b940740040000 c4e27b49c0 c4e26a5cc1"
    "c4e27a4b840740080000 c4e27b49c0 c4e26b5ec1 c4e27a4b8407400c0000 c4e27849c0 c3"
)


def tile_shapes(*shapes: tuple[int, int]) -> bytes:
    """What is loaded to give tiles 0, 1 ... so many rows of so many bytes."""
    unused = [0] * (16 - len(shapes))
    rows, num_bytes = zip(*shapes, strict=True)
    return struct.pack("<16B16H16B", 1, *[0] * 15, *num_bytes, *unused, *rows, *unused)


TILE_SHAPES = tile_shapes(*[(16, 64)] * 8)
_TILE_BYTES = 1024


@functools.cache
def may_use_amx() -> bool:
    """Ask for AMX for this process, and whether its instructions work."""
    return platform.machine() == "x86_64" and _ask() and _works()


def _ask() -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)) == 0


def _works() -> bool:
    """What a child process found, now or before."""
    from hotcold.numba_kernels.own_cache import own_folder, read_checked, write_checked

    file: Path | None = None
    with suppress(OSError, ValueError):  # `own_folder` has told of it, or the file is damaged
        file = own_folder("cpu") / f"amx-{_machine()}"
        return read_checked(file) == _WORKS
    command = [sys.executable, "-I", __file__]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_TRIAL_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    if file is not None and done.returncode in _FOUND:
        with suppress(OSError):
            write_checked(file, _FOUND[done.returncode])
    return done.returncode == 0


def _machine() -> str:
    """A digest of the CPU, its microcode and the operating system's kernel."""
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    facts = [line for line in lines if line.partition("\t")[0].strip() in names]
    text = "\n".join([*facts, os.uname().release, _CODE.hex()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _try() -> bool:
    """Run the instructions; they may kill this process."""
    if not _ask():
        return False
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_CODE)
    ones = struct.pack("<H", 0x3F80) * (_TILE_BYTES // 2)  # in bfloat16
    numbers = ctypes.create_string_buffer(TILE_SHAPES + ones * 2 + bytes(2 * _TILE_BYTES))
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    run(ctypes.addressof(numbers))
    floats = numbers.raw[64 + 2 * _TILE_BYTES :][:_TILE_BYTES]
    whole = numbers.raw[64 + 3 * _TILE_BYTES :][:_TILE_BYTES]
    dot = 32 * ((0x3F * 0x3F) + (0x80 - 256) ** 2)
    return floats == struct.pack("<f", 32) * 256 and whole == struct.pack("<i", dot) * 256


if __name__ == "__main__":
    sys.exit(0 if _try() else _WRONG)
