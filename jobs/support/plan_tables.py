"""A placement plan for people, as tables, and for programs, as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hotcold.model.byte_sizes import size_text
from hotcold.placement.plan import PlacementPlan

_CONTENTS = {
    "attention": "attention",
    "kv_cache": "KV cache",
    "head": "head",
    "predictors": "predictors",
    "neurons": "FFN neurons",
}
_SIZES = {
    "used_bytes": "used",
    "left_bytes": "left of the budget",
    "budget_bytes": "budget",
    "free_bytes": "free on the device now",
}


def print_plan(plan: PlacementPlan, path: Path | None, about: str) -> None:
    """Print the placement, the cost of each part, the expected speed and its assumptions.

    `about`: what to know of the file, or why there is none.
    """
    console = Console(highlight=False)
    report = plan.report
    console.print(_device_table(report["devices"]))
    console.print(_part_table(report))
    ms = report["token_s"] * 1e3
    print(f"expect {report['tokens_per_s']:.3g} tokens/s ({ms:.3g} ms a token)")
    gap, seconds = max(1e-4, report["solver"]["gap"]), report["solver"]["seconds"]
    print(f"solved, optimal within {gap:.2%} in {seconds:.1f} s")
    for text in report["assumed"]:
        print(f"assumed: {text}")
    print(f"no plan file: {about}" if path is None else f"plan: {path} ({about})")


def plan_json(plan: PlacementPlan, path: Path | None) -> dict[str, Any]:
    """The command's JSON; `seconds` are the solver's, `bytes` of a device are by content."""
    report = plan.report
    return {
        **{name: report[name] for name in ("devices", "parts", "token_s", "tokens_per_s")},
        **{name: report["solver"][name] for name in ("seconds", "gap")},
        "assumed": report["assumed"],
        "path": None if path is None else str(path),
    }


def _device_table(devices: list[dict[str, Any]]) -> Table:
    table = _table("what lies where")
    table.add_column("")
    for device in devices:
        table.add_column(device["name"], justify="right")
    for name, label in _CONTENTS.items():
        table.add_row(label, *(_size(device["bytes"][name]) for device in devices))
    for name, label in _SIZES.items():
        table.add_row(label, *(_size(device[name]) for device in devices))
    table.add_row(
        "attention layers", *(str(device["attention_layers"] or "–") for device in devices)
    )
    table.add_row("neurons", *(str(device["neurons"]) for device in devices))
    table.add_row("of active neurons", *(f"{device['active_share']:.1%}" for device in devices))
    return table


def _part_table(report: dict[str, Any]) -> Table:
    table = _table("what a token costs")
    table.add_column("part")
    for name in ("read", "GB/s", "ms"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    for part in report["parts"]:
        name = f"{part['count']} {part['name']}"
        if part["where"] != "all":
            name = f"{part['name']} on {part['where']}"
            name += f", {part['count']} layers" if part["name"] != "head" else ""
        speed = f"{part['gb_per_s']:.3g}" if part["bytes_per_token"] else ""
        read = _size(part["bytes_per_token"]) if part["bytes_per_token"] else ""
        table.add_row(name, read, speed, f"{part['ms']:.3g}", part["why"])
        if part["name"] == "neurons":
            for device in report["devices"]:
                read = _size(device["neuron_bytes_per_token"])
                row = (f"  {device['name']}", read, "", f"{device['neuron_ms']:.3g}")
                table.add_row(*row, "at the same time", style="dim")
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))


def _size(num_bytes: float) -> str:
    return size_text(num_bytes) if num_bytes else "–"
