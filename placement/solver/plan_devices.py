"""The devices of a plan, and the memory of each that the model may use."""

from __future__ import annotations

import numpy as np

from hotcold.placement.machine.description import GpuDevice, Machine
from hotcold.placement.machine.numa import node_groups, num_sharing
from hotcold.placement.solver.cost import PlanDevice
from hotcold.placement.solver.problem import shares

# The CUDA context with its kernels takes 300 to 500 MiB, graphs and buffers of steps and prompts
# the rest (`actors/attention/cuda/fit.py` computes it precisely once the GPU is open).
GPU_RESERVE_BYTES = 1 << 30  # of CUDA's context, graphs and workspace; an upper estimate
RESERVE_BYTES = 512 << 20  # of a GPU, left to other programs where no budget is given


def make_plan_devices(
    machine: Machine,
    *,
    num_cpu_actors: int,
    gpu_memory_bytes: int | None = None,
    cpu_memory_bytes: int | None = None,
    host_reserve_bytes: int = 0,
) -> tuple[PlanDevice, ...]:
    """The first GPU, the one that a system uses, if it has memory left; the CPU actors, cpu0...

    The GPU's budget is `gpu_budget` - GPU_RESERVE_BYTES. A CPU actor has the memory and bandwidth
    of its nodes (`placement.machine.numa.node_groups`), or its fraction of a shared node;
    cpu_memory_bytes and host_reserve_bytes are divided among actors in proportion to free memory:
    min(share, free) - reserve. A limit of None is all of the host's free memory.
    """
    gpus = [_gpu_device(gpu, gpu_memory_bytes) for gpu in machine.gpus[:1]]
    cpus = _cpu_devices(machine, num_cpu_actors, cpu_memory_bytes, host_reserve_bytes)
    return (*(device for device in gpus if device.budget_bytes > 0), *cpus)


def gpu_budget(limit_bytes: int | None, free_bytes: int) -> int:
    """What a system may take of a GPU: the limit, without one all that is free but a reserve."""
    return min(free_bytes - RESERVE_BYTES if limit_bytes is None else limit_bytes, free_bytes)


def _gpu_device(gpu: GpuDevice, limit_bytes: int | None) -> PlanDevice:
    return PlanDevice(
        name="gpu0",
        is_gpu=True,
        budget_bytes=max(0, gpu_budget(limit_bytes, gpu.free_bytes) - GPU_RESERVE_BYTES),
        free_bytes=gpu.free_bytes,
        rows_gb_per_s=gpu.read_gb_per_s,
        gather_gb_per_s=gpu.read_gb_per_s,
        link_gb_per_s=gpu.link_gb_per_s,
    )


def _cpu_devices(
    machine: Machine, num_actors: int, limit_bytes: int | None, reserve_bytes: int
) -> list[PlanDevice]:
    groups = node_groups(len(machine.nodes), num_actors)
    actors_nodes = [[machine.nodes[index] for index in group] for group in groups]
    sharing = num_sharing(len(machine.nodes), num_actors)
    free = [
        sum(node.free_bytes for node in nodes) // among
        for nodes, among in zip(actors_nodes, sharing, strict=True)
    ]
    limits = free if limit_bytes is None else shares(limit_bytes, np.array(free))
    reserves = shares(reserve_bytes, np.array(free))
    return [
        PlanDevice(
            name=f"cpu{actor}",
            is_gpu=False,
            budget_bytes=max(0, min(limits[actor], free[actor]) - reserves[actor]),
            free_bytes=free[actor],
            rows_gb_per_s=sum(node.rows_gb_per_s for node in nodes) / sharing[actor],
            gather_gb_per_s=sum(node.gather_gb_per_s for node in nodes) / sharing[actor],
        )
        for actor, nodes in enumerate(actors_nodes)
    ]
