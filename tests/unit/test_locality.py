"""Where memory lies by /proc: recorded files, and this kernel's own word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hotcold.jobs.support.doctor_checks import check_services
from hotcold.model.weights.memory import aligned_empty
from hotcold.placement.machine.memory_pages import (
    FirstTouch,
    ServiceMemory,
    running_services,
    touch_pages,
)
from hotcold.placement.machine.pinning import bind_memory, may_bind_memory, pin_thread
from tests.numa_trees import write_tree

MIB = 1 << 20
# Of a service on a machine of two nodes, shortened.
NUMA_MAPS = """\
00400000 default file=/usr/bin/python3.11 mapped=512 active=490 N0=512 kernelpagesize_kB=4
01d5c000 default heap anon=1200 dirty=1200 N0=1000 N1=200 kernelpagesize_kB=4
7f0a00000000 bind:1 anon=524288 dirty=524288 active=0 N0=512 N1=523776 kernelpagesize_kB=4
7f1a00000000 bind:1 anon=100 dirty=100 N1=100 kernelpagesize_kB=4
7f2a00000000 bind:1 anon=3 dirty=3 N1=3 kernelpagesize_kB=2048
7f3a00000000 default file=/dev/shm/x\\040(deleted) anon=9999 dirty=9999 N0=9999 kernelpagesize_kB=4
7ffd00000000 default stack anon=30 dirty=30 N0=30 kernelpagesize_kB=4
"""
STATUS = "Name:\tray::ServiceHos\nCpus_allowed:\tf0\nCpus_allowed_list:\t4-5,7\nMems_allowed:\t3\n"


def write_process(root: Path, pid: int, title: str, parent: int = 1) -> None:
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes(title.encode().replace(b" ", b"\0"))
    (folder / "numa_maps").write_text(NUMA_MAPS)
    (folder / "status").write_text(STATUS)
    (folder / "stat").write_text(f"{pid} (a name) S {parent} 1 1 0")


def test_running_services_are_found(tmp_path: Path) -> None:
    write_tree(tmp_path, {0: "0-3", 1: "4-7"})
    write_process(tmp_path, 17, "ray::ServiceActor.load", 16)
    write_process(tmp_path, 16, "python -m hotcold.actors.private_ray.fork_server 3", 15)
    write_process(tmp_path, 15, "python -m hotcold serve /models/fork_server-raylet")
    write_process(tmp_path, 5, "ray::DriverActor")
    (tmp_path / "proc/9").mkdir()  # one that ends meanwhile
    (found,) = running_services(tmp_path)
    assert (found.pid, found.nodes, found.owner) == (17, (1,), 15)
    assert found.local_share == pytest.approx(1 - 1512 / (1512 + 525512))
    (tmp_path / "proc/17/status").write_text("Cpus_allowed_list:\t0-7\n")
    (tmp_path / "proc/16/stat").write_text("16 (fork_server) S 1 1")
    assert running_services(tmp_path)[0].owner == 0
    assert running_services(tmp_path)[0].nodes == (0, 1)
    assert running_services(tmp_path)[0].local_share == 1


def test_doctor_names_memory_elsewhere() -> None:
    local, elsewhere, small = check_services(
        [
            ServiceMemory(1, {0: 100 * MIB, 1: 9000 * MIB}, (1,), 7),
            ServiceMemory(2, {0: 3000 * MIB, 1: 9000 * MIB}, (1,)),
            ServiceMemory(3, {0: 200 * MIB, 1: 10 * MIB}, (1,), 8),  # Python and libraries alone
        ],
        {7: "demo"},
    )
    assert local.level == "ok" and "98.9% local" in local.text
    assert local.text.startswith("of demo: ") and small.text.startswith("of process 8: ")
    assert elsewhere.level == "problem" and "3000 MiB on node 0" in elsewhere.text
    assert small.level == "ok"


def test_the_kernel_shows_a_bound_thread() -> None:
    """In a process of its own: a policy holds for as long as its thread lives."""
    if not may_bind_memory():
        pytest.skip("the kernel refuses memory policies here")
    program = """
from pathlib import Path
from hotcold.placement.machine.pinning import bind_memory
assert not bind_memory((1000,))
assert bind_memory((0,))
kept = bytearray(64 << 20)
print(Path("/proc/self/numa_maps").read_text())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if " anon=" in line and " file=" not in line]
    assert lines and all("bind:0" in line or "stack" in line for line in lines), done.stderr


def test_a_thread_stays_where_it_is_pinned() -> None:
    before = os.sched_getaffinity(0)
    try:
        core = min(before)
        pin_thread([core])
        assert os.sched_getaffinity(0) == {core}
        pin_thread([1 << 14])  # no such core: as it was
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, before)
    assert not bind_memory((1 << 20,))


def resident_pages(array: np.ndarray) -> np.ndarray:
    """Whether each 4 KiB page of an array is in memory, by /proc/self/pagemap."""
    first, count = array.ctypes.data // 4096, array.nbytes // 4096
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * count), np.uint64)
    return (entries >> np.uint64(63)).astype(bool)


def test_first_touch_takes_every_page_and_changes_nothing() -> None:
    cores = sorted(os.sched_getaffinity(0))
    array = aligned_empty((3, 1000, 4096), np.uint8, huge_pages=False)
    assert not resident_pages(array).any()
    FirstTouch([cores] * 3)(list(array[1:]))
    pages = resident_pages(array).reshape(3, 1000)
    assert not pages[0].any() and pages[1:].all()
    assert not array.any()


def test_rows_that_begin_within_a_page() -> None:
    array = aligned_empty((64 * 4096,), np.uint8, huge_pages=False)
    touch_pages(array[100 : 2 * 4096 + 1].reshape(1, -1))
    assert resident_pages(array).nonzero()[0].tolist() == [0, 1, 2]
