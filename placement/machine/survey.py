"""What this machine has: processor, NUMA nodes, memory, GPUs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from cuda_kernels.device import Gpu, list_gpus
from model.weights.memory import available_bytes
from placement.machine.sysfs import (
    NumaNode,
    read_cpu,
    read_cpu_quota,
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
    numa_nodes: tuple[NumaNode, ...]
    available_bytes: int  # without swapping, within the cgroup's limit
    shared_memory_free_bytes: int
    huge_pages: str  # always, madvise, never or unknown
    huge_page_defrag: str  # always, defer, defer+madvise, madvise, never or unknown
    gpus: tuple[Gpu, ...]
    no_gpu_reason: str  # empty where there are GPUs

    @property
    def usable_nodes(self) -> tuple[NumaNode, ...]:
        """The NUMA nodes that have one of `cores`."""
        return nodes_of(self.cores, self.numa_nodes)


def usable_cores(root: Path = Path("/")) -> tuple[int, ...]:
    """Logical cores that this process may run on, at most as many as its CPU quota pays for.

    More threads than the quota has CPUs would spend it waiting for one another.
    """
    cores = tuple(sorted(os.sched_getaffinity(0)))
    quota = read_cpu_quota(root)
    return cores if quota is None else cores[: math.ceil(quota)]


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
        numa_nodes=read_numa_nodes(root),
        available_bytes=available_bytes(),
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
