"""Stops the timer by which an idle worker wakes a hundred times a second.

A worker's main thread looks every 10 ms whether Python has a signal to handle: half a percent of a
core for each process. The interval is a constant of Ray (`CoreWorker.CheckSignal`). The timer is an
asio one, in a timerfd of its own, and asio sets that again only after it has expired: once stopped
it never does, and calls come by other descriptors. No signal of Python's is then handled while a
worker is idle, so SIGTERM ends it at once, as in a program without handlers.
"""

import ctypes
import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

_INTERVAL_NS = 10_000_000
_VALUE = re.compile(r"^it_value: \((\d+), (\d+)\)$", re.M)
_LOOKS = 40  # at all timers; others that are as short for once are not always
_LOOK_S = 0.003
_PAUSE_S = 0.5
_TRIES = 120  # until the worker has connected


class _Itimerspec(ctypes.Structure):
    _fields_ = (("times", ctypes.c_long * 4),)


def stop_signal_timer() -> None:
    """Begin a thread that stops the timer once it runs."""
    threading.Thread(target=_stop, name="signal timer", daemon=True).start()


def _stop() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    was_stopped = False
    for _ in range(_TRIES):
        time.sleep(_PAUSE_S)
        timers = _short_timers()
        if was_stopped and not timers:
            return
        if len(timers) == 1:  # else it is not clear which one it is
            libc.signal(signal.SIGTERM, signal.SIG_DFL)  # from any thread, unlike Python's
            libc.timerfd_settime(timers.pop(), 0, ctypes.byref(_Itimerspec()), None)
            was_stopped = True


def _short_timers() -> set[int]:
    """Running timers that were due within Ray's interval for as long as we looked."""
    looks = []
    for _ in range(_LOOKS):
        looks.append(_due_ns())
        time.sleep(_LOOK_S)
    found = set.intersection(
        *({one for one in look if look[one] <= _INTERVAL_NS} for look in looks)
    )
    return {one for one in found if any(look[one] for look in looks)}  # else it is not set


def _due_ns() -> dict[int, int]:
    """In how many nanoseconds each timer of this process is due, by its descriptor; 0: not set."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(link) == "anon_inode:[timerfd]":
                value = _VALUE.search(Path("/proc/self/fdinfo", link.name).read_text())
                if value:
                    found[int(link.name)] = int(value[1]) * 10**9 + int(value[2])
    return found
