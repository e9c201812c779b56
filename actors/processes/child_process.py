"""Short-lived child processes, and what a process does to keep within a memory budget."""

import ctypes
import os
import signal
import subprocess
import sys

from hotcold.model.current_folder import environment_of_python

_PR_SET_PDEATHSIG = 1
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_LARGE_BYTES = 1 << 20


def begin_process(module: str, *arguments: str, stdin: int, stdout: int) -> subprocess.Popen[bytes]:
    """Run a module of this program, which should call `end_with_parent`. Errors: OSError."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **environment_of_python(), "MALLOC_ARENA_MAX": "1"},
        cwd=os.sep,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
    )


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def give_back_freed_memory() -> None:
    """Return each freed buffer of a megabyte or more to the operating system at once.

    By default glibc raises its mmap threshold to up to 32 MiB as buffers are freed, and each thread
    keeps freed ones: some 300 MiB of work space of long prompts stayed in each service. Without
    mallopt(3) in the C library nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_TRIM_THRESHOLD, _LARGE_BYTES)


def trim_heap() -> None:
    """Return what is free in the C library's heap now; other C libraries do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
