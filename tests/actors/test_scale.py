"""More and fewer CPU services while requests run: no request is lost, greedy tokens stay."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.actors.system import System
from hotcold.model.errors import MemoryBudgetError, UsageError
from hotcold.model.sampling import SamplingParams
from tests.actors.batching import Background
from tests.actors.kept_system import NAME, KeptSystem, all_gone
from tests.ray_doors import environment_to_attach

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]

ROOT = Path(__file__).resolve().parents[2]


def greedy(size: int, num_tokens: int) -> GenerateRequest:
    ids = np.random.default_rng(size).integers(0, 101, size).tolist()
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(sampling, prompt_ids=ids)


def asked(system: System, request: GenerateRequest) -> Background:
    return Background(lambda: system.complete(request))


def test_services_come_and_go_while_requests_run(kept: KeptSystem) -> None:
    system = kept.system
    requests = [greedy(size, 600) for size in (3, 40, 600)]
    expected = [system.complete(request).ids for request in requests]
    before = system.call("processes")
    running = [asked(system, request) for request in requests]
    assert system.call("scale", 1).num_cpu_actors == 1
    assert [one.end().ids for one in running] == expected
    fewer = system.call("processes")
    assert set(fewer) == {"driver", "gpu", "cpu0"}
    assert fewer["gpu"] == before["gpu"]  # it has stayed, with its KV cache
    assert fewer["cpu0"] not in before.values()
    assert all_gone([before["cpu0"], before["cpu1"]])
    running = [asked(system, request) for request in requests]
    os.kill(fewer["gpu"], signal.SIGKILL)  # what was scaled recovers as before
    os.kill(fewer["cpu0"], signal.SIGKILL)
    assert [one.end().ids for one in running] == expected
    running = [asked(system, request) for request in requests]
    answer = scale_by_command(2)
    assert answer == {
        "system": NAME, "num_cpu_actors": 2, "num_cpu_actors_before": 1, "num_threads": 2
    }  # fmt: skip
    assert [one.end().ids for one in running] == expected
    assert set(system.call("processes")) == {"driver", "gpu", "cpu0", "cpu1"}
    assert system.complete(requests[1]).ids == expected[1]
    window = requests[1].prompt_ids
    assert np.isfinite(system.call("score_window", window, 3, False).nll).all()


def scale_by_command(cpu_actors: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "hotcold.jobs.cli",
        "scale",
        "--json",
        "--cpu-actors",
        str(cpu_actors),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment_to_attach(), capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_cannot_be_had_leaves_all_as_it_was(kept: KeptSystem) -> None:
    system, request = kept.system, greedy(20, 30)
    expected = system.complete(request).ids
    with pytest.raises(UsageError, match=r"--cpu-actors 3 is not within 1\.\.2"):
        system.call("scale", 3)

    def without_memory(host: Any) -> None:
        from hotcold.actors.processes import scaling

        scaling.free_bytes = lambda: 1 << 20

    def with_memory(host: Any) -> None:
        from hotcold.actors.processes import scaling
        from hotcold.actors.protocol.ray_memory import free_bytes

        scaling.free_bytes = free_bytes

    before = system.call("processes")
    ray.get(system._driver.__ray_call__.remote(without_memory))
    with pytest.raises(MemoryBudgetError, match="MiB are missing"):
        system.call("scale", 1)
    ray.get(system._driver.__ray_call__.remote(with_memory))
    assert system.call("processes") == before
    assert system.complete(request).ids == expected
