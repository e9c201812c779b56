"""The API key in the environment, which no other process than `hotcold serve` needs."""

from __future__ import annotations

import os

API_KEY = "HOTCOLD_API_KEY"


def forget_variable(name: str) -> None:
    """Remove an environment variable of this process, also where /proc shows it of its forks.

    Python's own removal leaves the text where the kernel put it when the program began.
    """
    import ctypes

    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    if place := getenv(name.encode()):
        ctypes.memset(place, 0, len(ctypes.string_at(place)))
    os.environ.pop(name, None)
