"""Measures a machine, part by part: each NUMA node alone, the way to a service, each GPU."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

from hotcold.cuda_kernels.device import Gpu
from hotcold.cuda_kernels.timing import measure_gpu_bandwidth
from hotcold.placement.machine.busy import BusyWatch
from hotcold.placement.machine.description import CpuNode, GpuDevice, Machine
from hotcold.placement.machine.measure_exchange import measure_exchange_us
from hotcold.placement.machine.measure_layout import MachineLayout, NodeLayout
from hotcold.placement.machine.measure_node import measure_node

# For a GPU that cannot be measured, on the low side, so that a plan promises too little.
# 504 GB/s: NVIDIA's data sheet of the GeForce RTX 4070. 31.5 GB/s a direction is what 16 lanes of
# PCI Express 4.0 carry (16 GT/s, 128b/130b); some four fifths of it arrive.
ASSUMED_GPU_READ_GB_PER_S = 500.0
ASSUMED_LINK_GB_PER_S = 25.0


def measure_machine(
    layout: MachineLayout,
    on_stage: Callable[[str], None] = lambda text: None,
    root: Path = Path("/"),
) -> Machine:
    """Measure everything that a Machine says. `on_stage` is told what is being measured.

    Nodes are measured one after the other, so what they read together is taken for the sum. What
    else ran on their cores meanwhile is noted; proc is read below `root` for it.
    Units:   about five seconds a node, two more for the exchange, one a GPU
    Errors:  MemoryBudgetError where there is no memory to measure with
    """
    nodes = []
    watch = BusyWatch(tuple(core for node in layout.nodes for core in node.cores), root)
    for node in layout.nodes:
        on_stage(f"measuring how fast {node.name} reads memory")
        nodes.append(_node(node))
    on_stage("measuring how fast services answer")
    exchange_us = measure_exchange_us([node.cores for node in layout.nodes])
    busy_cores = watch.busy_cores()
    gpus = []
    for gpu in layout.gpus:
        on_stage(f"measuring how fast GPU {gpu.device_id} reads memory")
        gpus.append(_gpu(gpu))
    return Machine(
        name=layout.cpu_name or "unknown",
        nodes=tuple(nodes),
        gpus=tuple(gpus),
        exchange_us=_rounded(exchange_us),
        date=date.today().isoformat(),
        busy_cores=round(busy_cores, 2),
    )


def _node(node: NodeLayout) -> CpuNode:
    rates = measure_node(node.cores, node.free_bytes, node.cache_bytes)
    return CpuNode(
        name=node.name,
        num_cores=len(node.cores),
        total_bytes=node.total_bytes,
        free_bytes=node.free_bytes,
        read_gb_per_s=_rounded(rates.read_gb_per_s),
        rows_gb_per_s=_rounded(rates.rows_gb_per_s),
        gather_gb_per_s=_rounded(rates.gather_gb_per_s),
    )


def _gpu(gpu: Gpu) -> GpuDevice:
    try:
        rates = measure_gpu_bandwidth(gpu.device_id)
        read, link, measured = _rounded(rates.read_gb_per_s), _rounded(rates.link_gb_per_s), True
    except RuntimeError:
        read, link, measured = ASSUMED_GPU_READ_GB_PER_S, ASSUMED_LINK_GB_PER_S, False
    return GpuDevice(
        name=f"gpu{gpu.device_id}",
        model=gpu.name,
        total_bytes=gpu.total_bytes,
        free_bytes=gpu.free_bytes,
        read_gb_per_s=read,
        link_gb_per_s=link,
        measured=measured,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
