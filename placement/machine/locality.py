"""On which NUMA nodes the memory of running services lies, and on which their threads run.

Both are the kernel's word, from /proc: what a service was told is not asked.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hotcold.model.limits import parse_core_list
from hotcold.model.weights.memory import HUGE_PAGE_BYTES
from hotcold.placement.machine.numa import nodes_with_memory
from hotcold.placement.machine.sysfs import read_numa_nodes

_SERVICE_TITLE = b"ray::ServiceActor"
_PAGES = re.compile(r"\bN(\d+)=(\d+)")
_PAGE_KIB = re.compile(r"\bkernelpagesize_kB=(\d+)")


@dataclass(frozen=True)
class ServiceMemory:
    """One process: bytes of its large anonymous mappings by node, and its threads' nodes."""

    pid: int
    node_bytes: dict[int, int]
    nodes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """On all nodes."""
        return sum(self.node_bytes.values())

    @property
    def far_bytes(self) -> int:
        """On other nodes than the threads'."""
        return sum(size for node, size in self.node_bytes.items() if node not in self.nodes)

    @property
    def local_share(self) -> float:
        """The share of the bytes that is on the threads' nodes; 1 where there are none."""
        return 1 - self.far_bytes / self.num_bytes if self.num_bytes else 1.0


def running_services(root: Path = Path("/")) -> tuple[ServiceMemory, ...]:
    """The services that run on this host, of all systems whose processes may be looked at."""
    pids = sorted(int(path.name) for path in (root / "proc").iterdir() if path.name.isdecimal())
    found = (_service(pid, root) for pid in pids)
    return tuple(service for service in found if service is not None)


def _service(pid: int, root: Path) -> ServiceMemory | None:
    folder = root / "proc" / str(pid)
    try:
        if not (folder / "cmdline").read_bytes().startswith(_SERVICE_TITLE):
            return None
        node_bytes = anonymous_bytes((folder / "numa_maps").read_text())
        cores = allowed_cores((folder / "status").read_text())
    except OSError:  # it has ended, or is another user's
        return None
    nodes = nodes_with_memory(read_numa_nodes(root), cores)
    return ServiceMemory(pid, node_bytes, tuple(node.node_id for node in nodes))


def anonymous_bytes(numa_maps: str, least_bytes: int = HUGE_PAGE_BYTES) -> dict[int, int]:
    """Bytes on each node of anonymous mappings of `least_bytes` or more, by /proc/PID/numa_maps.

    Weights, KV cache and large work space are such; libraries and the arena are files.
    """
    found: Counter[int] = Counter()
    for line in numa_maps.splitlines():
        if " anon=" not in line or " file=" in line:
            continue
        page = _PAGE_KIB.search(line)
        page_bytes = int(page[1]) << 10 if page else 4096
        sizes = {int(node): int(count) * page_bytes for node, count in _PAGES.findall(line)}
        if sum(sizes.values()) >= least_bytes:
            found.update(sizes)
    return dict(sorted(found.items()))


def allowed_cores(status: str) -> tuple[int, ...]:
    """The cores that a process may run on, by /proc/PID/status."""
    for line in status.splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return parse_core_list(line.partition(":")[2])
    return ()
