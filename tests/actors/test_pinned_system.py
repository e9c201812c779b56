"""Where a system's threads are: on the cores of two nodes that are played by two of this machine's,
and on one node, on cores of their own until somebody else wants those; the same tokens always."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hotcold.actors.setup.choose import NUMA_ROOT
from hotcold.actors.setup.preflight import SystemOptions, prepare_system
from hotcold.actors.system import System
from hotcold.model.limits import parse_core_list
from hotcold.placement.machine.memory_pages import running_services
from tests.actors.batching import greedy
from tests.numa_trees import write_tree
from tests.tiny_checkpoint import Tiny

CORES = sorted(os.sched_getaffinity(0))[:2]
NUM_OTHERS = 4
pytestmark = [
    pytest.mark.skipif(len(CORES) < 2, reason="two cores play two nodes"),
    pytest.mark.usefixtures("local_ray"),
]


def cores_of_threads(pid: int) -> dict[tuple[int, ...], int]:
    """How many threads of a process may run on which cores."""
    found: dict[tuple[int, ...], int] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        cores = next(line for line in lines if line.startswith("Cpus_allowed_list"))
        key = parse_core_list(cores.partition(":")[2])
        found[key] = found.get(key, 0) + 1
    return found


def test_services_stay_on_their_nodes(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 is not there in truth: its memory cannot be bound, and all works without that."""
    first, second = CORES
    root = write_tree(tmp_path, {0: str(first), 1: str(second)})
    monkeypatch.setenv(NUMA_ROOT, str(root))
    checkpoint = tiny("opt-postnorm")
    config, _ = prepare_system(checkpoint.path, SystemOptions(num_threads=2, context_length=128))
    assert config.num_cpu_actors == 2
    request = greedy(checkpoint.ids[:10])
    with System.start(config) as system:
        assert system.complete(request).ids == checkpoint.greedy_ids
        long = checkpoint.ids.tolist() * 2  # by matrix products
        found = system.complete(replace(request, prompt_ids=long))
        assert found.ids[0] == checkpoint.most_likely_after(long)
        processes = system.call("processes")
        threads = {name: cores_of_threads(pid) for name, pid in processes.items()}
        services = {service.pid: service for service in running_services()}
    assert set(threads["cpu0"]) == {(first,)}
    assert set(threads["cpu1"]) == {(second,)}
    # Its serving threads and those of its matmul; the others follow the process.
    assert threads["gpu"][(first,)] >= 1 and threads["gpu"][(second,)] >= 1
    assert set(threads["gpu"]) == {(first,), (second,), (first, second)}
    assert (first,) not in threads["driver"] and (second,) not in threads["driver"]
    assert {processes[name] for name in ("gpu", "cpu0", "cpu1")} <= set(services)
    assert services[processes["cpu1"]].num_bytes > 0


@pytest.mark.thorough
def test_threads_have_cores_of_their_own_until_others_want_those(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = CORES
    monkeypatch.setenv(NUMA_ROOT, str(write_tree(tmp_path, {0: f"{first},{second}"})))
    checkpoint = tiny("llama-relu")
    config, _ = prepare_system(checkpoint.path, SystemOptions(num_threads=2, context_length=128))
    request = greedy(checkpoint.ids[:10])
    with System.start(config) as system:
        process = system.call("processes")["gpu"]

        def are_kept() -> bool:
            return {(first,), (second,)} <= set(cores_of_threads(process))

        def answer_until(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 240  # other tests run beside this one, on these cores
            while not condition():
                assert time.monotonic() < deadline
                assert system.complete(request).ids == checkpoint.greedy_ids

        answer_until(are_kept)
        with many_on(first), many_on(second):
            answer_until(lambda: not are_kept())
        answer_until(are_kept)


@contextmanager
def many_on(core: int) -> Iterator[None]:
    """Other programs that never rest, on one core; they end by themselves should this one die."""
    code = f"""
import os, time
os.sched_setaffinity(0, [{core}])
while time.monotonic() < {time.monotonic() + 100}:
    pass
"""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(NUM_OTHERS)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
