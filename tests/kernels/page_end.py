"""Arrays at the end of readable memory: whatever reads beyond them ends the process."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

_NO_ACCESS = 0


def at_page_end(array: np.ndarray) -> np.ndarray:
    """A copy that ends where a page ends that cannot be read. It stays as long as the process."""
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), _NO_ACCESS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    flat = np.frombuffer(memory, np.uint8, array.nbytes, size - array.nbytes)
    found = flat.view(array.dtype).reshape(array.shape)
    found[...] = array
    return found
