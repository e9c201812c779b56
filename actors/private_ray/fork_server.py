"""A process that has imported what a private Ray's workers need, and that forks them.

A worker takes two seconds to import Ray, NumPy, Numba and our actors. In place of one the raylet
runs `forked_worker.py`, which requests a fork at a socket, and becomes a plain worker if it gets
none. A command whose user waits starts this server first, and both import at once
(`ForkServer.begin`). An HTTP server imports everything, and its fork is the server
(`share_imports`): none of the processes has a copy of its own but of pages that it writes. A
program that uses the Python API has a server that is started beside it.
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
import sys
import threading
import time
import traceback
from collections.abc import Sequence
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
# With a later Ray workers start in Ray's own way.
_NEWEST_RAY = (2, 60)
# Of the garbage collector: most objects of imports stay, and with Python's own threshold of 700 it
# would run a thousand times in vain.
_GC_THRESHOLD = 50_000
# Of the C library, which makes eight arenas a core, and what one thread freed others cannot use:
# some 20 MB in each process.
_ARENA_MAX, _NUM_ARENAS = -8, 2
_NO_JOB = "ffffffff"  # a worker learns from its first task which job it works for
_REQUEST_BYTES = 1 << 20
_PAUSE_S = 0.1  # before a failed fork is tried again
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """The server, as its owner sees it; it ends with the owner, and all workers end with it."""

    _begun: ForkServer | None = None
    _module = __name__  # whose main it runs

    def __init__(self, process_id: int, control: socket.socket) -> None:
        """`control`: the owner's side; the server ends where it closes."""
        self._process_id, self._control = process_id, control

    @classmethod
    def begin(cls) -> None:
        """Start a server early, for the next `take`: it imports while this process does, too."""
        if "RAY_ADDRESS" not in os.environ and cls._begun is None:
            with suppress(OSError):  # `take` reports it
                cls._begun = cls.start()
                atexit.register(cls._begun.end)

    @classmethod
    def take(cls) -> ForkServer:
        """The server begun, or made by `share_imports`, else a new one. Errors: OSError."""
        begun, cls._begun = cls._begun, None
        if begun is None:
            return cls.start()
        atexit.unregister(begun.end)
        return begun

    @classmethod
    def start(cls) -> ForkServer:
        """A new server, a program of its own. Errors: OSError."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            theirs.set_inheritable(True)
            command = [sys.executable, "-m", cls._module, str(theirs.fileno())]
            environment = {**os.environ, **environment_of_python()}
            streams = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in range(3)]
            return cls(
                os.posix_spawn(
                    sys.executable, command, environment, file_actions=streams, setpgroup=0
                ),
                control,
            )

    def listen(self, address: Path) -> None:
        """Fork for each request at this path. Errors: OSError, also for a later Ray."""
        if not _is_known_ray():
            raise OSError(f"forking is not tested with a Ray later than {_NEWEST_RAY}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(address))
            listener.listen()
            socket.send_fds(self._control, [b"listen"], [listener.fileno()])

    def end(self) -> None:
        """Kill the server and all workers that it forked; idempotent."""
        process_id, self._process_id = self._process_id, 0
        if process_id:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(process_id, signal.SIGKILL)
                os.waitpid(process_id, 0)
            self._control.close()


def run_beside(address: Path, module: str, stdin: bytes) -> None:
    """Run a module as a program, in a fork of the server that listens there. Errors: OSError."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
        open(os.memfd_create("stdin"), "w+b") as given,
        open(os.devnull, "wb") as nowhere,
    ):
        given.write(stdin)
        given.seek(0)
        server.connect(str(address))
        request = json.dumps((module, [], dict(os.environ), os.sep)).encode()
        socket.send_fds(server, [request], [given.fileno(), nowhere.fileno(), nowhere.fileno()])


def share_imports(*modules: str) -> None:
    """Import modules, and what workers need, and fork: this process shares them with its workers.

    For a command that will start a private Ray, and that has not begun anything: with other
    threads, with Ray imported before, or where RAY_ADDRESS names a cluster, it does nothing.
    """
    if "RAY_ADDRESS" in os.environ or "ray" in sys.modules or threading.active_count() > 1:
        return
    added = _preload(modules)
    if not _is_known_ray():
        return
    gc.freeze()  # a collection must not write to shared pages
    owner = os.getpid()
    with suppress(OSError):  # a server of its own is started later, or says why not
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if (server := os.fork()) == 0:
            _run(theirs, owner, added)
        theirs.close()
        ForkServer._begun = ForkServer(server, control)
        atexit.register(ForkServer._begun.end)


def main() -> None:
    """Run the server; its argument is the descriptor of the owner's socket."""
    owner = os.getppid()
    gc.set_threshold(_GC_THRESHOLD)
    added = _preload(())
    if _is_known_ray():
        _run(socket.socket(fileno=int(sys.argv[1])), owner, added)


def _preload(modules: Sequence[str]) -> dict[str, str]:
    """Import; the variables that modules have set meanwhile: in a fork they do not run again."""
    # Ray reads these two once, when it is imported. A worker ends with the process of the second
    # one, and with the raylet's socket.
    of_ray = {"RAY_JOB_ID": _NO_JOB, "RAY_RAYLET_PID": str(os.getpid())}
    before = dict(os.environ)
    os.environ |= of_ray
    try:
        for name in (*modules, *_PRELOADED):
            importlib.import_module(name)
    finally:
        for name in of_ray:
            del os.environ[name]
        os.environ |= {name: before[name] for name in of_ray if name in before}
    # What Numba does with its first kernel: each worker would copy 20 MB of what is shared.
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    return {name: text for name, text in os.environ.items() if name not in before}


def _is_known_ray() -> bool:
    import ray

    return tuple(map(int, ray.__version__.split(".")[:2])) <= _NEWEST_RAY


def _run(owner: socket.socket, process_id: int, added: dict[str, str]) -> None:
    """Be the server of the process `process_id`, or one of its forks; never returns."""
    status = 1
    try:
        _end_with(process_id)
        _leave_owner(owner)
        _serve(owner, added)
        status = 0
    except SystemExit as end:  # a worker's
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:  # not as the owner would end
        with suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _leave_owner(owner: socket.socket) -> None:
    """Keep nothing of the owner's but its modules and `owner`."""
    os.setpgid(0, 0)  # Ctrl-C must not reach it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: exit statuses are not read
    sys.unraisablehook = sys.__unraisablehook__
    for link in Path("/proc/self/fd").iterdir():
        if int(link.name) not in (0, 1, 2, owner.fileno()):
            with suppress(OSError):  # that of the folder itself
                os.close(int(link.name))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    os.close(nowhere)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False)  # noqa: SIM115
        for number, mode in enumerate(("r", "w", "w"))
    )
    os.chdir(os.sep)
    os.environ |= environment_of_python()
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_ARENA_MAX, _NUM_ARENAS)
    from ray._raylet import setproctitle
    from ray.util import serialization_addons

    # Where processes are listed; the owner's options are overwritten.
    setproctitle(f"{__package__}.fork_server")
    # Else each worker imports Pydantic and Starlette, a hundred modules and 10 MB, which Ray can
    # send: our messages are plain.
    serialization_addons.apply = lambda context: None
    gc.freeze()


def _serve(owner: socket.socket, added: dict[str, str]) -> None:
    """Once `owner` has said where, fork for each request, until it ends; forks return, too."""
    server = os.getpid()
    _, descriptors, _, _ = socket.recv_fds(owner, _REQUEST_BYTES, 1)
    if not descriptors:  # the owner has ended
        return
    listener = socket.socket(fileno=descriptors[0])
    while owner not in select.select([owner, listener], [], [])[0]:
        try:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    owner.close()
                    _be_program(connection, server, added)
                    return
        except OSError:  # out of processes, descriptors or memory: who has asked becomes a worker
            if os.getpid() != server:
                raise
            time.sleep(_PAUSE_S)


def _be_program(connection: socket.socket, server: int, added: dict[str, str]) -> None:
    """Run the requested module as a program, until it or the server ends.

    Errors:  OSError where the peer no longer waits
    """
    _end_with(server)
    os.setpgid(0, 0)  # the raylet kills the process group of a worker that has ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3)
    module, arguments, environment, folder = json.loads(request)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(added | environment)
    from hotcold.actors.private_ray.closed_ray import read_anew

    read_anew()
    path = importlib.import_module(module).__file__ or ""
    sys.argv = [path, *arguments]
    if module == _WORKER:
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
