"""Runs what came with a foreign model in a subprocess that can be killed.

A chat template is a program, and a tokenizer may take minutes for a text. A thread cannot be ended,
and while one computes in C no other thread runs; the kernel holds a process to its CPU time and
memory. The subprocess ends with its parent, or within the time limit of its last request.
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

_MAIN = "from hotcold.model.text.subprocess_worker import serve; serve()"
# The subprocess gets these variables alone: there may be keys among the others.
_ENVIRONMENT = ["HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME"]
_ENVIRONMENT += ["PYTHONUSERBASE", "TZ", "XDG_CACHE_HOME"]
_HEAD = struct.Struct("<IQ")  # CPU seconds or a status, and the bytes that follow
_DONE, _REFUSED, _FAILED = range(3)
START_S = 5  # CPU seconds to load the module and its payload
_WALL_SECONDS_A_CPU_SECOND = 20  # on a busy machine
_POLL_S = 0.1
_LINE_CHARS = 500

Handler = Callable[[bytes], bytes]


class RefusedError(Exception):
    """The handler refuses the request, in one line."""


class FailedError(Exception):
    """The handler or its subprocess failed, in one line."""


class _TooLongError(FailedError):
    """It ran out of time, and would again."""

    def __init__(self, limit_s: int) -> None:
        super().__init__(f"runs longer than {limit_s} s")


class _IdleError(FailedError):
    """The subprocess ended by itself."""


class SubprocessWorker:
    """A function in a subprocess, which is started when needed, and again if it died.

    It handles one request at a time; any thread may send one.
    """

    def __init__(self, module: str, payload: bytes, max_bytes: int, idle_s: int = 0) -> None:
        """`module` has `start(payload)`, which returns the handler and what `facts` returns.

        The subprocess may take `max_bytes` of memory, and ends after `idle_s` seconds without a
        request; 0: it stays.
        """
        self._module = module
        self._payload = payload
        self._limits = max_bytes, idle_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._end: Callable[[], object] | None = None
        self._facts: bytes | None = None
        self._problem: FailedError | None = None

    def facts(self) -> bytes:
        """What the module says of its payload. Errors: FailedError."""
        if self._facts is None:
            with self._one_request(None):
                self._connected()
        return self._facts or b""

    def request(self, data: bytes, limit_s: int, cancelled: threading.Event | None = None) -> bytes:
        """Return the handler's reply, which may take `limit_s` seconds of CPU time.

        Errors:  RefusedError, FailedError; FailedError soon after `cancelled` is set
        """
        with self._one_request(cancelled):
            try:
                status, reply = self._exchange(self._connected(), limit_s, data, cancelled)
            except _IdleError:  # it ended just now
                status, reply = self._exchange(self._connected(), limit_s, data, cancelled)
        if status != _DONE:
            raise (RefusedError if status == _REFUSED else FailedError)(reply.decode())
        return reply

    @contextmanager
    def _one_request(self, cancelled: threading.Event | None) -> Iterator[None]:
        """Wait for other threads' requests; kill the subprocess where this one gets no reply."""
        while not self._lock.acquire(timeout=_POLL_S):
            _raise_if(cancelled)
        try:
            yield
        except BaseException:
            self._close()
            raise
        finally:
            self._lock.release()

    def _connected(self) -> socket.socket:
        """The socket of the subprocess, started where there is none. Errors: FailedError."""
        if self._problem is not None:
            raise self._problem
        if self._socket is not None and self._process is not None and self._process.poll() is None:
            return self._socket
        self._close()
        try:
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = _start(theirs, self._module, *self._limits)
        except OSError as problem:
            raise FailedError(f"cannot be run: {problem}") from None
        self._end = weakref.finalize(self, _kill, self._process, self._socket)
        try:
            status, found = self._exchange(self._socket, START_S, self._payload, None)
        except _TooLongError as problem:
            self._problem = problem
            raise
        if status != _DONE:
            self._problem = FailedError(found.decode())
            raise self._problem
        self._facts = found
        return self._socket

    def _exchange(
        self, own: socket.socket, limit_s: int, data: bytes, cancelled: threading.Event | None
    ) -> tuple[int, bytes]:
        timeout_s = limit_s * _WALL_SECONDS_A_CPU_SECOND
        deadline = time.monotonic() + timeout_s

        def poll() -> None:
            _raise_if(cancelled)
            if time.monotonic() > deadline:
                raise _TooLongError(limit_s)

        try:
            own.settimeout(timeout_s)
            own.sendall(_HEAD.pack(limit_s, len(data)) + data)
            own.settimeout(_POLL_S)
            status, size = _HEAD.unpack(_received(own, _HEAD.size, poll))
            return status, _received(own, size, poll)
        except OSError:
            raise self._death(limit_s) from None

    def _death(self, limit_s: int) -> FailedError:
        """The error that says why the subprocess ended."""
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
        self._process = self._socket = self._end = None


def serve() -> None:
    """Run the subprocess: its arguments are a module and limits, its standard input a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):  # the first to be killed where memory is short
        Path("/proc/self/oom_score_adj").write_text("1000")
    _limit(resource.RLIMIT_CORE, 0)
    own = socket.socket(fileno=sys.stdin.fileno())
    module = importlib.import_module(sys.argv[1])
    max_bytes, idle_s = map(int, sys.argv[2:])
    _limit(resource.RLIMIT_DATA, max_bytes)
    handlers: list[Handler] = []

    def start(payload: bytes) -> bytes:
        handler, facts = module.start(payload)
        handlers.append(handler)
        return bytes(facts)

    while _handle(own, handlers[0] if handlers else start):
        if idle_s and not select.select([own], [], [], idle_s)[0]:
            break


def _handle(own: socket.socket, handler: Handler) -> bool:
    """Handle the next request; False where the parent is gone, or memory ran out."""
    try:
        limit_s, size = _HEAD.unpack(_received(own, _HEAD.size))
        data = _received(own, size)
    except OSError:
        return False
    _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + limit_s)
    goes_on = True
    try:
        status, reply = _DONE, handler(data)
    except RefusedError as problem:
        status, reply = _REFUSED, _line(problem)
    except MemoryError:
        status, reply, goes_on = _FAILED, b"takes too much memory", False
    except Exception as problem:
        status, reply = _FAILED, _line(problem)
    with suppress(OSError):
        own.sendall(_HEAD.pack(status, len(reply)) + reply)
    return goes_on


def _limit(kind: int, limit: int) -> None:
    """Lower a limit of this process; it may be lower already."""
    hard = resource.getrlimit(kind)[1]
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (soft, hard))


def _line(problem: Exception) -> bytes:
    text = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
    return ascii(text)[1:-1][:_LINE_CHARS].encode()


def _start(
    theirs: socket.socket, module: str, max_bytes: int, idle_s: int
) -> subprocess.Popen[bytes]:
    variables = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, module, str(max_bytes), str(idle_s)],
        env=variables | environment_of_python(),
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,  # its own, which Ctrl-C does not reach
    )


def _kill(process: subprocess.Popen[bytes], own: socket.socket) -> None:
    own.close()
    process.kill()
    process.wait()


def _raise_if(cancelled: threading.Event | None) -> None:
    if cancelled is not None and cancelled.is_set():
        raise FailedError("the request was cancelled")


def _received(own: socket.socket, size: int, poll: Callable[[], None] = lambda: None) -> bytes:
    """The next `size` bytes; `poll` is called while there are none. Errors: OSError."""
    found = bytearray(size)
    view, start = memoryview(found), 0
    while start < size:
        try:
            count = own.recv_into(view[start:])
        except TimeoutError:
            poll()
            continue
        if not count:
            raise ConnectionResetError
        start += count
    return bytes(found)
