"""Pages of memory: placed on NUMA nodes by first touch; found on them; huge or not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotcold.model.errors import MemoryBudgetError
from hotcold.model.limits import parse_core_list
from hotcold.model.weights.memory import HUGE_PAGE_BYTES, aligned_empty
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.placement.machine.numa import nodes_with_memory
from hotcold.placement.machine.pinning import pin_thread, use_local_memory
from hotcold.placement.machine.sysfs import read_numa_nodes

_PAGE_BYTES = 4096
ROWS_TOGETHER = 4  # kernels give rows to threads in such multiples


class FirstTouch:
    """Writes a byte of each page of new arrays, from the cores of the threads that will read it.

    The kernel places a page on the node of the thread that first writes it. A page that two
    threads share goes to one of them.
    """

    def __init__(self, thread_cores: Sequence[Sequence[int]]) -> None:
        """thread_cores[t] are the cores of the service's thread t."""
        self._thread_cores = thread_cores

    def __call__(self, matrices: Sequence[np.ndarray]) -> None:
        """Touch `matrices` (R, C); thread t will read its `split_range` of each one's rows."""
        num_threads = len(self._thread_cores)

        def touch(thread: int) -> None:
            pin_thread(self._thread_cores[thread])
            use_local_memory()
            for matrix in matrices:
                first, last = split_range(matrix.shape[0], thread, num_threads, ROWS_TOGETHER)
                touch_pages(matrix[first:last])

        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(touch, range(num_threads)))


def touch_pages(rows: np.ndarray) -> None:
    """Write zero into the first byte of each page of contiguous, zeroed rows, and into the last."""
    if rows.size:
        items = rows.reshape(-1).view(np.uint8)
        start = -items.ctypes.data % _PAGE_BYTES
        items[start::_PAGE_BYTES] = 0
        items[[0, -1]] = 0


PROBE_BYTES = 64 << 20
_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


@dataclass(frozen=True)
class HugePageProbe:
    """How many of the `num_bytes` that were allocated and written are in huge pages."""

    huge_bytes: int
    num_bytes: int


def probe_huge_pages(
    num_bytes: int = PROBE_BYTES, smaps: Path = Path("/proc/self/smaps")
) -> HugePageProbe | None:
    """Allocate and touch `num_bytes` as for weights; None where memory or `smaps` is lacking.

    The kernel may merge the mapping with its neighbours, so only the increase counts.
    """
    try:
        array = aligned_empty((num_bytes,), np.uint8)
    except MemoryBudgetError:
        return None
    before = huge_bytes_around(array.ctypes.data, num_bytes, smaps)
    array[::_PAGE_BYTES] = 1
    after = huge_bytes_around(array.ctypes.data, num_bytes, smaps)
    if before is None or after is None:
        return None
    return HugePageProbe(min(max(0, after - before), num_bytes), num_bytes)


def huge_bytes_around(address: int, num_bytes: int, smaps: Path) -> int | None:
    """AnonHugePages of all mappings that overlap the range; None where `smaps` has none."""
    try:
        lines = smaps.read_text().splitlines()
    except OSError:
        return None
    total, inside = None, False
    for line in lines:
        if found := _RANGE.match(line):
            start, end = (int(part, 16) for part in found.groups())
            inside = start < address + num_bytes and address < end
        elif inside and line.startswith("AnonHugePages:"):
            total = (total or 0) + int(line.split()[1]) * 1024
    return total


_SERVICE_TITLE = b"ray::ServiceActor"
# In the command lines of processes between a service and the one that started its Ray.
_BETWEEN = (b"ray::", b"private_ray.fork_server", b"/raylet/raylet")
_PAGES = re.compile(r"\bN(\d+)=(\d+)")
_PAGE_KIB = re.compile(r"\bkernelpagesize_kB=(\d+)")


@dataclass(frozen=True)
class ServiceMemory:
    """One process: bytes of its large anonymous mappings by node, and its threads' nodes.

    owner: the process that started its Ray, 0 where there is none on this host
    """

    pid: int
    node_bytes: dict[int, int]
    nodes: tuple[int, ...]
    owner: int = 0

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
        """The share of the bytes on the threads' nodes; 1 without any bytes."""
        return 1 - self.far_bytes / self.num_bytes if self.num_bytes else 1.0


def running_services(root: Path = Path("/")) -> tuple[ServiceMemory, ...]:
    """The services on this host, of all systems whose processes this user may inspect."""
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
        owner = _owner(pid, root)
    except OSError:  # it has ended, or is another user's
        return None
    nodes = nodes_with_memory(read_numa_nodes(root), cores)
    return ServiceMemory(pid, node_bytes, tuple(node.node_id for node in nodes), owner)


def _owner(pid: int, root: Path) -> int:
    while pid > 1 and any(part in (root / f"proc/{pid}/cmdline").read_bytes() for part in _BETWEEN):
        stat = (root / f"proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])
    return pid if pid > 1 else 0


def anonymous_bytes(numa_maps: str) -> dict[int, int]:
    """Bytes by node of anonymous mappings of a huge page or more, from /proc/PID/numa_maps.

    These are weights, KV cache and large workspaces; libraries and the arena are file mappings.
    """
    found: Counter[int] = Counter()
    for line in numa_maps.splitlines():
        if " anon=" not in line or " file=" in line:
            continue
        page = _PAGE_KIB.search(line)
        page_bytes = int(page[1]) << 10 if page else 4096
        sizes = {int(node): int(count) * page_bytes for node, count in _PAGES.findall(line)}
        if sum(sizes.values()) >= HUGE_PAGE_BYTES:
            found.update(sizes)
    return dict(sorted(found.items()))


def allowed_cores(status: str) -> tuple[int, ...]:
    """The cores that a process may run on, from /proc/PID/status."""
    for line in status.splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return parse_core_list(line.partition(":")[2])
    return ()
