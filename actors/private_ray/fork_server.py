"""A process that has imported what a private Ray's workers need, and that forks them.

A worker takes two seconds to import Ray, NumPy, Numba and our actors: with this process the first
text comes after half the time. The raylet runs `forked_worker.py` in place of a worker, which
requests a fork at a socket, and becomes a plain worker if it gets none. A command whose user waits
starts this process first, and both import at once (`ForkServer.begin`).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
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
# Most objects of imports stay: with Python's own threshold of 700 the garbage collector would run a
# thousand times in vain.
_GC_THRESHOLD = 50_000
_NO_JOB = "ffffffff"  # a worker learns from its first task which job it works for
_REQUEST_BYTES = 1 << 20
_PAUSE_S = 0.01
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """The server, as its owner sees it; the kernel ends it with its owner, and workers with it."""

    _begun: ForkServer | None = None
    _module = __name__  # whose main it runs

    def __init__(self) -> None:
        """Start it. Errors: OSError."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number, owner = self._listener.fileno(), os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module, str(number), str(owner)],
            # Of the C library's memory arenas, eight a core, one's freed memory is of no use to
            # the others.
            env={**os.environ, **environment_of_python(), "MALLOC_ARENA_MAX": "2"},
            cwd=os.sep,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[number],
            process_group=0,  # Ctrl-C must not reach it
        )

    @classmethod
    def begin(cls) -> None:
        """Start a server early, for the next `take`."""
        if "RAY_ADDRESS" not in os.environ and cls._begun is None:
            with suppress(OSError):  # `take` tries again
                cls._begun = cls()

    @classmethod
    def take(cls) -> ForkServer:
        """The server begun, else a new one. Errors: OSError."""
        begun, cls._begun = cls._begun, None
        return begun or cls()

    def listen(self, address: Path) -> None:
        """Have it fork for each request at this path. Errors: OSError."""
        with self._listener:
            self._listener.bind(str(address))
            self._listener.listen()

    def run(self, address: Path, module: str, stdin: bytes) -> None:
        """Run a module as a program in a fork, with all that is imported. Errors: OSError."""
        self._beside = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with (
            open(os.memfd_create("stdin"), "w+b") as given,
            open(os.devnull, "wb") as nowhere,
        ):
            given.write(stdin)
            given.seek(0)
            self._beside.connect(str(address))
            request = json.dumps((module, [], dict(os.environ))).encode()
            streams = [given.fileno(), nowhere.fileno(), nowhere.fileno()]
            socket.send_fds(self._beside, [request], streams)

    def end(self) -> None:
        """Kill the server and all workers that it forked; idempotent."""
        self._listener.close()
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Import, then serve at the socket of the given descriptor, until the given process ends."""
    number, owner = map(int, sys.argv[1:])
    _end_with(owner)
    # Ray reads these once, when it is imported. A worker ends with the process of the second one,
    # and with the raylet's socket.
    os.environ |= {"RAY_JOB_ID": _NO_JOB, "RAY_RAYLET_PID": str(os.getpid())}
    gc.set_threshold(_GC_THRESHOLD)
    for name in _PRELOADED:
        importlib.import_module(name)
    from numba.core.registry import cpu_target
    from ray.util import serialization_addons

    # What Numba does with its first kernel: each worker would copy 20 MB of what is shared.
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    # Else each worker imports Pydantic and Starlette, which Ray can send, and takes 25 MB more: our
    # messages are plain.
    serialization_addons.apply = lambda context: None
    gc.freeze()  # a collection must not write to shared pages
    _serve(socket.socket(fileno=number))


def _serve(listener: socket.socket) -> None:
    """Fork for each request, until this process is killed; forks return once they have run."""
    server = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: exit statuses are not read
    while True:
        try:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    _be_program(connection, server)
                    return
        except OSError:
            if os.getpid() != server:
                raise
            # The owner does not listen yet; or the machine is out of processes, descriptors or
            # memory, and who has asked becomes a plain worker.
            time.sleep(_PAUSE_S)


def _be_program(connection: socket.socket, server: int) -> None:
    """Run the requested module, mostly Ray's worker, until it or the server ends.

    Errors:  OSError where the peer no longer waits
    """
    from hotcold.actors.private_ray.closed_ray import read_anew

    _end_with(server)
    os.setpgid(0, 0)  # the raylet kills the process group of a worker that has ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3)
    module, arguments, environment = json.loads(request)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.update(environment)  # what modules have set when they were imported stays
    read_anew()
    path = importlib.import_module(module).__file__ or ""
    sys.argv = [path, *arguments]
    connection.send(b"forked")
    connection.close()
    runpy.run_path(path, run_name="__main__")


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl was called
        os._exit(1)


if __name__ == "__main__":
    main()
