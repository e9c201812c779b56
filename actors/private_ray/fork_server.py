"""The process that a private Ray's workers are forked from, once it has imported what they need.

A worker takes a second to import Ray, NumPy and Numba. Here one process does so, beside the one
that starts Ray, and each worker begins as a copy of it. In place of a worker the raylet runs
`forked_worker.py`, which asks for one at a socket, and becomes one itself where there is none to
be had.
"""

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
# None of them may have made actor classes: Ray draws their ids at random, and all workers would
# then draw the same ones from there on.
_PRELOADED: tuple[str, ...] = (
    _WORKER,
    "hotcold.actors.processes.driver_actor",
    "hotcold.actors.processes.service_actor",
    "hotcold.actors.driver.driver",
    "hotcold.actors.cpu.cpu_service",
    "hotcold.actors.attention.attention_service",
    "numba.np.arraymath",  # Numba would import it, and SciPy's BLAS, with the first kernel
)
# With a later one the server ends, and workers start as that Ray starts them.
_NEWEST_RAY = (2, 60)
# Objects made between two looks for garbage, here and in workers: most of those that imports make
# stay, and Python's 700 have it look a thousand times in vain.
_OBJECTS_A_LOOK = 50_000
_NO_JOB = "ffffffff"  # a worker learns from its first task which job it works for
_REQUEST_BYTES = 1 << 20
_PAUSE_S = 0.1  # after a failure: what could not be accepted is there still
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class ForkServer:
    """The server as its owner sees it; it ends with the owner, and all workers with it."""

    _begun: "ForkServer | None" = None
    _module = __name__  # whose main it runs

    @classmethod
    def begin(cls, *secrets: str) -> None:
        """Start one for the next who takes it: what it imports takes time.

        Environment variables named in `secrets` are kept from it.
        """
        if cls._begun is None:
            cls._begun = cls(*secrets)
            atexit.register(cls._begun.end)

    @classmethod
    def take(cls) -> "ForkServer":
        """The one that has been begun, else a new one, to be ended. Errors: OSError."""
        begun, cls._begun = cls._begun, None
        if begun is not None:
            atexit.unregister(begun.end)
        return begun or cls()

    def __init__(self, *secrets: str) -> None:
        """Start it; it imports, and waits for `listen`. Errors: OSError."""
        self._control, theirs = _socketpair()  # the server ends where the owner's side closes
        shown = {name: text for name, text in os.environ.items() if name not in secrets}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                env=shown | environment_of_python(),
                cwd=os.sep,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # of its own: Ctrl-C is not for it
            )

    def listen(self, address: Path) -> None:
        """Let it fork a worker for each who asks at this path.

        Errors:  OSError, also where workers of this Ray are not to be forked
        """
        if not _is_known_ray():
            raise OSError(f"they were not tried to be forked with a Ray later than {_NEWEST_RAY}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(address))
            listener.listen()
            socket.send_fds(self._control, [b"listen"], [listener.fileno()])

    def end(self) -> None:
        """Kill it, with all workers that it forked; may be repeated."""
        self._process.kill()
        self._process.wait()
        self._control.close()


def begin_workers() -> None:
    """Begin a server for a command that will start a private Ray; may be repeated.

    Where RAY_ADDRESS names a cluster there is none to start.
    """
    if "RAY_ADDRESS" not in os.environ:
        with suppress(OSError):  # told by whoever starts Ray
            ForkServer.begin("HOTCOLD_API_KEY")


def _socketpair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def main() -> None:
    """Fork a worker for each who asks where the owner says, at a socket that is an argument."""
    gc.set_threshold(_OBJECTS_A_LOOK)
    owner = socket.socket(fileno=int(sys.argv[1]))
    # Ray reads these two when it is imported, and never again. A worker ends with the process that
    # the second one names, and with the raylet's socket.
    os.environ |= {"RAY_JOB_ID": _NO_JOB, "RAY_RAYLET_PID": str(os.getpid())}
    given = set(os.environ)
    if not _is_known_ray():
        return
    for name in _PRELOADED:
        importlib.import_module(name)
    # Modules that set a variable when they are imported do not run again in a worker.
    added = {name: text for name, text in os.environ.items() if name not in given}
    gc.freeze()  # what all workers share is not written to by a collection
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a worker's exit status
    _, descriptors, _, _ = socket.recv_fds(owner, _REQUEST_BYTES, 1)
    if not descriptors:  # the owner has ended
        return
    _serve(owner, socket.socket(fileno=descriptors[0]), added)


def _is_known_ray() -> bool:
    import ray

    return tuple(map(int, ray.__version__.split(".")[:2])) <= _NEWEST_RAY


def _serve(owner: socket.socket, listener: socket.socket, added: dict[str, str]) -> None:
    """Fork a worker for each who asks, until the owner ends. `added`: see `_become_worker`."""
    server = os.getpid()
    while owner not in select.select([owner, listener], [], [])[0]:
        try:
            asked = _forked(listener)
        except OSError:  # the system has no more processes, descriptors or memory just now
            time.sleep(_PAUSE_S)
            continue
        if asked is not None:
            listener.close()
            owner.close()
            _become_worker(asked, server, added)


def _forked(listener: socket.socket) -> socket.socket | None:
    """Fork a worker; in it, the socket at which it was asked for, and None in this process.

    Errors:  OSError; whoever asked, and gets none, becomes a worker itself
    """
    asked, _ = listener.accept()
    try:
        is_worker = os.fork() == 0
    except OSError:
        asked.close()
        raise
    if is_worker:
        return asked
    asked.close()
    return None


def _become_worker(asked: socket.socket, server: int, added: dict[str, str]) -> None:
    """Be the worker that `asked` asks for, until the process `server` ends; never returns.

    `added`: environment variables that the worker has besides those it is asked with
    Errors:  OSError where whoever asked does not wait any more
    """
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != server:  # it ended before it could be asked for its signal
        sys.exit()
    os.setpgid(0, 0)  # where a worker has ended, the raylet kills its process group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams, _, _ = socket.recv_fds(asked, _REQUEST_BYTES, 3)
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
    asked.send(b"forked")
    asked.close()
    runpy.run_path(worker, run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    main()
