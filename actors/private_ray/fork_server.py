"""A process that forks a private Ray's workers, after importing what they need.

A worker takes a second to import Ray, NumPy and Numba. Here one process does so while Ray starts,
and each worker is a fork of it. In place of a worker the raylet runs `forked_worker.py`, which
requests a fork at a socket, and becomes a plain worker if it gets none.

In a command that stays the server is itself a fork of that (`shared_imports.py`).
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hotcold.actors.private_ray.signal_timer import stop_signal_timer
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
NUM_ARENAS, ARENAS = 2, "MALLOC_ARENA_MAX"
_NO_JOB = "ffffffff"  # a worker learns from its first task which job it works for
_REQUEST_BYTES = 1 << 20
_PAUSE_S = 0.1  # before a failed fork is tried again
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """The server, as its owner sees it; it ends with the owner, and all workers end with it."""

    _begun: ForkServer | None = None
    _module = __name__  # whose main it runs

    @classmethod
    def begin(cls) -> None:
        """Start a server early, for the next `take`, as its imports take time."""
        if cls._begun is None:
            cls.keep(cls.start())

    @classmethod
    def keep(cls, begun: ForkServer) -> None:
        """Hold a server for the next `take`."""
        cls._begun = begun
        atexit.register(begun.end)

    @classmethod
    def take(cls) -> ForkServer:
        """The server that was begun, else a new one; the caller ends it.

        Errors:  OSError
        """
        begun, cls._begun = cls._begun, None
        if begun is not None:
            atexit.unregister(begun.end)
        return begun or cls.start()

    @classmethod
    def start(cls) -> ForkServer:
        """A new server. Errors: OSError."""
        control, theirs = socketpair()  # the server ends where the owner's side closes
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", cls._module, str(theirs.fileno())],
                env={ARENAS: str(NUM_ARENAS)} | os.environ | environment_of_python(),
                cwd=os.sep,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # its own: Ctrl-C must not reach it
            )
        return cls(process, control)

    def __init__(self, process: subprocess.Popen[bytes] | Fork, control: socket.socket) -> None:
        """`control`: the owner's side."""
        self._process, self._control = process, control

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


class Fork:
    """A child of this process that runs no program of its own; see subprocess.Popen."""

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._has_ended = False

    def kill(self) -> None:
        """End it; idempotent."""
        if not self._has_ended:
            with suppress(ProcessLookupError):
                os.kill(self._process_id, signal.SIGKILL)

    def wait(self) -> None:
        """Wait for its end; idempotent."""
        with suppress(ChildProcessError):
            if not self._has_ended:
                os.waitpid(self._process_id, 0)
        self._has_ended = True


def begin_workers() -> None:
    """Start a server early for a command that will start a private Ray; idempotent.

    Does nothing where RAY_ADDRESS names a cluster.
    """
    if "RAY_ADDRESS" not in os.environ:
        with suppress(OSError):  # `ForkServer.take` will report it
            ForkServer.begin()


def socketpair() -> tuple[socket.socket, socket.socket]:
    """The owner's side and the server's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def main() -> None:
    """Run the server; its argument is the descriptor of the owner's socket."""
    gc.set_threshold(_GC_THRESHOLD)
    owner = socket.socket(fileno=int(sys.argv[1]))
    with importing_for_workers() as added:
        is_known = preload()
    if is_known:
        serve(owner, added)


@contextmanager
def importing_for_workers() -> Iterator[dict[str, str]]:
    """Within it Ray is imported as workers need it.

    Yields the environment variables that modules have set meanwhile, once it has ended: in a worker
    they do not run again.
    """
    # Ray reads these two once, when it is imported. A worker ends with the process of the second
    # one, and with the raylet's socket.
    of_ray = {"RAY_JOB_ID": _NO_JOB, "RAY_RAYLET_PID": str(os.getpid())}
    before = {name: os.environ[name] for name in of_ray if name in os.environ}
    os.environ |= of_ray
    given, added = set(os.environ), dict[str, str]()
    try:
        yield added
    finally:
        added |= {name: text for name, text in os.environ.items() if name not in given}
        for name in of_ray:
            del os.environ[name]
        os.environ |= before


def preload() -> bool:
    """Import what workers need; False with a later Ray."""
    if not _is_known_ray():
        return False
    for name in _PRELOADED:
        importlib.import_module(name)
    _register_types()
    return True


def serve(owner: socket.socket, added: dict[str, str]) -> None:
    """Fork workers once `owner` says where they are requested, until it ends.

    `added`: environment variables beside those of the requests
    """
    _send_plain_objects()
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
            try:
                end_with(server)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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
    end_with(server)
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
    stop_signal_timer()
    runpy.run_path(worker, run_name="__main__")
    sys.exit()


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl was called
        sys.exit()


if __name__ == "__main__":
    main()
