"""`hotcold scale`: another number of CPU services for a running system."""

from __future__ import annotations

import os
from typing import Any

import click

from hotcold.jobs.running import registry
from hotcold.jobs.running.client import Client
from hotcold.jobs.support.console import json_option
from hotcold.model.errors import ServiceError, UsageError


@click.command()
@click.argument("name", required=False)
@click.option("--cpu-actors", type=click.IntRange(min=1), required=True, help="CPU services.")
@json_option
def scale(name: str | None, cpu_actors: int) -> dict[str, Any]:
    """Change how many CPU services the running system NAME has; its requests go on.

    NAME is as `hotcold ps` lists it, or in the Ray cluster of this machine or of RAY_ADDRESS; the
    only one that runs without it. The system's threads are assigned again, and neurons move. Where
    the new services cannot be loaded the old ones go on.
    """
    listed = _listed(name)
    if listed is not None:
        name, found = listed.record.name, listed.scale(cpu_actors)
    else:
        name, found = _scale_in_cluster(name, cpu_actors)
    count = found["num_cpu_actors"]
    click.echo(
        f"the system {name!r} has {count} CPU service{'' if count == 1 else 's'} of "
        f"{found['num_threads']} threads together; it had {found['num_cpu_actors_before']}"
    )
    return {"system": name, **found}


def _listed(name: str | None) -> Client | None:
    """The system of that name, or the only one, of `hotcold ps`; None: a cluster's is meant.

    Errors:  UsageError where several are listed and none is named
    """
    running = registry.listed()
    if name is not None:
        return next((Client(one) for one in running if one.name == name), None)
    if not running or os.environ.get("RAY_ADDRESS"):
        return None
    if len(running) > 1:
        raise UsageError(_which(sorted(one.name for one in running)))
    return Client(running[0])


def _scale_in_cluster(name: str | None, num_cpu_actors: int) -> tuple[str, dict[str, int]]:
    """Change a system of a Ray cluster; its name, and what `Client.scale` returns.

    Errors:  HotcoldError
    """
    from hotcold.actors.processes.cluster import connect
    from hotcold.actors.system import System

    try:
        connect("auto")
    except ServiceError:
        if os.environ.get("RAY_ADDRESS"):
            raise
        if name is None:
            raise UsageError("no system is running; `hotcold serve` or --keep starts one") from None
        registry.named(name, registry.listed())  # raises: it is not listed
        raise
    name = _only_system() if name is None else name
    system = System.attach(name)
    if system is None:
        raise UsageError(
            f"no system named {name!r} is running; see `hotcold ps` and `ray list actors`"
        )
    before: Any = system.call("describe")
    after: Any = system.call("scale", num_cpu_actors)
    return name, {
        "num_cpu_actors": after.num_cpu_actors,
        "num_cpu_actors_before": before.num_cpu_actors,
        "num_threads": after.num_threads,
    }


def _only_system() -> str:
    import ray

    names = sorted(ray.util.list_named_actors())
    if len(names) == 1:
        return str(names[0])
    raise UsageError(_which(names))


def _which(names: list[str]) -> str:
    found = ", ".join(names) or "none"
    return f"which system is meant? Name it; running: {found}"
