"""Kinds of cores of hybrid processors, from /sys: which of them a service's threads get first.

Reading weights is bound by memory: some four fast cores read as fast as a desktop's memory gives,
so slower ones pay only where there are fewer. llama.cpp counts P cores alone (`cpu_get_num_math`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hotcold.model.limits import parse_core_list, read_text

_FAST = 2 / 3  # of the fastest core's capacity: below it is an efficiency core
_ENOUGH = 4  # cores that together read about as fast as two channels of memory give
_PERFORMANCE = "cpu_core/cpus", "system/cpu/types/intel_core_*/cpulist"
_ISLAND = "cpu_lowpower/cpus"


class CoreKinds(NamedTuple):
    """Logical cores by kind, each ascending: those of a machine that a process may use.

    fast, slow: one hardware thread of each P and of each E core; second: the other hardware
    threads; island: E cores apart from the last-level cache, as those of Meteor Lake's SoC tile
    """

    fast: tuple[int, ...]
    slow: tuple[int, ...]
    second: tuple[int, ...]
    island: tuple[int, ...]

    @property
    def paying(self) -> tuple[int, ...]:
        """Those that a system gets by itself, ascending: P cores, and E cores up to _ENOUGH."""
        few = max(0, _ENOUGH - len(self.fast))
        return tuple(sorted(self.fast + self.slow[:few])) or self.island

    def best(self, count: int) -> tuple[int, ...]:
        """The best `count` cores, or all, ascending: P before E cores, islands last."""
        order = self.fast + self.slow + self.second + self.island
        return tuple(sorted(order[:count]))


def core_kinds(cores: Sequence[int], root: Path = Path("/")) -> CoreKinds:
    """The kinds of `cores`; all are fast where sys below `root` does not tell them apart."""
    folder = root / "sys/devices"
    first, second = _hardware_threads(cores, folder / "system/cpu")
    island = _islands(first, folder)
    rest = [core for core in first if core not in island]
    fast = _listed(folder, *_PERFORMANCE) & set(rest)
    if not fast:
        speeds = _core_speeds(rest, folder / "system/cpu")
        least = _FAST * max([0, *speeds.values()])
        fast = {core for core in rest if speeds.get(core, 0) >= least}
    slow = tuple(core for core in rest if core not in fast)
    return CoreKinds(tuple(sorted(fast)), slow, second, tuple(sorted(island)))


def _hardware_threads(
    cores: Sequence[int], folder: Path
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first of `cores` in each physical core, and the others."""
    seen: set[int] = set()
    first: list[int] = []
    second: list[int] = []
    for core in sorted(cores):
        (second if core in seen else first).append(core)
        seen.update(parse_core_list(read_text(folder / f"cpu{core}/topology/thread_siblings_list")))
    return tuple(first), tuple(second)


def _islands(cores: Sequence[int], folder: Path) -> set[int]:
    """Those that the kernel lists, or that lack the level of cache that most others have."""
    listed = _listed(folder, _ISLAND)
    if listed:
        return listed & set(cores)
    levels = {core: _cache_level(folder / f"system/cpu/cpu{core}/cache") for core in cores}
    deepest = max(levels.values(), default=0)
    apart = {core for core, level in levels.items() if 0 < level < deepest}
    return apart if 2 * len(apart) <= len(cores) else set()


def _cache_level(folder: Path) -> int:
    """The level of a core's last cache; 0 where nothing is said."""
    texts = [read_text(path / "level").strip() for path in folder.glob("index[0-9]*")]
    return max([int(text) for text in texts if text.isdecimal()], default=0)


def _listed(folder: Path, *patterns: str) -> set[int]:
    """Cores of all lists below `folder` that match a pattern."""
    paths = [path for pattern in patterns for path in folder.glob(pattern)]
    return {core for path in paths for core in parse_core_list(read_text(path))}


def _core_speeds(cores: Sequence[int], folder: Path) -> dict[int, int]:
    """How fast `cores` are beside each other; a core of which nothing is said is left out.

    By their capacity, or else the highest clock: some kernels name no kinds of cores.
    """
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        texts = {core: read_text(folder / f"cpu{core}" / name).strip() for core in cores}
        known = {core: int(text) for core, text in texts.items() if text.isdecimal()}
        if known:
            return known
    return {}
