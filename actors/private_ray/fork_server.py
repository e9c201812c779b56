"""A process that forks a private Ray's workers, after importing what they need.

A worker takes a second to import Ray, NumPy and Numba. Here one process does so while Ray starts,
and each worker is a fork of it. In place of a worker the raylet runs `forked_worker.py`, which
requests a fork at a socket, and becomes a plain worker if it gets none.

A command that stays imports most of this too, so there the server is a fork of it: all share what
has been imported before.
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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hotcold.actors.private_ray.signal_timer import stop_signal_timer
from hotcold.model.current_folder import environment_of_python

ADDRESS = "HOTCOLD_FORK_SERVER"  # in the raylet's environment: the socket's path
_WORKER = "ray._private.workers.default_worker"
# None of them may create actor classes: Ray draws their ids at random, and after the fork all
# workers would draw the same ones.
_OF_ALL = (  # of a command that stays, too
    _WORKER,
    "hotcold.actors.processes.driver_actor",
    "hotcold.actors.processes.service_actor",
)
_PRELOADED: tuple[str, ...] = (
    *_OF_ALL,
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
_NUM_ARENAS = 2
_ARENAS = {"MALLOC_ARENA_MAX": str(_NUM_ARENAS)}
_ARENA_MAX = -8  # a parameter of mallopt(3)
_NO_JOB = "ffffffff"  # a worker learns from its first task which job it works for
_REQUEST_BYTES = 1 << 20
_PAUSE_S = 0.1  # before a failed fork is tried again
_PR_SET_PDEATHSIG = 1


class ForkServer:
    """The server, as its owner sees it; it ends with the owner, and all workers end with it."""

    _begun: "ForkServer | None" = None
    _module = __name__  # whose main it runs

    @classmethod
    def begin(cls, *secrets: str) -> None:
        """Start a server early, for the next `take`, as its imports take time.

        It does not get the environment variables named in `secrets`.
        """
        if cls._begun is None:
            cls._keep(cls.start(*secrets))

    @classmethod
    def fork(cls, *secrets: str) -> None:
        """As `begin`, by a fork of this process, which still has one thread and one task: to begin.

        First it imports what both need.
        """
        if cls._begun is None:
            cls._keep(cls._forked(secrets))

    @classmethod
    def take(cls) -> "ForkServer":
        """The server that `begin` or `fork` started, else a new one; the caller ends it.

        Errors:  OSError
        """
        begun, cls._begun = cls._begun, None
        if begun is not None:
            atexit.unregister(begun.end)
        return begun or cls.start()

    @classmethod
    def start(cls, *secrets: str) -> "ForkServer":
        """A new server. `secrets`: see `begin`. Errors: OSError."""
        control, theirs = _socketpair()  # the server ends where the owner's side closes
        shown = {name: text for name, text in os.environ.items() if name not in secrets}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", cls._module, str(theirs.fileno())],
                env=_ARENAS | shown | environment_of_python(),
                cwd=os.sep,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # its own: Ctrl-C must not reach it
            )
        return cls(process, control)

    @classmethod
    def _forked(cls, secrets: Sequence[str]) -> "ForkServer":
        added = _import(_OF_ALL)
        gc.freeze()  # a collection must not write to shared pages
        owner = os.getpid()
        control, theirs = _socketpair()
        if (server := os.fork()) == 0:
            _serve_owner(theirs, owner, added, secrets)
        theirs.close()
        return cls(_Fork(server), control)

    @classmethod
    def _keep(cls, begun: "ForkServer") -> None:
        cls._begun = begun
        atexit.register(begun.end)

    def __init__(self, process: "subprocess.Popen[bytes] | _Fork", control: socket.socket) -> None:
        """`control`: the owner's side."""
        self._process, self._control = process, control

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


class _Fork:
    """A child of this process that runs no program of its own; see subprocess.Popen."""

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._has_ended = False

    def kill(self) -> None:
        if not self._has_ended:
            with suppress(ProcessLookupError):
                os.kill(self._process_id, signal.SIGKILL)

    def wait(self) -> None:
        with suppress(ChildProcessError):
            if not self._has_ended:
                os.waitpid(self._process_id, 0)
        self._has_ended = True


def begin_workers(*, forked: bool = False) -> None:
    """Start a server early for a command that will start a private Ray; idempotent.

    `forked`: as `ForkServer.fork`. Does nothing where RAY_ADDRESS names a cluster.
    """
    if "RAY_ADDRESS" not in os.environ:
        with suppress(OSError):  # `ForkServer.take` will report it
            (ForkServer.fork if forked else ForkServer.begin)("HOTCOLD_API_KEY")


def _socketpair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def main() -> None:
    """Run the server; its argument is the descriptor of the owner's socket."""
    gc.set_threshold(_GC_THRESHOLD)
    _prepare(socket.socket(fileno=int(sys.argv[1])), {})


def _serve_owner(
    owner: socket.socket, process_id: int, added: dict[str, str], secrets: Sequence[str]
) -> NoReturn:
    """Run the server in a fork of its owner, which is the process `process_id`."""
    status = 1
    try:
        _end_with(process_id)
        _leave_owner(owner, secrets)
        _prepare(owner, added)
        status = 0
    except SystemExit as end:  # a worker's
        status = end.code if isinstance(end.code, int) else 1
    finally:  # not as the owner would end
        with suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(status)


def _leave_owner(owner: socket.socket, secrets: Sequence[str]) -> None:
    """Keep nothing of the owner's but its modules and `owner`, as if started by itself."""
    os.setpgid(0, 0)  # its own: Ctrl-C must not reach it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.unraisablehook = sys.__unraisablehook__
    for name in secrets:
        os.environ.pop(name, None)
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
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not _ARENAS.keys() & os.environ.keys():
        mallopt(_ARENA_MAX, _NUM_ARENAS)
    _take_name(__name__)


def _take_name(name: str) -> None:
    """Be called `name` where processes are listed, not as the owner, with its options."""
    with suppress(ImportError):  # of a Ray that has none
        from ray._raylet import setproctitle

        setproctitle(name)


def _import(names: Sequence[str]) -> dict[str, str]:
    """Import modules that workers need; returns the environment variables that these have set.

    Modules that set a variable when they are imported do not run again in a worker.
    """
    # Ray reads these two once, when it is imported. A worker ends with the process of the second
    # one, and with the raylet's socket.
    of_ray = {"RAY_JOB_ID": _NO_JOB, "RAY_RAYLET_PID": str(os.getpid())}
    before = {name: os.environ.get(name) for name in of_ray}
    given = set(os.environ | of_ray)
    os.environ |= of_ray
    for name in names if _is_known_ray() else ():
        importlib.import_module(name)
    for name, text in before.items():
        del os.environ[name]
        if text is not None:
            os.environ[name] = text
    return {name: text for name, text in os.environ.items() if name not in given}


def _prepare(owner: socket.socket, added: dict[str, str]) -> None:
    """Import what workers need, and serve once `owner` says where."""
    added = added | _import(_PRELOADED)
    if not _is_known_ray():
        return
    _register_types()
    _send_plain_objects()
    gc.freeze()  # a collection must not write to shared pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: exit statuses are not read
    _, descriptors, _, _ = socket.recv_fds(owner, _REQUEST_BYTES, 1)
    if not descriptors:  # the owner has ended
        return
    _serve(owner, socket.socket(fileno=descriptors[0]), added)


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
    _end_with(server)
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


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl was called
        sys.exit()


if __name__ == "__main__":
    main()
