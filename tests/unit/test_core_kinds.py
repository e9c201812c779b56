"""Which cores threads get, by stand-ins for the sysfs of processors that are sold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hotcold.placement.machine.core_kinds import CoreKinds, core_kinds
from hotcold.placement.machine.pinning import HostShare, find_cores
from hotcold.placement.machine.survey import usable_cores
from tests.numa_trees import write_tree

Groups = Sequence[Sequence[int]]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def write_cores(
    root: Path, physical: Groups, clock: int, caches: Sequence[int] = (1, 2, 3), capacity: int = 0
) -> None:
    """Physical cores of one kind, each a group of hardware threads."""
    for group in physical:
        for core in group:
            folder = root / f"sys/devices/system/cpu/cpu{core}"
            write(folder / "topology/thread_siblings_list", ",".join(map(str, group)))
            write(folder / "cpufreq/cpuinfo_max_freq", str(clock))
            for index, level in enumerate(caches):
                write(folder / f"cache/index{index}/level", str(level))
            if capacity:
                write(folder / "cpu_capacity", str(capacity))


def pairs(first: int, last: int) -> list[tuple[int, int]]:
    return [(core, core + 1) for core in range(first, last + 1, 2)]


def singles(first: int, last: int) -> list[tuple[int]]:
    return [(core,) for core in range(first, last + 1)]


def intel(root: Path, performance: str, efficient: str) -> None:
    write(root / "sys/devices/cpu_core/cpus", performance)
    write(root / "sys/devices/cpu_atom/cpus", efficient)


def i9_13900k(root: Path) -> range:
    """8 P cores of two threads, 16 E cores whose clock is three quarters of theirs."""
    write_cores(root, pairs(0, 15), 5_500_000)
    write_cores(root, singles(16, 31), 4_300_000)
    intel(root, "0-15", "16-31")
    return range(32)


def i7_1255u(root: Path) -> range:
    """2 P cores and 8 E cores."""
    write_cores(root, pairs(0, 3), 4_700_000)
    write_cores(root, singles(4, 11), 3_500_000)
    intel(root, "0-3", "4-11")
    return range(12)


def ultra_7_155h(root: Path) -> range:
    """Meteor Lake: 6 P cores, 8 E cores, and 2 on another tile, which have no third level."""
    write_cores(root, pairs(0, 11), 4_800_000)
    write_cores(root, singles(12, 19), 3_800_000)
    write_cores(root, singles(20, 21), 2_500_000, caches=(1, 2))
    intel(root, "0-11", "12-21")
    return range(22)


def ultra_7_258v(root: Path) -> range:
    """Lunar Lake: all four E cores are apart from the third level."""
    write_cores(root, singles(0, 3), 4_800_000)
    write_cores(root, singles(4, 7), 3_700_000, caches=(1, 2))
    intel(root, "0-3", "4-7")
    return range(8)


def rk3588(root: Path) -> range:
    """4 Cortex-A55, then 4 Cortex-A76."""
    write_cores(root, singles(0, 3), 1_800_000, capacity=414)
    write_cores(root, singles(4, 7), 2_400_000, capacity=1024)
    return range(8)


def ryzen_7950x(root: Path) -> range:
    """16 cores of one kind; some clock a little higher."""
    cores = [(core, core + 16) for core in range(16)]
    write_cores(root, cores[:8], 5_880_000)
    write_cores(root, cores[8:], 5_600_000)
    return range(32)


EVEN = tuple(range(0, 16, 2))


@pytest.mark.parametrize(
    ("machine", "paying", "slow", "island"),
    [
        (i9_13900k, EVEN, range(16, 32), ()),
        (i7_1255u, (0, 2, 4, 5), range(4, 12), ()),
        (ultra_7_155h, EVEN[:6], range(12, 20), (20, 21)),
        (ultra_7_258v, (0, 1, 2, 3), (), (4, 5, 6, 7)),
        (rk3588, (4, 5, 6, 7), range(4), ()),
        (ryzen_7950x, tuple(range(16)), (), ()),
    ],
)
def test_machines(
    machine: Callable[[Path], range],
    paying: tuple[int, ...],
    slow: Sequence[int],
    island: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = machine(tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(cores))
    kinds = core_kinds(cores, tmp_path)
    assert (kinds.paying, kinds.slow, kinds.island) == (paying, tuple(slow), island)
    assert sorted(kinds.fast + kinds.slow + kinds.second + kinds.island) == list(cores)
    assert usable_cores(tmp_path) == paying
    without_islands = len(cores) - len(island)
    assert not set(usable_cores(tmp_path, without_islands)) & set(island)
    assert usable_cores(tmp_path, len(cores)) == tuple(cores)
    fewer = usable_cores(tmp_path, len(paying) + 1)  # E cores come before second threads
    assert set(fewer) >= set(paying)
    assert len(fewer) == len(paying) + 1
    assert (
        not slow or len(paying) == len(kinds.fast) + len(slow) or not set(fewer) & set(kinds.second)
    )


def test_cores_that_are_allowed(tmp_path: Path) -> None:
    i9_13900k(tmp_path)
    assert core_kinds((3, 17, 18), tmp_path).paying == (3, 17, 18)
    assert core_kinds(range(20, 30), tmp_path) == CoreKinds(tuple(range(20, 30)), (), (), ())
    ultra = tmp_path / "ultra"
    ultra_7_155h(ultra)
    assert core_kinds((20, 21), ultra).paying == (20, 21)  # all that there is


def test_kinds_by_other_files(tmp_path: Path) -> None:
    """Of kernels that name no kinds, that list types of cores, and that list islands."""
    clocks, types, listed = tmp_path / "clocks", tmp_path / "types", tmp_path / "listed"
    write_cores(clocks, singles(0, 1), 5_100_000)
    write_cores(clocks, singles(2, 7), 3_000_000)
    assert core_kinds(range(8), clocks).fast == (0, 1)
    write_cores(types, singles(0, 7), 4_000_000)
    write(types / "sys/devices/system/cpu/types/intel_core_0/cpulist", "0-4")
    write(types / "sys/devices/system/cpu/types/intel_atom_1/cpulist", "5-7")
    assert core_kinds(range(8), types).slow == (5, 6, 7)
    write_cores(listed, singles(0, 7), 4_000_000)
    write(listed / "sys/devices/cpu_lowpower/cpus", "6-7")
    assert core_kinds(range(8), listed).island == (6, 7)
    assert core_kinds(range(3), tmp_path / "nothing").paying == (0, 1, 2)


def test_threads_are_kept_on_paying_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = ultra_7_155h(tmp_path)
    write_tree(tmp_path, {0: "0-21"})
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(cores))
    assert find_cores(HostShare((6,), 0, root=str(tmp_path)), 6) == EVEN[:6]
    assert find_cores(HostShare((6,), None, root=str(tmp_path)), 6) == EVEN[:6]
    twenty = find_cores(HostShare((14,), 0, root=str(tmp_path)), 14)
    assert twenty == (*EVEN[:6], *range(12, 20))
