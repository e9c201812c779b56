"""More and fewer CPU services while requests run: no request is lost, greedy tokens stay."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from actors.protocol.messages import GenerateRequest, Generation, SystemConfig
from actors.system import System
from model.errors import MemoryBudgetError, UsageError
from model.sampling import SamplingParams
from tests.actors.batching import Asking
from tests.conftest import TinyCheckpoint

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("local_ray")]

Tiny = Callable[..., TinyCheckpoint]
ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 2048
NAME = "system-to-scale"


def config_of(checkpoint: TinyCheckpoint, exchange: str) -> SystemConfig:
    return SystemConfig(
        str(checkpoint.path),
        num_cpu_actors=1,
        num_threads=3,
        context_length=CONTEXT,
        kv_positions=4 * CONTEXT,
        kv_dtype="float32",
        prefill_chunk=64,
        exchange=exchange,
    )


def greedy(size: int, num_tokens: int) -> GenerateRequest:
    ids = np.random.default_rng(size).integers(0, 101, size).tolist()
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(sampling, prompt_ids=ids)


def services(system: System) -> set[str]:
    return set(system.call("processes"))


def all_end(pids: set[int]) -> bool:
    for _ in range(600):
        if not any(psutil.pid_exists(pid) for pid in pids):
            return True
        threading.Event().wait(0.05)
    return False


def asked(system: System, request: GenerateRequest) -> Asking:
    return Asking(lambda: system.complete(request))


def test_services_come_and_go_while_requests_run(tiny: Tiny) -> None:
    with System.start(config_of(tiny("llama-gqa"), "arena"), name=NAME) as system:
        requests = [greedy(size, 600) for size in (3, 40, 600)]
        expected = [system.complete(request).ids for request in requests]
        before = set(system.call("processes").values())
        running = [asked(system, request) for request in requests]
        assert system.call("scale", 3).num_cpu_actors == 3
        assert services(system) == {"driver", "gpu", "cpu0", "cpu1", "cpu2"}
        assert [one.end().ids for one in running] == expected
        pids = system.call("processes")
        gone = before - set(pids.values())
        assert len(gone) == 1 and all_end(gone)  # the GPU service has stayed, with its KV cache
        running = [asked(system, request) for request in requests]
        os.kill(pids["gpu"], signal.SIGKILL)  # what was scaled recovers as before
        os.kill(pids["cpu2"], signal.SIGKILL)
        assert [one.end().ids for one in running] == expected
        answer = scale_by_command(2)
        assert answer == {
            "system": NAME, "num_cpu_actors": 2, "num_cpu_actors_before": 3, "num_threads": 3
        }  # fmt: skip
        assert services(system) == {"driver", "gpu", "cpu0", "cpu1"}
        assert system.complete(requests[1]).ids == expected[1]
        window = requests[1].prompt_ids
        assert np.isfinite(system.call("score_window", window, 3, False).nll).all()


def scale_by_command(cpu_actors: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "jobs.cli", "scale", "--json", "--cpu-actors", str(cpu_actors)]
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"RAY_ADDRESS": address}, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_cannot_be_had_leaves_all_as_it_was(tiny: Tiny) -> None:
    with System.start(config_of(tiny("llama-gqa"), "calls")) as system:
        request = greedy(20, 30)
        expected = system.complete(request).ids
        with pytest.raises(UsageError, match=r"--cpu-actors 4 is not within 1\.\.3"):
            system.call("scale", 4)

        def without_memory(host: Any) -> None:
            import actors.processes.scaling

            actors.processes.scaling.free_bytes = lambda: 1 << 20

        def with_memory(host: Any) -> None:
            import actors.processes.scaling

            actors.processes.scaling.free_bytes = lambda: 1 << 40

        before = system.call("processes")
        ray.get(system._driver.__ray_call__.remote(without_memory))
        with pytest.raises(MemoryBudgetError, match="GiB are missing"):
            system.call("scale", 2)
        assert system.call("processes") == before
        assert system.complete(request).ids == expected
        ray.get(system._driver.__ray_call__.remote(with_memory))
        assert system.call("scale", 2).num_cpu_actors == 2
        result = system.complete(request)
        assert isinstance(result, Generation) and result.ids == expected
