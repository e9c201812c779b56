"""Lets a command that stays share what it imports with a private Ray's workers.

The command imports Ray, Numba and most of what workers need, 100 MB. So once it has done so, a fork
of it becomes the fork server: none of the processes has a copy of its own but of pages that it
writes.
"""

import atexit
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hotcold.actors.private_ray.fork_server import (
    ARENAS,
    NUM_ARENAS,
    Fork,
    ForkServer,
    end_with,
    importing_for_workers,
    preload,
    serve,
    socketpair,
)
from hotcold.model.current_folder import environment_of_python

_ARENA_MAX = -8  # a parameter of mallopt(3)


def share_imports(*modules: str) -> None:
    """Import modules, and what workers need, and fork: this process shares them with its workers.

    For a process that will start a private Ray, and that has not begun anything: with other
    threads, with Ray imported before, or where RAY_ADDRESS names a cluster, it does nothing.
    """
    if "RAY_ADDRESS" in os.environ or "ray" in sys.modules or threading.active_count() > 1:
        return
    with importing_for_workers() as added:
        for name in modules:
            importlib.import_module(name)
        is_known = preload()
    if is_known:
        with suppress(OSError):  # a server of its own is started later, or says why not
            _fork(added)


def _fork(added: dict[str, str]) -> None:
    """Let a fork of this process be its fork server. Errors: OSError."""
    gc.freeze()  # a collection must not write to shared pages
    owner = os.getpid()
    control, theirs = socketpair()
    if (server := os.fork()) == 0:
        _run(theirs, owner, added)
    theirs.close()
    ForkServer.keep(ForkServer(Fork(server), control))


def _run(owner: socket.socket, process_id: int, added: dict[str, str]) -> NoReturn:
    """Be the fork server, or one of its workers, of the process `process_id`."""
    status = 1
    try:
        end_with(process_id)
        _leave_owner(owner)
        serve(owner, added)
        status = 0
    except SystemExit as end:  # a worker's
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
    finally:  # not as the owner would end
        with suppress(BaseException):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _leave_owner(owner: socket.socket) -> None:
    """Keep nothing of the owner's but its modules and `owner`, as a process that it has started."""
    os.setpgid(0, 0)  # its own: Ctrl-C must not reach it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and ARENAS not in os.environ:
        mallopt(_ARENA_MAX, NUM_ARENAS)
    with suppress(ImportError):  # where processes are listed; the owner's options are overwritten
        from ray._raylet import setproctitle

        setproctitle(__name__)
