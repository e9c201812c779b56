"""Limits of this process: cgroups, its CPU set, its quota of CPU time.

Files are read below a `root`, so that tests can invent machines. An unreadable file is no limit.
"""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath

_V2 = ""  # the controllers of cgroup v2's one hierarchy, as /proc/self/cgroup names them


def group_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's cgroups and all their parents, the innermost first.

    `controller`, "cpu" or "memory", chooses a hierarchy of cgroup v1. Limits of all folders apply
    at once. In a container the path may be the host's, which is not mounted: then the top of the
    mount is the container's own group. Folders may not exist.
    """
    paths: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):  # 0::/user.slice or 4:cpu,cpuacct:/docker/...
        _, _, rest = line.partition(":")
        names, colon, path = rest.partition(":")
        for name in names.split(",") if colon else ():
            paths.setdefault(name, path)
    found: list[Path] = []
    for hierarchy, top, folder in _mounts(controller, root):
        own = PurePosixPath(paths.get(hierarchy, top))
        inside = own.relative_to(top) if own.is_relative_to(top) else PurePosixPath()
        if ".." in inside.parts:  # outside of the process's cgroup namespace
            inside = PurePosixPath()
        found += [folder / each for each in (inside, *inside.parents)]
    return found


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU time a second that this process's cgroups may use; None without a limit.

    cgroup v2 has "quota period" in cpu.max, v1 a file for each; microseconds.
    """
    found = []
    for folder in group_folders("cpu", root):
        words = read_text(folder / "cpu.max").split()
        if not words:
            files = (folder / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            words = [read_text(file).strip() for file in files]
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            found.append(int(words[0]) / int(words[1]))  # else "max", -1, or no such file
    return min(found, default=None)


def num_cpus(root: Path = Path("/")) -> int:
    """Return the logical cores that this process may run on, or its quota if that is less.

    At least 1. The quota is rounded: with 1.2 CPUs two threads are slower than one, because they
    spend the quota waiting for each other; with 1.5 they are faster.
    """
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota(root)
    return cores if quota is None else max(1, min(cores, math.floor(quota + 0.5)))


def memory_nodes(root: Path = Path("/")) -> frozenset[int] | None:
    """Return the NUMA nodes whose memory the cpuset allows; None where Linux does not say."""
    for line in _lines(root / "proc/self/status"):
        if line.startswith("Mems_allowed_list:"):
            return frozenset(parse_core_list(line.partition(":")[2]))
    return None


def parse_core_list(text: str) -> tuple[int, ...]:
    """Parse a list as Linux writes it: "0-3,8" is 0, 1, 2, 3, 8."""
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def _mounts(controller: str, root: Path) -> list[tuple[str, str, Path]]:
    """Mounts of cgroup hierarchies: hierarchy, the group at its top, folder.

    Where mountinfo has none, the usual folders.
    """
    found = []
    for line in _lines(root / "proc/self/mountinfo"):
        place, _, kind = line.partition(" - ")
        fields, words = place.split(), kind.split()
        if len(fields) < 5 or len(words) < 3:
            continue
        folder = root / fields[4].lstrip("/")
        if words[0] == "cgroup2":
            found.append((_V2, fields[3], folder))
        elif words[0] == "cgroup" and controller in words[2].split(","):
            found.append((controller, fields[3], folder))
    usual = root / "sys/fs/cgroup"
    return found or [(_V2, "/", usual), (controller, "/", usual / controller)]


def _lines(path: Path) -> list[str]:
    return read_text(path).splitlines()


def read_text(path: Path) -> str:
    """Return a file's text; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
