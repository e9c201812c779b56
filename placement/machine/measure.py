"""Measures a machine: each NUMA node alone, the exchange with services, each GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

from hotcold.cuda_kernels.timing import measure_gpu_bandwidth
from hotcold.placement.machine.description import CpuNode, GpuDevice, Machine
from hotcold.placement.machine.measure_exchange import measure_exchange_us
from hotcold.placement.machine.measure_node import measure_node
from hotcold.placement.machine.survey import MachineLayout, NodeLayout

# For a GPU that cannot be measured; low, so that a plan errs on the safe side.
# 504 GB/s: NVIDIA's data sheet of the GeForce RTX 4070. 31.5 GB/s a direction is what 16 lanes of
# PCI Express 4.0 carry (16 GT/s, 128b/130b); some four fifths of it arrive.
ASSUMED_GPU_READ_GB_PER_S = 500.0
ASSUMED_LINK_GB_PER_S = 25.0


def measure_machine(
    layout: MachineLayout,
    on_stage: Callable[[str], None] = lambda text: None,
    root: Path = Path("/"),
) -> Machine:
    """Measure all figures of a Machine. `on_stage` receives what is being measured.

    Nodes are measured one after another; together they are assumed to read the sum. The work of
    other programs on their cores meanwhile is recorded, from proc below `root`.
    Units:   about five seconds a node, two more for the exchange, one a GPU
    Errors:  MemoryBudgetError where there is no memory to measure with
    """
    machine, nodes, gpus = layout.unmeasured, list[CpuNode](), list[GpuDevice]()
    watch = BusyWatch(tuple(core for node in layout.nodes for core in node.cores), root)
    for node, place in zip(machine.nodes, layout.nodes, strict=True):
        on_stage(f"measuring how fast {node.name} reads memory")
        nodes.append(replace(node, **_rates_of_node(place)))
    on_stage("measuring how fast services answer")
    exchange_us = measure_exchange_us([node.cores for node in layout.nodes])
    busy_cores = watch.busy_cores()
    for gpu, card in zip(machine.gpus, layout.gpus, strict=True):
        on_stage(f"measuring how fast GPU {card.device_id} reads memory")
        gpus.append(replace(gpu, **_rates_of_gpu(card.device_id)))
    return replace(
        machine,
        nodes=tuple(nodes),
        gpus=tuple(gpus),
        exchange_us=_rounded(exchange_us),
        date=date.today().isoformat(),
        busy_cores=round(busy_cores, 2),
    )


def _rates_of_node(node: NodeLayout) -> dict[str, Any]:
    rates = asdict(measure_node(node.cores, node.free_bytes, node.cache_bytes))
    return {name: _rounded(rate) for name, rate in rates.items()}


def _rates_of_gpu(device_id: int) -> dict[str, Any]:
    try:
        rates = asdict(measure_gpu_bandwidth(device_id))
    except RuntimeError:
        return {"read_gb_per_s": ASSUMED_GPU_READ_GB_PER_S, "link_gb_per_s": ASSUMED_LINK_GB_PER_S}
    return {name: _rounded(rate) for name, rate in rates.items()} | {"measured": True}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


# Columns of a core's line in proc/stat without work: idle and iowait. The last two, guests' time,
# are part of user and nice. Steal, the time of other virtual machines, counts as others' work.
_IDLE_COLUMNS = (3, 4)
_COLUMNS = 8


class BusyWatch:
    """Measures the work of other processes on some cores, from its construction on."""

    def __init__(self, cores: tuple[int, ...], root: Path = Path("/")) -> None:
        """Watch `cores`, by proc below `root`."""
        self._cores, self._root = cores, root
        self._begin = self._now()

    def busy_cores(self) -> float:
        """The average number of cores that others kept busy; 0 where the kernel does not say."""
        began_s, all_s, own_s = self._begin
        ended_s, all_end_s, own_end_s = self._now()
        others_s = (all_end_s - all_s) - (own_end_s - own_s)
        return min(max(0.0, others_s / max(1e-9, ended_s - began_s)), float(len(self._cores)))

    def _now(self) -> tuple[float, float, float]:
        """The time, and CPU seconds on the cores: of all processes, of this one."""
        times = os.times()
        return perf_counter(), self._worked_s(), times.user + times.system

    def _worked_s(self) -> float:
        names = {f"cpu{core}" for core in self._cores}
        ticks = 0
        try:
            for line in (self._root / "proc/stat").read_text().splitlines():
                name, *columns = line.split()
                if name in names:
                    counts = [int(column) for column in columns[:_COLUMNS]]
                    ticks += sum(counts) - sum(counts[i] for i in _IDLE_COLUMNS)
        except (OSError, ValueError, IndexError):
            return 0.0
        return ticks / os.sysconf("SC_CLK_TCK")
