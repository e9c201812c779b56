"""Ctrl-C and SIGTERM where they must not interrupt just anything.

For a command that serves: once to end in good order, twice at once. For a command that waits for
something long: to end that.

What a handler tells goes through a SimpleQueue: a handler may interrupt another one, or the very
call that waits for it, and of all there is to wait with only that may be entered twice.
"""

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_LOOK_S = 0.1


class Signals:
    """Within it, signals are counted once `wait` was called; before, they interrupt."""

    def __init__(self) -> None:
        """To be used in the main thread."""
        self._earlier: dict[int, Any] = {}
        self._is_waiting = False
        self._count = 0
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()  # one item for each

    def __enter__(self) -> "Signals":
        self._earlier = self._take()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    @property
    def count(self) -> int:
        """How many have come."""
        return self._count

    def wait(self, look: Callable[[], object] = lambda: None) -> None:
        """Return at the first signal; `look` is called once a second, and may raise."""
        self._is_waiting = True
        self._take()  # once more: Ray took SIGTERM for itself when it started
        while not self._count:
            if not self._has_come(1.0):
                look()

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` is false, or at a second signal."""
        while self._count < 2 and condition():
            self._has_come(_LOOK_S)

    def _has_come(self, timeout_s: float) -> bool:
        try:
            self._changed.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True

    def _take(self) -> dict[int, Any]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        return {number: signal.signal(number, self._handle) for number in numbers}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self._changed.put(None)
        if not self._is_waiting:
            raise KeyboardInterrupt


@contextmanager
def on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Within it Ctrl-C calls `act`, in another thread, and interrupts nothing. In the main thread.

    An interrupt may come anywhere, also within what was meant to clean up after the one before.
    """
    told: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True for Ctrl-C, False at the end

    def wait() -> None:
        if told.get():
            act()

    waiting = threading.Thread(target=wait, name="interrupts", daemon=True)
    waiting.start()
    earlier = signal.signal(signal.SIGINT, lambda number, frame: told.put(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)
        told.put(False)
        waiting.join()
