"""The hardware survey, on this machine and on made-up ones."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hotcold.jobs.support.doctor_checks import Finding, check_machine
from hotcold.model.limits import cpu_quota, group_folders, num_cpus
from hotcold.placement.machine.core_kinds import core_kinds
from hotcold.placement.machine.survey import MachineSurvey, free_bytes_of, survey, usable_cores
from hotcold.placement.machine.sysfs import NumaNode, read_numa_nodes
from tests.numa_trees import EIGHT, write_tree

CORES_PER_NODE = 16
NODE_BYTES = 64 << 30
TOP = "sys/fs/cgroup"


@pytest.fixture
def big_machine(tmp_path: Path) -> Path:
    return write_big_machine(tmp_path)


def write_big_machine(tmp_path: Path) -> Path:
    """Two sockets of four nodes each, two threads a core; node 7 has lost its memory."""
    cpuinfo = "processor\t: 0\nmodel name\t: EPYC 9654: 96 cores\nflags\t\t: fpu avx2 fma f16c\n\n"
    write(tmp_path / "proc/cpuinfo", cpuinfo * 2)
    write(tmp_path / "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    return write_tree(tmp_path, EIGHT, {7: 0})


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_survey_of_this_machine() -> None:
    machine = survey()
    assert machine.cores == usable_cores()
    assert set(machine.cores) <= os.sched_getaffinity(0)
    assert machine.available_bytes > 0
    assert bool(machine.gpus) != bool(machine.no_gpu_reason)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu.max": "max 100000\n", "a.slice/cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "50000 100000\n", "a.slice/b.scope/cpu.max": "300000 100000\n"}, 0.5),
        ({"cpu/a/cpu.cfs_quota_us": "70000\n", "cpu/a/cpu.cfs_period_us": "10000\n"}, 7),
    ],
)
def test_cpu_quota(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    """Of the process's own groups and those above, in either version of cgroups."""
    write(
        tmp_path / "proc/self/cgroup",
        "4:cpuacct,cpu:/a/b\n1:name=systemd:/x\n0::/a.slice/b.scope\n",
    )
    for name, text in files.items():
        write(tmp_path / "sys/fs/cgroup" / name, text)
    assert cpu_quota(tmp_path) == quota


def mount(path: str, top: str, kind: str, options: str = "rw") -> str:
    """A line of /proc/self/mountinfo."""
    return f"40 30 0:29 {top} {path} rw,nosuid shared:9 - {kind} {kind} {options}\n"


@pytest.mark.parametrize(
    ("own", "mounts", "folders"),
    [
        ("0::/a\n2:cpu:/b\n", "", [f"{TOP}/a", TOP, f"{TOP}/cpu/b", f"{TOP}/cpu"]),
        ("0::/a\n", mount("/cg", "/", "cgroup2"), ["cg/a", "cg"]),
        ("3:memory,cpu:/a\n0::/\n", mount("/c", "/", "cgroup", "rw,memory,cpu"), ["c/a", "c"]),
        ("0::/docker/77/a\n", mount("/cg", "/docker/77", "cgroup2"), ["cg/a", "cg"]),
        ("0::/../../elsewhere\n", mount("/cg", "/", "cgroup2"), ["cg"]),
        ("\nnonsense\n0::/a:b\n", "short\n" + mount("/cg", "/", "cgroup2"), ["cg/a:b", "cg"]),
    ],
)
def test_folders_of_control_groups(
    own: str, mounts: str, folders: list[str], tmp_path: Path
) -> None:
    write(tmp_path / "proc/self/cgroup", own)
    write(tmp_path / "proc/self/mountinfo", mounts)
    assert group_folders("cpu", tmp_path) == [tmp_path / folder for folder in folders]


@pytest.mark.parametrize(("quota", "num_threads"), [(0.1, 1), (1.5, 2), (7, 4), (None, 4)])
def test_threads_that_a_quota_pays_for(
    quota: float | None, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 3, 5, 7})
    text = "max 100000\n" if quota is None else f"{round(quota * 1e5)} 100000\n"
    write(tmp_path / "sys/fs/cgroup/cpu.max", text)
    assert num_cpus(tmp_path) == num_threads
    assert usable_cores(tmp_path) == (1, 3, 5, 7)[:num_threads]


def write_siblings(root: Path, groups: list[tuple[int, ...]]) -> None:
    for group in groups:
        for core in group:
            topology = root / f"sys/devices/system/cpu/cpu{core}/topology"
            write(topology / "thread_siblings_list", ",".join(map(str, group)) + "\n")


def test_one_thread_a_physical_core_of_those_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_siblings(tmp_path, [(0, 4), (1, 5), (2, 6), (3, 7)])
    assert core_kinds(range(8), tmp_path).paying == (0, 1, 2, 3)
    assert core_kinds((1, 4, 5, 6), tmp_path).paying == (1, 4, 6)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 4, 5, 6})
    assert usable_cores(tmp_path) == usable_cores(tmp_path, 3) == (1, 4, 6)
    assert usable_cores(tmp_path, 4) == (1, 4, 5, 6)  # as many as somebody has asked for
    write(tmp_path / "sys/fs/cgroup/cpu.max", "200000 100000\n")
    assert usable_cores(tmp_path) == (1, 4)


def test_memory_that_a_cpuset_does_not_allow(big_machine: Path) -> None:
    write(big_machine / "proc/self/status", "Name:\tpython\nMems_allowed_list:\t0,2-3\n")
    nodes = read_numa_nodes(big_machine)
    assert [node.node_id for node in nodes if node.total_bytes] == [0, 2, 3]
    assert all(len(node.cores) == CORES_PER_NODE for node in nodes)


def test_cores_within_the_quota(big_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(128)))
    assert len(usable_cores(big_machine)) == 128
    assert len(survey(big_machine).usable_nodes) == 8
    write(big_machine / "sys/fs/cgroup/cpu.max", "850000 100000\n")
    assert usable_cores(big_machine) == tuple(range(9))
    assert [node.node_id for node in survey(big_machine).usable_nodes] == [0, 1]
    assert survey(big_machine).cores == tuple(range(9))


def test_shares_of_free_memory() -> None:
    def node(total: int, free: int) -> NumaNode:
        return NumaNode(0, (0,), total, free)

    assert free_bytes_of([node(100, 40)], 70) == [70]  # 30 of the 60 in use can be had
    assert free_bytes_of([node(100, 40), node(100, 80)], 160) == [70, 90]
    assert free_bytes_of([node(100, 40), node(100, 80)], 60) == [20, 40]  # a cgroup's limit
    assert free_bytes_of([node(100, 40)], 10**6) == [100]  # other nodes' memory
    assert free_bytes_of([node(100, 100)], 100) == [100]
    assert free_bytes_of([node(100, 0)], 0) == [0]


def finding(machine: MachineSurvey, subject: str) -> Finding:
    return next(found for found in check_machine(machine) if found.subject == subject)


def test_checks_name_what_is_wrong(big_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(128)))
    machine = replace(survey(big_machine), gpus=(), no_gpu_reason="CuPy is broken")
    assert finding(machine, "NUMA").level == "problem"
    assert finding(machine, "GPU").level == "problem"
    assert finding(machine, "huge pages").level == "note"
    small = replace(machine, shared_memory_free_bytes=1 << 20, cpu_features=())
    assert finding(small, "shared memory").level == "problem"
    assert finding(small, "processor").level != "ok"
    monkeypatch.setenv("RAY_worker_niceness", "15")
    assert finding(machine, "niceness").level == "problem"


def test_checks_name_what_limits_this_process(
    big_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects = ("CPU set", "CPU quota", "threads", "memory limit")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(128)))
    monkeypatch.setattr("os.cpu_count", lambda: 128)
    machine = replace(survey(big_machine), memory_limit=None)
    assert not {found.subject for found in check_machine(machine)} & set(subjects)
    write_siblings(big_machine, [(core, 64 + core) for core in range(64)])
    machine = replace(survey(big_machine), memory_limit=8 << 30, available_bytes=3 << 30)
    assert finding(machine, "threads").text.startswith("64 on 128 logical cores")
    assert finding(machine, "memory limit").text.startswith("8.59 GB by a control group: 3.22 GB")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(60, 68)))
    write(big_machine / "sys/fs/cgroup/cpu.max", "250000 100000\n")
    machine = survey(big_machine)
    assert finding(machine, "CPU set").text == "8 of 128 logical cores are allowed: 3 threads"
    assert finding(machine, "CPU quota").text.startswith("2.5 CPUs: 3 threads")
