"""The machine that this process runs on: measured now, or cached by an earlier process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hotcold.model.errors import HotcoldError
from hotcold.model.files.atomic_write import write_atomic
from hotcold.numba_kernels.own_cache import own_folder
from hotcold.placement.machine.description import Machine
from hotcold.placement.machine.survey import MachineLayout, read_layout


def this_machine(
    *,
    fresh: bool = False,
    on_stage: Callable[[str], None] = lambda text: None,
    root: Path = Path("/"),
) -> Machine:
    """This machine, measured now or, unless `fresh`, by an earlier process.

    A measurement is cached for this processor, its cores, nodes and GPUs; free memory is always
    read anew. One beside other programs stays until a `fresh` one is better. `on_stage` receives
    what is being measured; proc and sys are read below `root`.
    Units:   about five seconds a NUMA node
    Errors:  MemoryBudgetError where there is no memory to measure with
    """
    from hotcold.placement.machine.measure import measure_machine  # all of the FFN's kernels

    layout = read_layout(root)
    kept = read_cached(layout)
    if kept is not None and not fresh:
        return kept
    machine = measure_machine(layout, on_stage, root)
    if kept is None or not machine.was_busy or _worth(machine) > _worth(kept):
        write_cached(layout, machine)
    return machine


def measured_before(root: Path = Path("/")) -> Machine | None:
    """This machine as cached by an earlier `this_machine`, or None."""
    return read_cached(read_layout(root))


def _worth(machine: Machine) -> tuple[bool, float]:
    """What of two measurements the better one has more of."""
    return not machine.was_busy, machine.read_gb_per_s


_VERSION = 3  # another way to measure gets another number


def cache_path() -> Path:
    """The file, below XDG_CACHE_HOME or ~/.cache.

    Errors:  OSError where there is no folder of this user's alone
    """
    return own_folder() / "machine.json"


def read_cached(layout: MachineLayout) -> Machine | None:
    """The cached measurement with the memory that is free now.

    None where there is none, or where it is damaged or of another machine or other cores.
    """
    try:
        entry = json.loads(cache_path().read_bytes())
        if entry["version"] != _VERSION or entry["key"] != layout.key:
            return None
        return with_free_bytes(Machine.from_json(entry["machine"], "cache"), layout)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, HotcoldError):
        return None


def write_cached(layout: MachineLayout, machine: Machine) -> None:
    """Cache a measurement; if that fails, the next command measures again."""
    entry = {"version": _VERSION, "key": layout.key, "machine": machine.as_json()}
    with contextlib.suppress(OSError):
        write_atomic(cache_path(), json.dumps(entry).encode())


def with_free_bytes(machine: Machine, layout: MachineLayout) -> Machine:
    """`machine` with the memory sizes of `layout`. Errors: LookupError for other nodes or GPUs."""
    nodes = {node.name: (node.total_bytes, node.free_bytes) for node in layout.nodes}
    gpus = {f"gpu{gpu.device_id}": gpu.free_bytes for gpu in layout.gpus}
    if len(nodes) != len(machine.nodes) or len(gpus) != len(machine.gpus):
        raise LookupError("another number of nodes or GPUs")
    return replace(
        machine,
        nodes=tuple(
            replace(node, total_bytes=nodes[node.name][0], free_bytes=nodes[node.name][1])
            for node in machine.nodes
        ),
        gpus=tuple(replace(gpu, free_bytes=gpus[gpu.name]) for gpu in machine.gpus),
    )
