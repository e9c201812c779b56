"""A user's process: starts a system in a Ray of its own; prints JSON.

python -m tests.actors.ray_script MODEL PROMPT_IDS MODE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray

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


if __name__ == "__main__":
    print(json.dumps(own(*sys.argv[1:])))
