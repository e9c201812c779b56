"""A process that forks a private Ray's workers, after importing what they need.

A worker takes a second to import Ray, NumPy and Numba. Here one process does so while Ray starts,
and each worker is a fork of it. In place of a worker the raylet runs `forked_worker.py`, which
requests a fork at a socket, and becomes a plain worker if it gets none.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from hotcold.model.current_folder import environment_of_python

ADDRESS = "HOTCOLD_FORK_SERVER"  # in the raylet's environment: the socket's path
_WORKER = "ray._private.workers.default_worker"
# None of them may create actor classes: Ray draws their ids at random, and after the fork all
# workers would draw the same ones.
_PRELOADED: tuple[str, ...] = (
    _WORKER,
    "hotcold.actors.processes.driver_actor",
    "hotcold.actors.processes.service_actor",
    "hotcold.actors.driver.driver",
    "hotcold.actors.cpu.cpu_service",
    "hotcold.actors.attention.attention_service",
    "numba.np.arraymath",  # Numba would import it, and SciPy's BLAS, with the first kernel
    "ray._common.usage.usage_lib",  # Ray would, when a worker connects
)
# With a later Ray the server ends, and workers start in Ray's own way.
_NEWEST_RAY = (2, 60)
# Of the garbage collector, here and in workers: most objects of imports stay, and with Python's own
# threshold of 700 it would run a thousand times in vain.
_GC_THRESHOLD = 50_000
# Of the C library, which makes eight a core, and what one thread freed others cannot use: some
# 20 MB in each process.
_ARENAS = {"MALLOC_ARENA_MAX": "2"}
_NO_JOB = "ffffffff"  # a worker learns from its first task which job it works for
_REQUEST_BYTES = 1 << 20
_PAUSE_S = 0.1  # before a failed fork is tried again
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """The server, as its owner sees it; it ends with the owner, and all workers end with it."""

    _begun: ForkServer | None = None
    _module = __name__  # whose main it runs

    @classmethod
    def begin(cls, *secrets: str) -> None:
        """Start a server early, for the next `take`, as its imports take time.

        It does not get the environment variables named in `secrets`.
        """
        if cls._begun is None:
            cls._begun = cls(*secrets)
            atexit.register(cls._begun.end)

    @classmethod
    def take(cls) -> ForkServer:
        """The server that `begin` started, else a new one; the caller ends it. Errors: OSError."""
        begun, cls._begun = cls._begun, None
        if begun is not None:
            atexit.unregister(begun.end)
        return begun or cls()

    def __init__(self, *secrets: str) -> None:
        """Start a server, which imports and waits for `listen`. Errors: OSError."""
        self._control, theirs = _socketpair()  # the server ends where the owner's side closes
        shown = {name: text for name, text in os.environ.items() if name not in secrets}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                env=_ARENAS | shown | environment_of_python(),
                cwd=os.sep,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # its own: Ctrl-C must not reach it
            )

    def run_beside(self, module: str, argument: bytes) -> None:
        """Call main(argument) of a module, in a fork that ends with the server; before `listen`.

        Errors:  OSError
        """
        self._control.send(module.encode() + b"\n" + argument)

    def listen(self, address: Path) -> None:
        """Fork a worker for each connection to this path. Errors: OSError, also for a later Ray."""
        if not _is_known_ray():
            raise OSError(f"forking is not tested with a Ray later than {_NEWEST_RAY}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(address))
            listener.listen()
            socket.send_fds(self._control, [b"listen"], [listener.fileno()])

    def end(self) -> None:
        """Kill the server and all workers that it forked; idempotent."""
        self._process.kill()
        self._process.wait()
        self._control.close()


def begin_workers() -> None:
    """Start a server early for a command that will start a private Ray; idempotent.

    Does nothing where RAY_ADDRESS names a cluster.
    """
    if "RAY_ADDRESS" not in os.environ:
        with suppress(OSError):  # `ForkServer.take` will report it
            ForkServer.begin("HOTCOLD_API_KEY")


def _socketpair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def main() -> None:
    """Run the server; its argument is the descriptor of the owner's socket."""
    gc.set_threshold(_GC_THRESHOLD)
    owner = socket.socket(fileno=int(sys.argv[1]))
    # Ray reads these two once, when it is imported. A worker ends with the process of the second
    # one, and with the raylet's socket.
    os.environ |= {"RAY_JOB_ID": _NO_JOB, "RAY_RAYLET_PID": str(os.getpid())}
    given = set(os.environ)
    if not _is_known_ray():
        return
    for name in _PRELOADED:
        importlib.import_module(name)
    _register_types()
    _send_plain_objects()
    # Modules that set a variable when they are imported do not run again in a worker.
    added = {name: text for name, text in os.environ.items() if name not in given}
    gc.freeze()  # a collection must not write to shared pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: exit statuses are not read
    descriptors: list[int] = []
    while not descriptors:
        request, descriptors, _, _ = socket.recv_fds(owner, _REQUEST_BYTES, 1)
        if not request:  # the owner has ended
            return
        if not descriptors:
            _run_beside(request)
    _serve(owner, socket.socket(fileno=descriptors[0]), added)


def _run_beside(request: bytes) -> None:
    """Fork, and call what `ForkServer.run_beside` has sent."""
    module, argument = request.split(b"\n", 1)
    server = os.getpid()
    with suppress(OSError):  # out of processes or memory
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                if os.getppid() == server:
                    importlib.import_module(module.decode()).main(argument)
            finally:
                os._exit(0)


def _register_types() -> None:
    """Do once what Numba does with its first kernel: register types and functions.

    Each worker would copy 20 MB of the pages that it shares with this process, and add 8.
    """
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()


def _send_plain_objects() -> None:
    """Else each worker imports Pydantic and Starlette, which Ray can send: our messages are plain.

    A hundred modules, 10 MB.
    """
    from ray.util import serialization_addons

    serialization_addons.apply = lambda context: None


def _is_known_ray() -> bool:
    import ray

    return tuple(map(int, ray.__version__.split(".")[:2])) <= _NEWEST_RAY


def _serve(owner: socket.socket, listener: socket.socket, added: dict[str, str]) -> None:
    """Fork a worker for each connection, until the owner ends. `added`: see `_become_worker`."""
    server = os.getpid()
    while owner not in select.select([owner, listener], [], [])[0]:
        try:
            connection = _fork(listener)
        except OSError:  # out of processes, descriptors or memory
            time.sleep(_PAUSE_S)
            continue
        if connection is not None:
            listener.close()
            owner.close()
            _become_worker(connection, server, added)


def _fork(listener: socket.socket) -> socket.socket | None:
    """Accept a connection and fork; returns the connection in the worker, None in this process.

    Errors:  OSError; the peer then becomes a plain worker
    """
    connection, _ = listener.accept()
    try:
        is_worker = os.fork() == 0
    except OSError:
        connection.close()
        raise
    if is_worker:
        return connection
    connection.close()
    return None


def _become_worker(connection: socket.socket, server: int, added: dict[str, str]) -> None:
    """Run as the requested worker until the process `server` ends; never returns.

    `added`: environment variables beside those of the request
    Errors:  OSError where the peer no longer waits
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it ended before prctl was called
        sys.exit()
    os.setpgid(0, 0)  # the raylet kills the process group of a worker that has ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3)
    arguments, environment, folder = json.loads(request)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(added | environment)
    from hotcold.actors.private_ray.closed_ray import read_anew

    read_anew()
    worker = sys.modules[_WORKER].__file__ or ""
    sys.argv = [worker, *arguments]
    connection.send(b"forked")
    connection.close()
    runpy.run_path(worker, run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    main()
