"""`hotcold top`: a running system, each second anew."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

import click

from hotcold.jobs.running.client import Client
from hotcold.jobs.running.registry import listed, named
from hotcold.jobs.support.console import json_option, wants_json
from hotcold.model.errors import UsageError

_COUNT_S = 1.0  # for services to answer and count before a single picture


@click.command()
@click.argument("name", required=False)
@click.option("--once", is_flag=True, help="Print one picture and end.")
@json_option
def top(name: str | None, once: bool) -> dict[str, Any] | None:
    """Watch the running system NAME (see `hotcold ps`); the only one without it. q ends.

    FIRE is the share of a layer's neurons that were computed for a token, of late and on average,
    GATES that of their gates, HOT that of those on a GPU, which are not counted. BUSY is a
    service's share of a step's time.
    """
    system, as_json = _chosen(name), wants_json()
    is_seen = sys.stdout is not None and sys.stdout.isatty()
    if is_seen and not (once or as_json) and sys.stdin is not None and sys.stdin.isatty():
        from hotcold.jobs.top_watch import watch

        watch(system)
        return None
    found = system.telemetry()
    if _is_first(found):
        time.sleep(_COUNT_S)
        found = system.telemetry()
    if not as_json or once:
        from hotcold.jobs.top_picture import drawn, picture

        width = shutil.get_terminal_size().columns
        click.echo(drawn(picture(system.record.name, found, width), width, is_seen))
    return found


def _is_first(found: dict[str, Any]) -> bool:
    """Whether this is the first poll: services have not answered, and count from now on."""
    is_unknown = any(one["state"] == "alive" and not one["pid"] for one in found["actors"])
    return is_unknown or (found["running"] and not found["map"]["steps"])


def _chosen(name: str | None) -> Client:
    """The system of that name. Errors: UsageError."""
    running = listed()
    if name is not None:
        return Client(named(name, running))
    if len(running) == 1:
        return Client(running[0])
    if running:
        names = ", ".join(record.name for record in running)
        raise UsageError(f"several systems run: {names}; name one, as in `hotcold top NAME`")
    raise UsageError("no system is running; `hotcold serve` or --keep starts one")
