"""What the plan expects on the PowerInfer papers' computers, beside what was published for them.

    python -m benchmarks.paper_plans --write docs/paper.md

Nothing is measured and no weights are read: config, a stated sparsity and the descriptions in
benchmarks/machines/ are all. The tables replace what lies between the marks in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from hotcold.actors.setup.memory_needs import system_need
from hotcold.actors.setup.placement_choice import plan_request
from hotcold.actors.setup.preflight import SystemOptions
from hotcold.jobs.support.planned_model import (
    planned_model,
    planned_predictors,
    planned_profile,
    planned_system,
)
from hotcold.model.errors import MemoryBudgetError
from hotcold.placement.machine.description import Machine, read_machine
from hotcold.placement.planner import make_plan
from hotcold.placement.solver.cost import PlanDevice, RowBytes, part_costs
from hotcold.placement.solver.plan_devices import make_plan_devices
from hotcold.placement.solver.problem import ATTENTION

MACHINES = Path(__file__).parent / "machines"
BEGIN, END = "<!-- plans: begin -->", "<!-- plans: end -->"
_CONTEXT = 1024
_NO_GPU = 0
_WHOLE_GPU = 1 << 40  # these programs leave nothing of it to others


@dataclass(frozen=True)
class Published:
    """What somebody measured. tokens/s, None where it was not published."""

    name: str
    shape: str
    machine: str
    gpu_memory_bytes: int
    density: float
    dense: float | None  # all neurons: llama.cpp, or PowerInfer told to skip none
    sparse: float | None  # PowerInfer
    source: str


# [1] the model's card at huggingface.co/SparseLLM, i9-13900K, 67.2 GB/s; [2] README of
# SJTU-IPADS/Bamboo, the 2080 Ti with an i7-13700.
PUBLISHED = (
    Published("ReluLLaMA-7B", "llama-7b", "pc-high", _NO_GPU, 0.33, 5.17, 8.21, "1"),
    Published("ReluLLaMA-13B", "llama-13b", "pc-high", _NO_GPU, 0.22, 2.69, None, "1"),
    Published("ReluLLaMA-70B", "llama-70b", "pc-high", _NO_GPU, 0.18, 0.52, None, "1"),
    Published("ReluFalcon-40B", "falcon-40b-like", "pc-high", _NO_GPU, 0.05, 0.85, 2.26, "1"),
    Published("Bamboo-7B", "bamboo-7b", "pc-high", _NO_GPU, 0.12, 4.78, 9.94, "2"),
    Published("Bamboo-7B, RTX 4090", "bamboo-7b", "pc-high", _WHOLE_GPU, 0.12, 58.34, 92.46, "2"),
    Published("Bamboo-7B, RTX 2080 Ti", "bamboo-7b", "pc-low", _WHOLE_GPU, 0.12, 7.64, 33.50, "2"),
)
# Shapes of the paper's section 8 with the sparsity that it gives.
PAPER_MODELS = (
    ("opt-6.7b", 0.04),
    ("opt-30b", 0.03),
    ("opt-66b", 0.03),
    ("falcon-40b-like", 0.05),
    ("llama-70b", 0.18),
)


def layer_split_s(
    shape: str, dtype: str | None, machine: Machine, gpu_memory_bytes: int
) -> float | None:
    """Seconds a token by llama.cpp's way, at the plan's bandwidths: None where it does not fit.

    Whole layers, all neurons of each, lie on the GPU as far as bytes allow, the head after the last
    one; the rest is on the CPU. One device works at a time, and nothing else costs anything.
    """
    config = planned_model(None, shape, None, dtype).config
    devices = make_plan_devices(machine, num_cpu_actors=1, gpu_memory_bytes=gpu_memory_bytes)
    parts = part_costs(config, _CONTEXT, "float16", None)
    rows = RowBytes.of(config)
    ffn = config.ffn_size * (rows.first + rows.rest)
    is_layer = [kind == ATTENTION for kind in parts.kinds]
    held = parts.num_bytes + [ffn * layer for layer in is_layer]
    read = parts.read_bytes + [ffn * layer for layer in is_layer]
    return _filled_s(devices, list(map(int, held)), list(map(int, read)))


def _filled_s(
    devices: Sequence[PlanDevice], held: Sequence[int], read: Sequence[int]
) -> float | None:
    """Seconds where the first device takes the first pieces that it has room for, and so on."""
    seconds, rooms = 0.0, [device.budget_bytes for device in devices]
    at = 0
    for size, num_bytes in zip(held, read, strict=True):
        while at < len(devices) and rooms[at] < size:
            at += 1
        if at == len(devices):
            return None
        rooms[at] -= size
        seconds += num_bytes / (devices[at].rows_gb_per_s * 1e9)
    return seconds


def planned_speed(
    shape: str,
    dtype: str | None,
    machine: Machine,
    gpu_memory_bytes: int,
    mode: str,
    density: float,
) -> tuple[float, float] | None:
    """tokens/s, and the GPU's share of active neurons; None where the model does not fit."""
    options = SystemOptions(
        mode=mode,
        context_length=_CONTEXT,
        gpu_memory_bytes=gpu_memory_bytes,
        weight_dtype=dtype,
    )
    model = planned_model(None, shape, None, dtype)
    system = planned_system(model, options, machine)
    profile = planned_profile(model, None, density)
    need = system_need(system, model.config)
    try:
        plan = make_plan(
            model.config,
            machine,
            profile,
            plan_request(system, gpu_memory_bytes, None, machine.digest, profile),
            predictor=planned_predictors(model, system),
            host_reserve_bytes=need.process_bytes + need.arena_bytes,
        )
    except MemoryBudgetError:
        return None
    on_gpu = sum(
        device["active_share"]
        for device in plan.report["devices"]
        if device["name"].startswith("gpu")
    )
    return plan.report["tokens_per_s"], on_gpu


def published_table() -> list[str]:
    """The plan beside what was measured, float16."""
    lines = [
        "| | dense, measured | dense, by the model of costs | ratio | PowerInfer, measured | "
        "`exact`, planned | `lowrank`, planned | ratio | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in PUBLISHED:
        machine = read_machine(MACHINES / f"{case.machine}.json")
        place = (case.shape, None, machine, case.gpu_memory_bytes)
        dense_s = layer_split_s(*place)
        dense = None if dense_s is None else 1 / dense_s
        exact, lowrank = (
            found and found[0]
            for found in (
                planned_speed(*place, mode, case.density) for mode in ("exact", "lowrank")
            )
        )
        cells = (
            f"{case.name}, {case.density:.0%} fire",
            _speed(case.dense),
            _speed(dense),
            _ratio(dense, case.dense),
            _speed(case.sparse),
            _speed(exact),
            _speed(lowrank),
            _ratio(lowrank, case.sparse),
            f"[{case.source}]",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def paper_table() -> list[str]:
    """The paper's models on its two computers, in float16 and 4 bits."""
    lines = [
        "| | llama.cpp's split | `exact` | `lowrank` | times llama.cpp's split | active neurons on "
        "the GPU |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in ("pc-high", "pc-low"):
        machine = read_machine(MACHINES / f"{name}.json")
        for dtype in (None, "q4"):
            for shape, density in PAPER_MODELS:
                place = (shape, dtype, machine, _WHOLE_GPU)
                split_s = layer_split_s(*place)
                exact = planned_speed(*place, "exact", density)
                lowrank = planned_speed(*place, "lowrank", density)
                split = None if split_s is None else 1 / split_s
                cells = (
                    f"{name}, {shape}, {dtype or 'f16'}, {density:.0%} fire",
                    _speed(split),
                    _speed(exact and exact[0]),
                    _speed(lowrank and lowrank[0]),
                    _ratio(lowrank and lowrank[0], split),
                    "" if lowrank is None else f"{lowrank[1]:.0%}",
                )
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def _speed(tokens_per_s: float | None) -> str:
    return "–" if tokens_per_s is None else f"{tokens_per_s:.3g}"


def _ratio(value: float | None, other: float | None) -> str:
    return "" if value is None or other is None else f"{value / other:.2f}"


def with_tables(text: str, tables: Sequence[str]) -> str:
    """`text` with what lies between the marks replaced. Errors: ValueError without marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return "\n".join([f"{before}{BEGIN}", "", *tables, "", f"{END}{after}"])


@click.command()
@click.option("--write", type=click.Path(path_type=Path, exists=True), help="Replace its tables.")
def main(write: Path | None) -> None:
    """Print the tables, or put them into a file."""
    tables = [
        "Published figures, float16:",
        "",
        *published_table(),
        "",
        "The paper's computers and models, by the plan:",
        "",
        *paper_table(),
    ]
    if write is None:
        click.echo("\n".join(tables))
    else:
        write.write_text(with_tables(write.read_text(), tables))


if __name__ == "__main__":
    main()
