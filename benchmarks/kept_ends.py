"""What is left of a kept system after each of its ends: processes, its record and socket, folders.

`python -m benchmarks.start --kept` prints it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.commands import environment, processes_left

_ASK = ("generate", "--prompt", "Return the", "--max-tokens", "4")
_KEPT_S = 3
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Left:
    """What there still is, some time after an end."""

    end: str
    seconds: float  # until no process was left, or until patience was over
    processes: int
    sockets: int  # and records beside them
    folders: int  # of Ray's sessions

    def __str__(self) -> str:
        counts = f"{self.processes:9} {self.sockets:20} {self.folders:12}"
        return f"{counts} {self.seconds:7.1f} s  {self.end}"


HEAD = "processes  records and sockets  Ray folders  rests in  after"


class _User:
    """Somebody whose kept systems, and their Ray, are in a folder of his own."""

    def __init__(self, folder: Path) -> None:
        self._systems, self._ray = folder / "hotcold", folder / "ray"
        self._environment = environment(self._ray, {"XDG_RUNTIME_DIR": str(folder)})

    def run(self, *arguments: str) -> str:
        line = [sys.executable, "-m", "hotcold.jobs.cli", *arguments]
        return subprocess.run(
            line, env=self._environment, check=True, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        ).stdout  # fmt: skip

    def keeper(self) -> int:
        """The process that holds the system."""
        (found,) = json.loads(self.run("ps", "--json").splitlines()[-1])["systems"]
        return int(found["pid"])

    def left(self, end: str, began: float) -> Left:
        processes = processes_left(self._ray, _TIMEOUT_S)
        seconds = time.monotonic() - began
        sockets = list(self._systems.glob("*.sock")) + list(self._systems.glob("*.json"))
        sessions = list(self._ray.glob("*"))
        return Left(end, seconds, len(processes), len(sockets), len(sessions))


def what_is_left() -> Iterator[Left]:
    """Start a system that is kept for each end, end it, and look."""
    with tempfile.TemporaryDirectory(prefix="hc-", dir="/tmp") as folder:
        user = _User(Path(folder))
        user.run(*_ASK, "--keep", "1h")
        began = time.monotonic()
        user.run("stop")
        yield user.left("`hotcold stop`", began)

        user.run(*_ASK, "--keep", str(_KEPT_S))
        yield user.left(f"its time is over, {_KEPT_S} s after the answer", time.monotonic())

        user.run(*_ASK, "--keep", "1h")
        began = time.monotonic()
        os.kill(user.keeper(), signal.SIGKILL)
        yield user.left("kill -9 of its keeper", began)
        user.run(*_ASK)
        yield user.left("the same, after the next `hotcold generate`", time.monotonic())
