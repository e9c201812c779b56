"""A user's process: starts a system in a Ray of its own, or attaches to one; prints JSON.

python -m tests.actors.ray_script own MODEL PROMPT_IDS MODE
python -m tests.actors.ray_script attach NAME PROMPT_IDS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from hotcold.actors.processes.cluster import connect
from hotcold.actors.protocol.messages import GenerateRequest, LoadProgress, SystemConfig
from hotcold.actors.system import System
from hotcold.model.sampling import SamplingParams


def shared_files(pids: list[int]) -> list[str]:
    """Files in /dev/shm that these processes map."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return sorted({line.split("/dev/shm/")[1] for line in lines if "/dev/shm/" in line})


def complete(system: System, prompt_ids: str) -> list[int]:
    """The greedy continuation."""
    sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    ids = [int(token_id) for token_id in prompt_ids.split(",")]
    return system.complete(GenerateRequest(sampling, prompt_ids=ids)).ids


def own(model: str, prompt_ids: str, mode: str) -> dict[str, Any]:
    """Start everything, generate, stop everything."""
    config = SystemConfig(
        model, mode, num_cpu_actors=2, num_threads=2, context_length=128, kv_dtype="float32"
    )
    progress: list[LoadProgress] = []
    with System.start(config, on_progress=progress.append) as system:
        ids = complete(system, prompt_ids)
        processes = system.call("processes")
        mapped = shared_files(list(processes.values()))
    return {
        "ids": ids,
        "processes": processes,
        "mapped": mapped,
        "ray": ray.is_initialized(),
        "progress": [vars(report) for report in progress],
    }


def attach(name: str, prompt_ids: str) -> dict[str, Any]:
    """Use a system that another process started."""
    connect()
    missing = System.attach("no such system")
    with System.attach(name) as system:  # type: ignore[union-attr]
        ids = complete(system, prompt_ids)
    return {"ids": ids, "missing": missing}


if __name__ == "__main__":
    commands: dict[str, Callable[..., dict[str, Any]]] = {"own": own, "attach": attach}
    print(json.dumps(commands[sys.argv[1]](*sys.argv[2:])))
