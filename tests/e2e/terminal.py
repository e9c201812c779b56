"""A command at the other end of a pseudo-terminal, and what its user sees."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyte
import pytest

from tests.e2e.commands import environment

COLUMNS, LINES = 80, 24


class _Screen(pyte.HistoryScreen):
    """Answers, as terminals do that are asked where their cursor is."""

    def __init__(self, answer: Callable[[str], None]) -> None:
        super().__init__(COLUMNS, LINES, history=10_000)
        self._answer = answer

    def write_process_input(self, data: str) -> None:
        self._answer(data)


class Terminal:
    """A terminal to type at and to look at."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._screen = _Screen(self.type)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    @property
    def shown(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip("\n")

    @property
    def all_text(self) -> str:
        """What has scrolled away, too."""
        lines = [
            "".join(line[column].data for column in range(COLUMNS)).rstrip()
            for line in self._screen.history.top
        ]
        return "\n".join([*lines, self.shown])

    @property
    def line(self) -> str:
        """Where the cursor is."""
        return self._screen.display[self._screen.cursor.y].rstrip()

    def wait_for(self, *texts: str, timeout_s: float = 60.0) -> None:
        """Wait until all of these are on the screen at once."""
        self._wait(lambda: all(text in self.shown for text in texts), repr(texts), timeout_s)

    def wait_for_prompt(self, timeout_s: float = 60.0) -> None:
        """Wait for an empty line to type at."""
        self._wait(lambda: self.line == ">", "prompt", timeout_s)

    def _wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            left_s = end - time.monotonic()
            if left_s <= 0 or not self._read(left_s):
                pytest.fail(f"no {what} in {self.all_text[-4000:]}")

    def _read(self, timeout_s: float) -> bool:
        """Take what comes; False where nothing does, or the other end is closed."""
        if not select.select([self.descriptor], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self.descriptor, 65536)
        except OSError:
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def drain(self) -> None:
        """Read until the other end is closed."""
        while self._read(60.0):
            pass


@contextmanager
def terminal(
    line: Sequence[str], changes: Mapping[str, str]
) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """Run a command whose terminal is ours to type at; keys such as Ctrl-C become signals."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    given = environment(Path("/tmp"), {"TERM": "xterm-256color", **changes})
    process = subprocess.Popen(
        line, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={name: text for name, text in given.items() if name not in ("COLUMNS", "LINES")},
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(ours)
