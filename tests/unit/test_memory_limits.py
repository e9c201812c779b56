"""What may be taken of memory: within cgroups, beside Ray's monitor, of /dev/shm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray

from hotcold.actors.protocol import ray_memory
from hotcold.actors.protocol.messages import ServiceSpec, SystemConfig
from hotcold.actors.protocol.ray_memory import (
    free_bytes,
    is_reserved,
    monitor_bytes,
    put_arena,
    require_in_memory,
    require_object_store,
    require_shared_memory,
    reserve_object_store,
)
from hotcold.actors.setup.host_files import require_free_memory
from hotcold.model.errors import MemoryBudgetError, ServiceError
from hotcold.model.weights.memory import available_bytes, usable_bytes
from tests.numa_trees import write_tree

MIB, GIB = 1 << 20, 1 << 30
# A process that holds a file as a raylet holds its object store: in /dev/shm, sparse, unlinked.
RAYLET = """
import os, sys, tempfile
file, path = tempfile.mkstemp(prefix="plasma", dir="/dev/shm")
os.unlink(path)
os.ftruncate(file, int(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


def write_root(root: Path, own: str, groups: dict[str, tuple[str, str, int, str]]) -> Path:
    """A machine of 64 GiB, 40 free; `groups`: folder -> limit's file and text, bytes used, stat."""
    files = {
        "proc/meminfo": f"MemTotal: {64 * MIB} kB\nMemFree: 7 kB\nMemAvailable: {40 * MIB} kB\n",
        "proc/self/cgroup": own,
    }
    for folder, (name, limit, used, stat) in groups.items():
        usage = "memory.usage_in_bytes" if name == "memory.limit_in_bytes" else "memory.current"
        files |= {f"{folder}/{name}": limit, f"{folder}/{usage}": f"{used}\n"}
        files[f"{folder}/memory.stat"] = stat
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_limits_of_the_cgroups_that_a_process_is_in(tmp_path: Path) -> None:
    v1, v2 = "memory.limit_in_bytes", "memory.max"
    stat = f"active_file {GIB}\ninactive_file {GIB}\n"
    nested = write_root(
        tmp_path / "nested",
        "0::/user.slice/own.scope\n",
        {
            "sys/fs/cgroup/user.slice": (v2, f"{20 * GIB}\n", 12 * GIB, stat),
            "sys/fs/cgroup/user.slice/own.scope": (v2, "max\n", 1 * GIB, stat),
            "sys/fs/cgroup/other.slice": (v2, f"{1 * GIB}\n", 0, stat),
        },
    )
    assert (available_bytes(nested), usable_bytes(nested)) == (10 * GIB, 20 * GIB)
    totals = f"inactive_file 5\ntotal_active_file 0\ntotal_inactive_file {2 * GIB}\n"
    container = write_root(
        tmp_path / "container",
        "5:cpu:/\n4:memory:/docker/of-the-host\n",
        {"sys/fs/cgroup/memory": (v1, f"{8 * GIB}\n", 7 * GIB, totals)},
    )
    assert (available_bytes(container), usable_bytes(container)) == (3 * GIB, 8 * GIB)
    free = write_root(tmp_path / "free", "0::/\n", {})
    assert (available_bytes(free), usable_bytes(free)) == (40 * GIB, 64 * GIB)
    slowed = write_root(
        tmp_path / "slowed",
        "0::/own.scope\n",
        {"sys/fs/cgroup/own.scope": ("memory.high", f"{6 * GIB}\n", 3 * GIB, stat)},
    )
    assert (available_bytes(slowed), usable_bytes(slowed)) == (5 * GIB, 6 * GIB)
    silent = write_root(
        tmp_path / "silent",
        "7:hugetlb,memory:/a\n",
        {"sys/fs/cgroup/memory/a": (v1, f"{8 * GIB}\n", 3 * GIB, "no numbers\n")},
    )
    assert (available_bytes(silent), usable_bytes(silent)) == (5 * GIB, 8 * GIB)
    (silent / "sys/fs/cgroup/memory/a/memory.usage_in_bytes").unlink()
    assert available_bytes(silent) == 8 * GIB  # a limit holds, whatever else is unknown


def test_memory_of_nodes_that_a_cpuset_does_not_allow(tmp_path: Path) -> None:
    root = write_tree(write_root(tmp_path, "0::/\n", {}), {0: "0-3", 1: "4-7", 2: ""}, {1: 9 * GIB})
    for allowed, free in (("0-2", 40), ("1", 9), ("0-1", 40), ("1-2", 40)):
        (root / "proc/self/status").write_text(f"Name:\tx\nMems_allowed_list:\t{allowed}\n")
        assert available_bytes(root) == free * GIB


@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        ({}, 0),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, 5 * GIB),
        ({"RAY_ADDRESS": "auto", "RAY_memory_monitor_refresh_ms": "0"}, 0),
        ({"RAY_ADDRESS": "auto", "RAY_memory_usage_threshold": "0.8"}, 20 * GIB),
        ({"RAY_ADDRESS": "auto", "RAY_min_memory_free_bytes": str(GIB)}, GIB),
    ],
)
def test_what_rays_monitor_keeps_free(
    variables: dict[str, str], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ray_memory, "_is_in_ray", lambda: False)
    monkeypatch.setattr(ray_memory, "usable_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(ray_memory, "available_bytes", lambda: 30 * GIB)
    assert (monitor_bytes(), free_bytes()) == (kept, 30 * GIB - kept)


def test_a_service_is_loaded_again_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotcold.actors.setup.host_files.free_bytes", lambda: 2_000_000_000)
    spec = ServiceSpec("cpu1", index=2, num_threads=1, system=SystemConfig(""))
    require_free_memory(spec, 2_000_000_000)
    with pytest.raises(MemoryBudgetError, match=r"the cpu1 service needs 3.00 GB .* 2.00 GB are"):
        require_free_memory(spec, 3_000_000_000)


def test_too_much_shared_memory_is_refused() -> None:
    require_shared_memory(1)
    with pytest.raises(MemoryBudgetError, match="MB of shared memory are needed, and /dev/shm has"):
        require_shared_memory(1 << 60)
    with pytest.raises(MemoryBudgetError, match="shared memory"):
        put_arena(np.broadcast_to(np.uint8(0), 1 << 50))


@pytest.fixture
def raylet(request: pytest.FixtureRequest) -> Iterator[int]:
    """A stand-in for a raylet with an object store of so many bytes: its process id."""
    command = [sys.executable, "-S", "-c", RAYLET, str(request.param)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.stdin.close()


@pytest.mark.parametrize("raylet", [1 << 20], indirect=True)
def test_an_object_store_takes_its_memory_at_once(raylet: int) -> None:
    assert not is_reserved(raylet)
    reserve_object_store(raylet)
    assert is_reserved(raylet)
    assert not is_reserved(os.getpid())  # it has no store


@pytest.mark.parametrize("raylet", [1 << 50], indirect=True)
def test_an_object_store_that_does_not_fit_is_an_error(raylet: int) -> None:
    with pytest.raises(MemoryBudgetError, match="MB of shared memory are needed"):
        reserve_object_store(raylet)
    assert not is_reserved(raylet)


def test_an_arena_on_a_disk_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_in_memory(np.zeros(1 << 20, np.uint8))  # of no file
    mapped = np.memmap(tmp_path / "plasma", np.uint8, "w+", shape=1 << 20)
    monkeypatch.setattr(ray, "put", lambda array: "ref")
    monkeypatch.setattr(ray, "get", {"ref": mapped}.get)
    for kind, is_fine in (("tmpfs", True), ("ext4", False)):
        mounts = [("/", "ext4"), (str(tmp_path.parent), "xfs"), (str(tmp_path), kind)]
        lines = [f"device {path} {name} rw 0 0" for path, name in mounts]
        table = tmp_path / "mounts"
        table.write_text("\n".join(lines))
        monkeypatch.setattr(ray_memory, "_MOUNTS", table)
        if is_fine:
            require_object_store(1)
        else:
            with pytest.raises(ServiceError, match=f"a file on disk, {tmp_path}/plasma.*emptyDir"):
                require_object_store(1)
    with pytest.raises(MemoryBudgetError, match="shared memory are needed"):
        require_object_store(1 << 60)
