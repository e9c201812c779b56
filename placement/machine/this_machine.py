"""The machine that this process runs on: measured now, or by an earlier process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hotcold.placement.machine.description import Machine
from hotcold.placement.machine.measure import measure_machine
from hotcold.placement.machine.measure_cache import read_cached, write_cached
from hotcold.placement.machine.measure_layout import read_layout


def this_machine(
    *,
    fresh: bool = False,
    on_stage: Callable[[str], None] = lambda text: None,
    root: Path = Path("/"),
) -> Machine:
    """This machine, measured now or, unless `fresh`, by an earlier process.

    A measurement is kept below XDG_CACHE_HOME or ~/.cache. It holds for this processor, its cores,
    nodes and GPUs; how much memory is free is always looked up. `on_stage` is told what is being
    measured. `root` is where proc and sys are read from.
    Units:   about five seconds a NUMA node
    Errors:  MemoryBudgetError where there is no memory to measure with
    """
    layout = read_layout(root)
    machine = None if fresh else read_cached(layout)
    if machine is None:
        machine = measure_machine(layout, on_stage, root)
        write_cached(layout, machine)
    return machine


def measured_before(root: Path = Path("/")) -> Machine | None:
    """This machine as `this_machine` has measured it earlier; None where it has not."""
    return read_cached(read_layout(root))
