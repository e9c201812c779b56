"""A user's process that starts a private Ray and an actor, tells what runs, and waits to be ended.

python -m tests.actors.private_ray_script [WORKERS]

So many workers at first, else the usual number.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import psutil
import ray

from hotcold.actors import launch
from hotcold.actors.private_ray.temp_folder import TempFolder
from hotcold.actors.protocol.ray_memory import MONITOR_EVERY_MS, is_reserved


@ray.remote(num_cpus=0)
class Echo:
    """Says what it is told."""

    def say(self, what: str) -> str:
        return what

    def imports(self) -> list[str]:
        """The modules of this process."""
        return list(sys.modules)

    def draw(self) -> str:
        """What Ray draws at random in this process."""
        return str(ray.PlacementGroupID.of(ray.JobID.from_int(1)).hex())


def facts_of(processes: Iterable[psutil.Process]) -> dict[str, Any]:
    """Command lines, parents and groups of those that have not ended meanwhile."""
    lines, parents, groups = {}, {}, []
    for process in processes:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            line, parent = " ".join(process.cmdline()), process.ppid()
            if os.getpgid(process.pid) == process.pid:
                groups.append(process.pid)
            lines[process.pid], parents[process.pid] = line, parent
    return {"processes": lines, "parents": parents, "groups": groups}


def main() -> None:
    if sys.argv[1:]:
        launch._FIRST_WORKERS = int(sys.argv[1])
    folders = set(TempFolder.all())
    launch.start_local_ray(3, 0)
    echoes = [Echo.remote(), Echo.remote()]  # type: ignore[attr-defined]
    said = ray.get(echoes[0].say.remote("here"))
    processes = psutil.Process().children(recursive=True)
    raylet = next(process for process in processes if process.name() == "raylet")
    told = {
        "said": said,
        "has_memory": is_reserved(raylet.pid),
        "monitor_every_ms": raylet.environ()[MONITOR_EVERY_MS],
        "owner": os.getpid(),
        "drawn": ray.get([echo.draw.remote() for echo in echoes]),
        "imports": ray.get(echoes[0].imports.remote()),
        "folders": [str(path) for path in sorted(set(TempFolder.all()) - folders)],
        **facts_of(processes),
    }
    print(json.dumps(told), flush=True)
    if sys.stdin.readline().strip() == "shutdown":
        ray.shutdown()


if __name__ == "__main__":
    main()
