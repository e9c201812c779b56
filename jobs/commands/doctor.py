"""`hotcold doctor`: what this machine has, what would be used, what is wrong, what fits."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import hotcold
from hotcold.jobs.support.console import end_with, json_option, plain, status_line, steps_bar
from hotcold.jobs.support.options import system_option
from hotcold.jobs.support.settings import GroupedCommand
from hotcold.model.byte_sizes import size_text
from hotcold.model.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from hotcold.actors.setup.account import Account
    from hotcold.jobs.support.doctor_checks import Finding
    from hotcold.placement.machine.description import Machine
    from hotcold.placement.machine.survey import MachineSurvey

_READ_SIZES = 4 << 10, 16 << 10, 64 << 10, 1 << 20
_MIN_FILE_BYTES = 64 << 20  # smaller ones say little of a disk
_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@system_option("weight_dtype")
@system_option("context_length", help="Positions in the KV cache.")
@click.option(
    "--measure/--no-measure",
    default=True,
    help="Measure how fast memory is read, once a machine (5 s a NUMA node, and at "
    "first a minute of compiling).",
)
@click.option("--fresh", is_flag=True, help="Measure again.")
@click.option(
    "--machine-out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the measured machine as JSON, for plans made elsewhere.",
)
@json_option
def doctor(
    model: str | None,
    weight_dtype: str | None,
    context_length: int | None,
    measure: bool,
    fresh: bool,
    machine_out: Path | None,
) -> dict[str, Any]:
    """Say what this machine has, what would be used, and what is wrong.

    With MODEL, which must be on this machine, also what is read of its files and what is not, what
    may change an answer, how many bytes `generate` takes for it here, and whether it fits. Nothing
    is loaded. The exit status is 1 where it does not load, does not fit, or cannot chat. Of systems
    that run meanwhile it says on which NUMA nodes their memory lies.
    """
    from hotcold.actors.protocol.options import SystemOptions
    from hotcold.actors.setup.account import account
    from hotcold.actors.setup.choose import choose_system
    from hotcold.actors.setup.preflight import in_memory, read_model
    from hotcold.jobs.support.doctor_checks import (
        check_machine,
        check_measured,
        check_model,
        check_services,
        check_thresholds,
    )
    from hotcold.jobs.support.model_checks import REFUSED, check_files
    from hotcold.model.files.locate import locate_model
    from hotcold.placement.machine.description import write_machine
    from hotcold.placement.machine.memory_pages import running_services
    from hotcold.placement.machine.survey import survey

    if fresh and not measure:
        raise UsageError("--fresh measures and --no-measure does not; leave one out")
    found = None
    files: list[Finding] = []
    if model is not None:
        path = locate_model(model, may_fetch=False)
        files = check_files(path)
        if any(finding.level == "problem" for finding in files):
            end_with(1)
        if any(finding.subject == REFUSED for finding in files):
            _print_findings("the model's files", files)
            return {"version": hotcold.__version__, "files": list(map(asdict, files))}
        found = path, read_model(path, weight_dtype)
    need = None
    if found is not None:
        options = SystemOptions(context_length=context_length, weight_dtype=weight_dtype)
        need = account(*in_memory(choose_system(*found, options), found[1]))
    machine = survey()
    measured = _measured(measure, fresh)
    if machine_out is not None:
        if measured is None:
            raise UsageError("--machine-out: nothing is measured yet; leave --no-measure out")
        write_machine(machine_out, measured)
    findings = list(check_machine(machine))
    if measured is not None:
        findings.extend(check_measured(measured))
    if need is not None:
        fits = check_model(machine, need)
        findings.append(fits)
        if fits.level == "problem":
            end_with(1)
    if found is not None:
        findings.extend(check_thresholds(*found))
    findings.extend(check_services(running_services(), _systems()))
    disk = {} if found is None or not measure else _disk(found[0])
    if files:
        _print_findings("the model's files", files)
    _print_report(machine, measured, findings, need, disk)
    sizes = None if need is None else {**asdict(need), "total_bytes": need.total_bytes}
    speed = None if measured is None else measured.read_gb_per_s
    return {
        "version": hotcold.__version__,
        "machine": {**asdict(machine), "read_gb_per_s": speed},
        "measured": None if measured is None else measured.as_json(),
        "findings": [asdict(finding) for finding in findings],
        "files": [asdict(finding) for finding in files] if files else None,
        "model": sizes,
        "disk_gb_per_s": {"read_bytes": list(_READ_SIZES), **disk} if disk else None,
    }


def _systems() -> dict[int, str]:
    """The names of this user's running systems by the processes that hold them."""

    from hotcold.jobs.running.registry import listed

    names: dict[int, list[str]] = {}
    with suppress(UsageError):  # a folder that others may write to
        for record in listed():
            names.setdefault(record.pid, []).append(record.name)
    return {pid: ", ".join(held) for pid, held in names.items()}


def _measured(measure: bool, fresh: bool) -> Machine | None:
    from hotcold.placement.machine.sysfs import missing_features, read_cpu
    from hotcold.placement.machine.this_machine import measured_before, this_machine

    if not measure or missing_features(read_cpu(), platform.machine()):
        return measured_before()  # to compile kernels without those features would end the process
    with status_line("looking at this machine") as tell:
        return this_machine(fresh=fresh, on_stage=tell)


def _disk(path: Path) -> dict[str, list[float]]:
    """GB/s of reads of the model's largest file, by how many are under way; {} where it has none.

    Of each of `_READ_SIZES`. Those of a ring are fewer where they are large, as those of neurons.
    """
    from rich.markup import escape

    from hotcold.numba_kernels.storage import NUM_THREADS, RING_DEPTH
    from hotcold.numba_kernels.storage.io_ring import has_rings
    from hotcold.placement.machine.measure_disk import measure_disk

    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    if largest.stat().st_size < _MIN_FILE_BYTES:
        return {}
    rates: dict[str, list[float]] = {"1": [], str(NUM_THREADS): []}
    if has_rings():
        rates[str(RING_DEPTH)] = []  # by one thread
    steps = [(depth, size) for depth in rates for size in _READ_SIZES]
    try:
        with steps_bar(f"reading {escape(largest.name)}", len(steps)) as show:
            for number, (depth, size) in enumerate(steps, 1):
                threads = None if depth == str(RING_DEPTH) else int(depth)
                (rate,) = measure_disk(largest, (size,), threads)
                rates[depth].append(rate / 1e9)
                show(number)
    except OSError as problem:
        raise CheckpointError(
            f"{largest}: cannot be read ({problem.strerror}); --no-measure leaves that out"
        ) from None
    return rates


def _print_report(
    machine: MachineSurvey,
    measured: Machine | None,
    findings: list[Finding],
    need: Account | None,
    disk: dict[str, list[float]],
) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_machine_table(machine))
    if measured is not None:
        console.print(_measured_table(measured))
    if disk:
        console.print(_disk_table(disk))
    if need is not None:
        console.print(_need_table(machine, need))
    _print_findings("checks", findings)


def _print_findings(title: str, findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape

    table = _table(title)
    for finding in findings:
        table.add_row(finding.subject, f"{_MARKS[finding.level]}  {escape(plain(finding.text))}")
    Console(highlight=False).print(table)


def _machine_table(machine: MachineSurvey) -> Table:
    table = _table("this machine")
    table.add_row("processor", f"{machine.cpu_name}, {len(machine.cores)} logical cores usable")
    table.add_row("features", " ".join(machine.cpu_features) or "none that matter here")
    for node in machine.numa_nodes:
        text = f"{len(node.cores)} cores, {size_text(node.total_bytes)} of memory"
        table.add_row(f"NUMA node {node.node_id}", text)
    table.add_row("memory", f"{size_text(machine.available_bytes)} available to new programs")
    for gpu in machine.gpus:
        text = f"{gpu.name}, {size_text(gpu.free_bytes)} of {size_text(gpu.total_bytes)} free"
        table.add_row(f"GPU {gpu.device_id}", text)
    if not machine.gpus:
        table.add_row("GPU", f"none: {machine.no_gpu_reason}")
    return table


def _measured_table(measured: Machine) -> Table:
    table = _table(f"measured on {measured.date}")
    for node in measured.nodes:
        text = (
            f"{node.read_gb_per_s:.1f} GB/s in sequence, {node.rows_gb_per_s:.1f} rows x vector, "
            f"{node.gather_gb_per_s:.1f} sparse FFN; {node.num_cores} cores"
        )
        table.add_row(f"{node.name} reads", text)
    table.add_row("exchange", f"{measured.exchange_us:.0f} µs to ask a service and be answered")
    for gpu in measured.gpus:
        text = f"{gpu.read_gb_per_s:.0f} GB/s, {gpu.link_gb_per_s:.1f} from the host"
        table.add_row(f"{gpu.name} reads", text if gpu.measured else f"{text} (assumed)")
    return table


def _disk_table(disk: dict[str, list[float]]) -> Table:
    """What neurons on storage could be read with; a file that the host keeps reads faster."""
    table = _table("the model's disk, random reads")
    for depth, rates in disk.items():
        parts = [
            f"{rate:.2f} GB/s of {size >> 10} KiB"
            for size, rate in zip(_READ_SIZES, rates, strict=True)
        ]
        table.add_row(f"{depth} at a time", ", ".join(parts))
    return table


def _need_table(machine: MachineSurvey, need: Account) -> Table:
    table = _table("the model in memory")
    for name, num_bytes in asdict(need).items():
        table.add_row(name.removesuffix("_bytes").replace("_", " "), size_text(num_bytes))
    table.add_row(
        "all",
        f"{size_text(need.total_bytes)}, {size_text(machine.available_bytes)} available",
    )
    return table


def _table(title: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    return table
