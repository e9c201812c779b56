"""What a foreign file makes this program do, done in a process of its own that can be ended.

A chat template is a program, and a tokenizer may take minutes for a text. A thread cannot be ended,
and while one computes in C no other runs; a process is held to its time and memory by the kernel.
It ends with the one that asks it, or within the time of what it was asked last.
"""

from __future__ import annotations

import importlib
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hotcold.model.current_folder import environment_of_python

_MAIN = "from hotcold.model.text.apart import serve; serve()"
# All that its process is told of this one's environment, in which there may be keys.
_ENVIRONMENT = ["HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME"]
_ENVIRONMENT += ["PYTHONUSERBASE", "TZ", "XDG_CACHE_HOME"]
_HEAD = struct.Struct("<IQ")  # a number, and the bytes that follow
_DONE, _REFUSED, _FAILED = range(3)
START_S = 5  # to read what it works with
_TIMEOUT = 20  # seconds of waiting for one of computing, where the machine is busy
_POLL_S = 0.1
_LINE_CHARS = 500

Answer = Callable[[bytes], bytes]


class RefusedError(Exception):
    """What was asked cannot be answered, in one line."""


class FailedError(Exception):
    """Nothing is answered because of what the process works with, in one line."""


class _TooLongError(FailedError):
    """It would be so again."""

    def __init__(self, limit_s: int) -> None:
        super().__init__(f"runs longer than {limit_s} s")


class _IdleError(FailedError):
    """It ended of itself."""


class Apart:
    """A function in a process of its own, which is begun when it is needed, and again if it died.

    It answers one question after the other, whichever threads ask.
    """

    def __init__(self, module: str, given: bytes, most_bytes: int, idle_s: int = 0) -> None:
        """`module` has `begin(given)`, which returns the function and what `facts` returns.

        The process may take `most_bytes` of memory, and ends when it was asked nothing for
        `idle_s` seconds; 0: it stays.
        """
        self._module = module
        self._given = given
        self._limits = most_bytes, idle_s
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._door: socket.socket | None = None
        self._end: Callable[[], object] | None = None
        self._facts: bytes | None = None
        self._problem: FailedError | None = None

    def facts(self) -> bytes:
        """What the module says of what it was given. Errors: FailedError."""
        if self._facts is None:
            with self._asking(None):
                self._begun()
        return self._facts or b""

    def ask(self, question: bytes, limit_s: int, unwanted: threading.Event | None = None) -> bytes:
        """The function's answer, for which it may compute `limit_s` seconds.

        Errors:  RefusedError, FailedError; FailedError soon after `unwanted` is set
        """
        with self._asking(unwanted):
            try:
                kind, answer = self._exchange(self._begun(), limit_s, question, unwanted)
            except _IdleError:  # it ended just now
                kind, answer = self._exchange(self._begun(), limit_s, question, unwanted)
        if kind != _DONE:
            raise (RefusedError if kind == _REFUSED else FailedError)(answer.decode())
        return answer

    @contextmanager
    def _asking(self, unwanted: threading.Event | None) -> Iterator[None]:
        """The only question; its process is ended where it is not answered."""
        while not self._turn.acquire(timeout=_POLL_S):
            _require_wanted(unwanted)
        try:
            yield
        except BaseException:
            self._close()
            raise
        finally:
            self._turn.release()

    def _begun(self) -> socket.socket:
        """The way to its process, which is begun where there is none. Errors: FailedError."""
        if self._problem is not None:
            raise self._problem
        if self._door is not None and self._process is not None and self._process.poll() is None:
            return self._door
        self._close()
        try:
            self._door, theirs = socket.socketpair()
            with theirs:
                self._process = _process(theirs, self._module, *self._limits)
        except OSError as problem:
            raise FailedError(f"cannot be run: {problem}") from None
        self._end = weakref.finalize(self, _ended, self._process, self._door)
        try:
            kind, found = self._exchange(self._door, START_S, self._given, None)
        except _TooLongError as problem:
            self._problem = problem
            raise
        if kind != _DONE:
            self._problem = FailedError(found.decode())
            raise self._problem
        self._facts = found
        return self._door

    def _exchange(
        self, door: socket.socket, limit_s: int, sent: bytes, unwanted: threading.Event | None
    ) -> tuple[int, bytes]:
        deadline = time.monotonic() + limit_s * _TIMEOUT

        def look() -> None:
            _require_wanted(unwanted)
            if time.monotonic() > deadline:
                raise _TooLongError(limit_s)

        try:
            door.settimeout(limit_s * _TIMEOUT)
            door.sendall(_HEAD.pack(limit_s, len(sent)) + sent)
            door.settimeout(_POLL_S)
            kind, size = _HEAD.unpack(_received(door, _HEAD.size, look))
            return kind, _received(door, size, look)
        except OSError:
            raise self._death(limit_s) from None

    def _death(self, limit_s: int) -> FailedError:
        """Why there is no answer and will be none."""
        status = 0
        with suppress(subprocess.TimeoutExpired):
            status = 0 if self._process is None else self._process.wait(1.0)
        if status == -signal.SIGXCPU:
            return _TooLongError(limit_s)
        kind = FailedError if status else _IdleError
        return kind(f"ended the process that ran it (status {status}); try again")

    def _close(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._door = self._end = None


def serve() -> None:
    """Be the process; its arguments are a module and limits, its standard input is a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):  # the first to go where memory is short
        Path("/proc/self/oom_score_adj").write_text("1000")
    _hold(resource.RLIMIT_CORE, 0)
    door = socket.socket(fileno=sys.stdin.fileno())
    module = importlib.import_module(sys.argv[1])
    most_bytes, idle_s = map(int, sys.argv[2:])
    _hold(resource.RLIMIT_DATA, most_bytes)
    answers: list[Answer] = []

    def begin(given: bytes) -> bytes:
        answer, facts = module.begin(given)
        answers.append(answer)
        return bytes(facts)

    while _answered(door, answers[0] if answers else begin):
        if idle_s and not select.select([door], [], [], idle_s)[0]:
            break


def _answered(door: socket.socket, answer: Answer) -> bool:
    """Answer the next question; False where nobody asks any more, or nothing more can be done."""
    try:
        limit_s, size = _HEAD.unpack(_received(door, _HEAD.size))
        question = _received(door, size)
    except OSError:
        return False
    _hold(resource.RLIMIT_CPU, int(time.process_time()) + 1 + limit_s)
    goes_on = True
    try:
        kind, found = _DONE, answer(question)
    except RefusedError as problem:
        kind, found = _REFUSED, _line(problem)
    except MemoryError:
        kind, found, goes_on = _FAILED, b"takes too much memory", False
    except Exception as problem:
        kind, found = _FAILED, _line(problem)
    with suppress(OSError):
        door.sendall(_HEAD.pack(kind, len(found)) + found)
    return goes_on


def _hold(kind: int, most: int) -> None:
    """Take no more of it from now on; it may be less already."""
    hard = resource.getrlimit(kind)[1]
    least = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (least, hard))


def _line(problem: Exception) -> bytes:
    text = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
    return ascii(text)[1:-1][:_LINE_CHARS].encode()


def _process(
    door: socket.socket, module: str, most_bytes: int, idle_s: int
) -> subprocess.Popen[bytes]:
    shown = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, module, str(most_bytes), str(idle_s)],
        env=shown | environment_of_python(),
        stdin=door.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,  # of its own: Ctrl-C is not for it
    )


def _ended(process: subprocess.Popen[bytes], door: socket.socket) -> None:
    door.close()
    process.kill()
    process.wait()


def _require_wanted(unwanted: threading.Event | None) -> None:
    if unwanted is not None and unwanted.is_set():
        raise FailedError("nobody waits for it any more")


def _received(door: socket.socket, size: int, look: Callable[[], None] = lambda: None) -> bytes:
    """The next `size` bytes; `look` is called while there are none. Errors: OSError."""
    found = bytearray(size)
    view, place = memoryview(found), 0
    while place < size:
        try:
            count = door.recv_into(view[place:])
        except TimeoutError:
            look()
            continue
        if not count:
            raise ConnectionResetError
        place += count
    return bytes(found)
