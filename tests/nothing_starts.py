"""What is refused is refused before anything is started: here that is an error."""

from __future__ import annotations

import multiprocessing.process
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray

from hotcold.actors.private_ray.fork_server import ForkServer
from hotcold.numba_kernels.amx import may_use_amx


@contextmanager
def nothing_starts() -> Iterator[None]:
    """Until it is left, starting Ray, an actor of it or a process raises, and so does leaving.

    But for subprocesses that check a chat template, and the one that tries AMX once on a machine.
    What imports for Ray's workers, before a command has looked at the model, does not begin.
    """
    may_use_amx()
    started: list[str] = []
    popen = subprocess.Popen.__init__

    def refuse(name: str) -> object:
        def start(*given: Any, **options: Any) -> None:
            if name == "Popen.__init__" and "text.subprocess_worker" in str(given[1:]):
                popen(*given, **options)
                return
            started.append(name)
            raise AssertionError(f"{name} was called where nothing is to be started")

        return start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkServer, "begin", lambda: None)
        for owner, name in (
            (ray, "init"),
            (ray.actor.ActorClass, "_remote"),
            (subprocess.Popen, "__init__"),
            (multiprocessing.process.BaseProcess, "start"),
            (os, "fork"),
            (os, "posix_spawn"),
            (os, "system"),
        ):
            patch.setattr(owner, name, refuse(f"{owner.__name__}.{name}"))
        yield
    assert started == []
