"""A command in a process of its own, at a terminal or with pipes, interrupted while it runs."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
SERVES = "hotcold serves"
_PROMPT = "> "
_CTRL_C, _CTRL_D = b"\x03", b"\x04"
_LONGEST_S, _ENDING_S, _POLL_S = 600.0, 10.0, 0.05
_AGAIN_S = 1.0  # until Ctrl-D is typed once more
_ESCAPES = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody interrupted."""

    output: str
    took_s: float


@dataclass(frozen=True)
class Run:
    """An interrupted run: what was there when the signal came, and how it ended."""

    moment_s: float
    seen: str  # of standard output, then
    had_ray: bool  # then
    status: int
    output: str
    errors: str
    left: list[str]  # what should not have been


@dataclass(frozen=True)
class Command:
    """A command line of hotcold."""

    arguments: tuple[str, ...]
    question: str = ""  # typed at the first prompt, or piped
    ends_by_itself: bool = True
    files: tuple[tuple[str, str], ...] = ()  # in its folder: name, content

    def run_undisturbed(self, terminal: bool) -> Undisturbed:
        """Run it to its end; one that has none is interrupted once it has said something.

        Errors:  RuntimeError where it fails
        """
        with self._started(terminal) as running:
            running.attend(running.ended if self.ends_by_itself else lambda: bool(running.output()))
            took_s = time.monotonic() - running.started_s
            if not self.ends_by_itself:
                running.interrupt()
            running.attend(running.ended)
            if running.process.returncode:
                raise RuntimeError(f"{self.arguments[0]} failed: {running.errors()[-2000:]}")
            return Undisturbed(running.output() if self.ends_by_itself else SERVES, took_s)

    def run(self, terminal: bool, moment_s: float) -> Run:
        """Run it with an interrupt after `moment_s` seconds."""
        with self._started(terminal) as running:
            end_s = running.started_s + moment_s
            running.attend(lambda: time.monotonic() >= end_s or running.ended())
            seen, had_ray = running.output(), bool(list(running.ray_folder.iterdir()))
            running.interrupt()
            running.attend(running.ended)
            left = running.left()
            output = running.output()
            if not self.ends_by_itself:  # its address differs from run to run
                seen, output = seen[: len(SERVES)], output[: len(SERVES)]
            status = running.process.returncode
            return Run(moment_s, seen, had_ray, status, output, running.errors(), left)

    @contextmanager
    def _started(self, terminal: bool) -> Iterator[_Running]:
        # Short names: a socket's path may have about a hundred bytes.
        folder = Path(tempfile.mkdtemp(prefix="hc-", dir="/tmp"))
        ray_folder = folder / "ray"
        ray_folder.mkdir()
        for name, content in self.files:
            (folder / name).write_text(content)
        running = _Running(self, folder, ray_folder, terminal)
        try:
            yield running
        finally:
            running.end()
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Stream:
    """What a process writes, read by a thread of its own."""

    descriptor: int
    content: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError):  # of a terminal whose last user has ended
            while chunk := os.read(self.descriptor, 1 << 16):
                self.content += chunk

    def text(self) -> str:
        return _ESCAPES.sub("", self.content.decode(errors="replace")).replace("\r", "")

    def join(self) -> None:
        self._thread.join(_ENDING_S)


class _Running:
    """A command that runs."""

    def __init__(self, command: Command, folder: Path, ray_folder: Path, terminal: bool) -> None:
        self.ray_folder, self._folder, self._terminal = ray_folder, folder, terminal
        self._asks = terminal and bool(command.question)
        self._question = command.question.encode() + b"\n"
        self._num_typed, self._typed_s = 0, 0.0
        environment = os.environ | {
            "RAY_TMPDIR": str(ray_folder), "PYTHONPATH": str(ROOT), "TERM": "xterm",
        }  # fmt: skip
        pairs = [_new_terminal() if terminal else os.pipe() for _ in range(2)]
        (read_out, write_out), (read_err, write_err) = pairs
        given = None if self._asks else self._question if command.question else b""
        standard_input = write_out if terminal else subprocess.PIPE
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hotcold.jobs.cli", *command.arguments],
            stdin=standard_input, stdout=write_out, stderr=write_err, cwd=folder, env=environment,
            start_new_session=terminal, preexec_fn=_take_terminal if terminal else _hear_interrupts,
        )  # fmt: skip
        os.close(write_out)
        os.close(write_err)
        self._streams = [_Stream(read_out), _Stream(read_err)]
        if not terminal and given is not None and self.process.stdin is not None:
            with suppress(BrokenPipeError), self.process.stdin as stdin:
                stdin.write(given)

    def output(self) -> str:
        return self._streams[0].text()

    def errors(self) -> str:
        return self._streams[1].text()

    def ended(self) -> bool:
        return self.process.poll() is not None

    def attend(self, until: Callable[[], bool]) -> None:
        """Wait for `until()`, typing what a conversation at a terminal needs.

        Errors:  RuntimeError where it never comes
        """
        while not until():
            if time.monotonic() - self.started_s > _LONGEST_S:
                raise RuntimeError(f"no end after {_LONGEST_S:.0f} s: {self.errors()[-2000:]}")
            if self._asks and self.output().endswith(_PROMPT):
                self._type_at_prompt()
            time.sleep(_POLL_S)

    def _type_at_prompt(self) -> None:
        if not self._num_typed:
            os.write(self._streams[0].descriptor, self._question)
            self._num_typed = 1
        elif time.monotonic() - self._typed_s > _AGAIN_S:
            os.write(self._streams[0].descriptor, _CTRL_D)
        else:
            return
        self._typed_s = time.monotonic()

    def interrupt(self) -> None:
        """Type Ctrl-C at the terminal, or send the signal."""
        if self._terminal:
            with suppress(OSError):  # it has ended
                os.write(self._streams[0].descriptor, _CTRL_C)
        else:
            self.process.send_signal(signal.SIGINT)

    def left(self) -> list[str]:
        """What the ended command has left: processes, Ray's files, a core."""
        end_s = time.monotonic() + _ENDING_S
        while (names := self._processes()) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        for stream in self._streams:
            stream.join()
        files = [path.name for path in self.ray_folder.iterdir()]
        files += [path.name for path in self._folder.glob("core*")]
        return [*(f"process {name} left" for name in names), *(f"{name} left" for name in files)]

    def _processes(self) -> list[str]:
        """Those that have this run's folder in their environment."""
        wanted, found = f"RAY_TMPDIR={self.ray_folder}".encode(), []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                content = Path(f"/proc/{process.pid}/environ").read_bytes()
                if wanted in content.split(b"\0") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.name())
        return found

    def end(self) -> None:
        """Leave nothing, however the run went."""
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        self.process.wait()
        for stream in self._streams:
            stream.join()
            os.close(stream.descriptor)


def _new_terminal() -> tuple[int, int]:
    """A terminal that shows what is written as it is, and nothing that is typed."""
    ours, theirs = os.openpty()
    state = termios.tcgetattr(theirs)
    state[1] &= ~termios.OPOST
    state[3] &= ~(termios.ECHO | termios.ECHOCTL)
    termios.tcsetattr(theirs, termios.TCSANOW, state)
    return ours, theirs


def _take_terminal() -> None:
    """In the new process: standard input is its terminal, where Ctrl-C comes from."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    _hear_interrupts()


def _hear_interrupts() -> None:
    """In the new process: a shell starts what runs in the background with Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
