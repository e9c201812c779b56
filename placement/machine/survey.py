"""What this machine has: processor, NUMA nodes, memory, GPUs."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from hotcold.cuda_kernels.device import Gpu, list_gpus
from hotcold.model.limits import cpu_quota, num_cpus, parse_core_list
from hotcold.model.weights.memory import available_bytes, free_shared_memory, memory_limit
from hotcold.placement.machine.core_kinds import core_kinds
from hotcold.placement.machine.description import CpuNode, GpuDevice, Machine
from hotcold.placement.machine.sysfs import (
    NumaNode,
    read_cpu,
    read_huge_page_setting,
    read_numa_nodes,
)

_UNNAMED = "unknown"  # a processor whose name the kernel does not say


@dataclass(frozen=True)
class MachineSurvey:
    """One machine, as this process may use it."""

    cpu_name: str
    cpu_features: tuple[str, ...]
    cores: tuple[int, ...]  # see `usable_cores`
    num_online: int  # logical cores of the machine
    num_allowed: int  # of them, those that this process may run on
    cpu_quota: float | None  # CPUs that its control groups may use
    numa_nodes: tuple[NumaNode, ...]
    available_bytes: int  # without swapping, within the cgroup's limit
    memory_limit: int | None  # bytes that its control groups may use; None: unlimited
    shared_memory_free_bytes: int
    huge_pages: str  # always, madvise, never or unknown
    huge_page_defrag: str  # always, defer, defer+madvise, madvise, never or unknown
    gpus: tuple[Gpu, ...]
    no_gpu_reason: str  # empty where there are GPUs

    @property
    def usable_nodes(self) -> tuple[NumaNode, ...]:
        """The NUMA nodes that have one of `cores`."""
        return nodes_of(self.cores, self.numa_nodes)


def usable_cores(root: Path = Path("/"), num_threads: int = 0) -> tuple[int, ...]:
    """Logical cores for so many threads, in order; without a number those that pay.

    Of the cores that this process may run on those that pay (`core_kinds`), for more threads the
    next best ones. At most as many as the CPU quota: more threads would spend it waiting for one
    another.
    """
    kinds = core_kinds(tuple(os.sched_getaffinity(0)), root)
    cores = kinds.paying if num_threads <= len(kinds.paying) else kinds.best(num_threads)
    most = num_cpus(root)
    return cores if len(cores) <= most else kinds.best(most)


def nodes_of(cores: tuple[int, ...], nodes: tuple[NumaNode, ...]) -> tuple[NumaNode, ...]:
    """Those of `nodes` that have one of `cores`."""
    return tuple(node for node in nodes if set(node.cores) & set(cores))


def survey(root: Path = Path("/")) -> MachineSurvey:
    """Survey this machine; proc and sys are read below `root`."""
    cpu = read_cpu(root)
    cores = usable_cores(root)
    gpus, no_gpu_reason = list_gpus()
    return MachineSurvey(
        cpu_name=cpu.name,
        cpu_features=cpu.features,
        cores=cores,
        num_online=os.cpu_count() or 1,
        num_allowed=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(root),
        numa_nodes=read_numa_nodes(root),
        available_bytes=available_bytes(),
        memory_limit=memory_limit(),
        shared_memory_free_bytes=free_shared_memory(),
        huge_pages=read_huge_page_setting(root),
        huge_page_defrag=read_huge_page_setting(root, "defrag"),
        gpus=gpus,
        no_gpu_reason=no_gpu_reason,
    )


@dataclass(frozen=True)
class NodeLayout:
    """One NUMA node as this process may use it."""

    name: str  # node0
    cores: tuple[int, ...]  # those that may be used
    total_bytes: int
    free_bytes: int  # without swapping, within the cgroup's limit
    cache_bytes: int  # last-level caches of its cores; 0 where the kernel does not say


@dataclass(frozen=True)
class MachineLayout:
    """What a measurement is valid for."""

    cpu_name: str
    nodes: tuple[NodeLayout, ...]
    gpus: tuple[Gpu, ...]

    @property
    def key(self) -> str:
        """Digest of processor, cores of nodes, and GPUs.

        Without memory sizes: those of virtual machines change while they run.
        """
        nodes = [(node.name, node.cores) for node in self.nodes]
        gpus = [(gpu.device_id, gpu.name, gpu.total_bytes) for gpu in self.gpus]
        text = json.dumps([self.cpu_name, nodes, gpus])
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def unmeasured(self) -> Machine:
        """The machine's description, with speeds that say nothing."""
        return Machine(
            name=self.cpu_name or _UNNAMED,
            nodes=tuple(
                CpuNode(node.name, len(node.cores), node.total_bytes, node.free_bytes, 1, 1, 1)
                for node in self.nodes
            ),
            gpus=tuple(
                GpuDevice(
                    f"gpu{gpu.device_id}", gpu.name, gpu.total_bytes, gpu.free_bytes, 1, 1, False
                )
                for gpu in self.gpus
            ),
            exchange_us=1,
            date="",
        )


def read_layout(root: Path = Path("/")) -> MachineLayout:
    """The nodes and GPUs of this machine; proc and sys are read below `root`.

    Nodes without a usable core or without memory are left out. If no node is left, the machine
    counts as one.
    """
    cores = usable_cores(root)
    nodes = [node for node in nodes_of(cores, read_numa_nodes(root)) if node.total_bytes]
    if not nodes:
        total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        nodes = [NumaNode(0, cores, total_bytes, 0)]
    layouts = tuple(
        NodeLayout(
            name=f"node{node.node_id}",
            cores=tuple(core for core in node.cores if core in cores),
            total_bytes=node.total_bytes,
            free_bytes=free_bytes,
            cache_bytes=last_level_cache_bytes(node.cores, root),
        )
        for node, free_bytes in zip(nodes, free_bytes_of(nodes, available_bytes()), strict=True)
    )
    return MachineLayout(read_cpu(root).name, layouts, list_gpus()[0])


def free_bytes_of(nodes: list[NumaNode], available: int) -> list[int]:
    """Share the machine's available bytes among `nodes`; no node gets more than it has.

    The kernel reports unused memory by node, but available memory, which includes file cache that
    it would drop, only for the machine. That cache is assumed to be spread evenly over the memory
    in use. If a cgroup allows less than is unused, all nodes get less in proportion.
    """
    unused = sum(node.free_bytes for node in nodes)
    if available <= unused:
        return [node.free_bytes * available // max(1, unused) for node in nodes]
    used = max(1, sum(node.total_bytes - node.free_bytes for node in nodes))
    cache = min(available - unused, used)
    return [
        node.free_bytes + (node.total_bytes - node.free_bytes) * cache // used for node in nodes
    ]


def last_level_cache_bytes(cores: tuple[int, ...], root: Path = Path("/")) -> int:
    """Total size of the last-level caches of `cores`; 0 where unknown."""
    sizes: dict[tuple[int, ...], int] = {}
    for core in cores:
        folders = (root / f"sys/devices/system/cpu/cpu{core}/cache").glob("index[0-9]*")
        folder = max(folders, key=lambda path: int(path.name.removeprefix("index")), default=None)
        if folder is None:
            continue
        try:
            shared_by = parse_core_list((folder / "shared_cpu_list").read_text())
            text = (folder / "size").read_text().strip()
            sizes[shared_by] = int(text.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return sum(sizes.values())
