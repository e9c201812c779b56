"""Kernels' launches on the CPU, over NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hotcold.cuda_kernels.launch import Argument, Grid
from hotcold.cuda_kernels.source import Entry

_KINDS = {np.uint64: b"p", np.int32: b"i", np.int64: b"l", np.float32: b"f"}


class _Launch(ctypes.Structure):
    """`emulation::Launch`."""

    _fields_ = (
        ("kinds", ctypes.c_char_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("buffer_bytes", ctypes.POINTER(ctypes.c_size_t)),
        ("num_buffers", ctypes.c_int),
        ("grid", ctypes.c_uint * 3),
        ("num_threads", ctypes.c_int),
        ("is_reversed", ctypes.c_int),
    )


class EmulatedLauncher:
    """`cuda_kernels.launch.Launcher` over a library that `build_library` made.

    A launch may only access arrays passed to `pointer` since the previous launch, and those of
    `empty_bytes`.
    Errors:  RuntimeError for an invalid access and for a race between threads
    """

    def __init__(self, library: Path, is_reversed: bool = False) -> None:
        self._run = ctypes.CDLL(str(library)).run_kernel
        self._run.restype = ctypes.c_char_p
        self._is_reversed = is_reversed
        self._allowed: dict[int, np.ndarray] = {}

    def empty_bytes(self, count: int) -> np.ndarray:
        """Aligned as CuPy's, and full of what must not be read."""
        return aligned(np.full(count, 0xFF, np.uint8))

    def pointer(self, array: np.ndarray) -> np.uint64:
        """See `Launcher`."""
        assert array.flags.c_contiguous
        self._allowed[array.ctypes.data] = array
        return np.uint64(array.ctypes.data)

    def launch(
        self, entry: Entry, grid: Grid, num_threads: int, arguments: Sequence[Argument]
    ) -> None:
        """See `Launcher`."""
        assert min(grid) > 0 and max(grid[1:]) < 1 << 16, grid
        cells = [np.atleast_1d(value) for value in arguments]
        places = [cell.ctypes.data for cell in cells]
        buffers = list(self._allowed.values())
        launch = _Launch(
            kinds=b"".join(map(_kind, arguments)),
            arguments=(ctypes.c_void_p * len(places))(*places),
            buffers=(ctypes.c_void_p * len(buffers))(*(array.ctypes.data for array in buffers)),
            buffer_bytes=(ctypes.c_size_t * len(buffers))(*(array.nbytes for array in buffers)),
            num_buffers=len(buffers),
            grid=(ctypes.c_uint * 3)(*grid),
            num_threads=num_threads,
            is_reversed=self._is_reversed,
        )
        problem = self._run(entry.name.encode(), ctypes.byref(launch))
        self._allowed.clear()
        if problem:
            raise RuntimeError(f"{entry.name}: {problem.decode()}")


def _kind(value: Argument) -> bytes:
    return b"s%d" % value.nbytes if isinstance(value, np.ndarray) else _KINDS[type(value)]


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 256 bytes, as a device's allocations are."""
    buffer = np.empty(array.nbytes + 256, np.uint8)
    start = -buffer.ctypes.data % 256
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
