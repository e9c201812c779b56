"""What limits this process on its machine: control groups, a CPU set, a quota of CPU time.

All is read below a `root`, so that tests can make up machines. What cannot be read limits nothing.
"""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath

_V2 = ""  # the controllers of cgroup v2's one hierarchy, as /proc/self/cgroup names them


def group_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """Folders of the groups that this process is in and of all above them, the innermost first.

    `controller` is "cpu" or "memory": of cgroup v1 only its hierarchy counts. Limits of all of them
    hold at once. In a container the path may be the host's, which is not to be seen: then the top
    of what is mounted is the container's own group. Folders need not be there.
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
    """Return how many CPUs' time this process's groups may use; None without a limit.

    cgroup v2 has "quota period" in cpu.max, v1 a file for each; microseconds.
    """
    found = []
    for folder in group_folders("cpu", root):
        words = _text(folder / "cpu.max").split()
        if not words:
            words = [_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            found.append(int(words[0]) / int(words[1]))  # else "max", -1, or no such file
    return min(found, default=None)


def num_cpus(root: Path = Path("/")) -> int:
    """Logical cores that this process may run on, or as many as its quota pays for if fewer.

    At least 1. A quota between two numbers counts as the nearest: with two threads, 1.2 CPUs are
    slower than with one, because threads that wait for each other spend it; 1.5 are faster.
    """
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota(root)
    return cores if quota is None else max(1, min(cores, math.floor(quota + 0.5)))


def memory_nodes(root: Path = Path("/")) -> frozenset[int] | None:
    """The NUMA nodes whose memory this process may take, by its cpuset; None where unsaid."""
    for line in _lines(root / "proc/self/status"):
        if line.startswith("Mems_allowed_list:"):
            return frozenset(parse_core_list(line.partition(":")[2]))
    return None


def parse_core_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list as Linux writes it: "0-3,8" is 0, 1, 2, 3, 8."""
    cores: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def _mounts(controller: str, root: Path) -> list[tuple[str, str, Path]]:
    """Where hierarchies that may limit are mounted: hierarchy, the group at its top, folder.

    Without a word of the kernel they are where they usually are.
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
    return _text(path).splitlines()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
