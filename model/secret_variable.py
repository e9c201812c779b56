"""The API key in the environment, which no other process than `hotcold serve` needs."""

from __future__ import annotations

import os

API_KEY = "HOTCOLD_API_KEY"
NAMES = (API_KEY, API_KEY.replace("_", "_SERVE_", 1))  # the second as any option of a command


def forget_api_key() -> None:
    """Remove the key from this process's environment, also where /proc shows it of its forks.

    Python's own removal leaves the text where the kernel put it when the program began.
    """
    import ctypes

    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    for name in NAMES:
        if place := getenv(name.encode()):
            ctypes.memset(place, 0, len(ctypes.string_at(place)))
        os.environ.pop(name, None)
