"""What this machine has: processor, NUMA nodes, memory, GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hotcold.cuda_kernels.device import Gpu, list_gpus
from hotcold.model.limits import cpu_quota, num_cpus
from hotcold.model.weights.memory import available_bytes, memory_limit
from hotcold.placement.machine.sysfs import (
    NumaNode,
    performance_cores,
    read_cpu,
    read_huge_page_setting,
    read_numa_nodes,
)

_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class MachineSurvey:
    """One machine, as this process may use it."""

    cpu_name: str
    cpu_features: tuple[str, ...]
    cores: tuple[int, ...]  # see `usable_cores`
    num_online: int  # logical cores of the machine
    num_allowed: int  # of them, those that this process may run on
    cpu_quota: float | None  # CPUs' time that its control groups may use
    numa_nodes: tuple[NumaNode, ...]
    available_bytes: int  # without swapping, within the cgroup's limit
    memory_limit: int | None  # bytes that its control groups may use; None for all that there are
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
    """Logical cores for threads: without a number the best ones, in order.

    Those of `performance_cores` that this process may run on, at most as many as its CPU quota pays
    for: more threads would spend it waiting for one another. For more threads than these, the other
    cores too.
    """
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    best = performance_cores(allowed, root)
    return (best if num_threads <= len(best) else allowed)[: num_cpus(root)]


def nodes_of(cores: tuple[int, ...], nodes: tuple[NumaNode, ...]) -> tuple[NumaNode, ...]:
    """Those of `nodes` that have one of `cores`."""
    return tuple(node for node in nodes if set(node.cores) & set(cores))


def survey(root: Path = Path("/")) -> MachineSurvey:
    """Look at this machine; `root` is where proc and sys are read from."""
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
        shared_memory_free_bytes=_free_bytes(_SHARED_MEMORY),
        huge_pages=read_huge_page_setting(root),
        huge_page_defrag=read_huge_page_setting(root, "defrag"),
        gpus=gpus,
        no_gpu_reason=no_gpu_reason,
    )


def _free_bytes(path: str) -> int:
    try:
        status = os.statvfs(path)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
