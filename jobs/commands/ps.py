"""`hotcold ps`: which systems run on this machine."""

from __future__ import annotations

from typing import Any

import click

from hotcold.jobs.running import registry
from hotcold.jobs.running.client import SILENT, Client
from hotcold.jobs.support.console import json_option, wants_json
from hotcold.model.byte_sizes import binary_text
from hotcold.model.errors import HotcoldError

_HEADS = ("NAME", "MODEL", "MODE", "MEMORY", "TOKENS/S", "IDLE", "STAYS", "AT")


@click.command()
@json_option
def ps() -> dict[str, Any]:
    """List the running systems of this user: those that are kept, and those of `hotcold serve`.

    MEMORY is that of all their processes, TOKENS/S of the last answer; IDLE is the time since the
    last request, STAYS how long a system goes on if no other comes, AT where one is served.
    """
    found = [_state(record) for record in registry.listed()]
    if found or not wants_json():
        rows = [_HEADS, *(_row(state) for state in found)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            click.echo("  ".join(cells).rstrip())
    return {"systems": found}


def _state(record: registry.Record) -> dict[str, Any]:
    """A system's own state, or that it does not answer."""
    known = {
        "name": record.name,
        "pid": record.pid,
        "model": record.model,
        "url": record.url,
        "kept": record.is_kept,
    }
    try:
        return {**known, **Client(record).state(memory="true")}
    except HotcoldError:  # it ends, or is of another version
        return {**known, "status": SILENT}


def _row(state: dict[str, Any]) -> tuple[str, ...]:
    name, model = state["name"], state["model"]
    if state["status"] != "ready":
        return (name, model, state["status"], "", "", "", "", state["url"])
    left_s = state["left_s"]
    until = "until stopped" if left_s is None else f"{_time(left_s)} more"
    busy = "busy" if state["num_active"] else _time(state["idle_s"])
    memory = binary_text(state["memory_bytes"])
    speed = f"{state['tokens_per_s']:.1f}" if state["tokens_per_s"] else "-"
    return (name, model, state["mode"], memory, speed, busy, until, state["url"])


def _time(seconds: float) -> str:
    """A duration for people."""
    for unit_s, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"
