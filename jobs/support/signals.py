"""Ctrl-C and SIGTERM where they must not raise anywhere, and where they could get lost.

A server ends in good order at the first, at once at the second. A command that waits for something
long ends that. SIGTERM ends any other command as an error does, by SystemExit.

Handlers communicate by a SimpleQueue: a handler may interrupt another one, or the call that waits
for it, and of all synchronisation objects only that is reentrant.
"""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_POLL_S = 0.1
_AGAIN_S = 0.02
_PID = os.getpid()
_MAIN = threading.main_thread().ident or 0
EXIT_TERMINATED = 128 + signal.SIGTERM  # as shells say it
_is_terminated = False


def raise_interrupts() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, unless this process ignores it."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_sigterm() -> None:
    """From now on SIGTERM raises SystemExit with EXIT_TERMINATED. For the main thread."""
    signal.signal(signal.SIGTERM, _terminate)


def exit_status(end: SystemExit) -> int:
    """The status of a process that `end` ends.

    Where SIGTERM comes while Ray waits, Ray raises a SystemExit of its own in place of this one's.
    """
    if _is_terminated:
        return EXIT_TERMINATED
    return end.code if isinstance(end.code, int) else 1


def _terminate(number: int, frame: FrameType | None) -> None:
    global _is_terminated
    _is_terminated = True
    raise SystemExit(EXIT_TERMINATED)


class Signals:
    """Within it, signals are counted from `wait` on; before, they raise as elsewhere."""

    def __init__(self) -> None:
        self._earlier: dict[int, Any] = {}
        self._is_waiting = False
        self.count = 0  # signals so far
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()  # one item for each

    def __enter__(self) -> "Signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._earlier[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def wait(self, poll: Callable[[], object] = lambda: None) -> None:
        """Return at the first signal; `poll` is called once a second, and may raise."""
        self._is_waiting = True
        while not self.count:
            if not self._has_come(1.0):
                poll()

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` is false, or at a second signal."""
        while self.count < 2 and condition():
            self._has_come(_POLL_S)

    def _has_come(self, timeout_s: float) -> bool:
        try:
            self._changed.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._changed.put(None)
        if not self._is_waiting:
            if number == signal.SIGTERM:
                _terminate(number, frame)
            raise KeyboardInterrupt


@contextmanager
def interrupts_after() -> Iterator[None]:
    """Within it Ctrl-C and SIGTERM, where they raise, do so at the end; a second one at once.

    For imports: Python loses an exception in its own callbacks, such as that of a module's lock,
    and in some C functions.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    come: list[int] = []
    earlier: dict[int, Callable[[int, FrameType | None], object]] = {}

    def note(number: int, frame: FrameType | None) -> None:
        come.append(number)
        if len(come) > 1:
            earlier[number](number, frame)

    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if callable(handler):  # else it is ignored, or ends the process at once
            earlier[number] = handler
            signal.signal(number, note)
    try:
        yield
    finally:
        for known, handler in earlier.items():
            signal.signal(known, handler)
        if come:
            signal.raise_signal(come[0])


def interrupt_again(lost: Any) -> None:
    """For `sys.unraisablehook`: repeats a signal whose exception was lost."""
    if not issubclass(lost.exc_type, (KeyboardInterrupt, SystemExit)):
        sys.__unraisablehook__(lost)
    elif os.getpid() == _PID:  # else a fork that is about to run another program
        number = signal.SIGINT if lost.exc_type is KeyboardInterrupt else signal.SIGTERM
        # Not here: an exception in the hook is lost as well.
        threading.Timer(_AGAIN_S, signal.pthread_kill, (_MAIN, number)).start()


@contextmanager
def on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Within it Ctrl-C calls `act` in another thread and raises nothing. For the main thread.

    A KeyboardInterrupt could come anywhere, also within the cleanup after the one before.
    """
    signalled: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True for Ctrl-C, False at the end

    def wait() -> None:
        if signalled.get():
            act()

    waiting = threading.Thread(target=wait, name="interrupts", daemon=True)
    waiting.start()
    earlier = signal.signal(signal.SIGINT, lambda number, frame: signalled.put(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)
        signalled.put(False)
        waiting.join()
