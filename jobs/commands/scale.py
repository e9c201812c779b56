"""`hotcold scale`: another number of CPU services for a running system."""

from typing import Any

import click

from hotcold.jobs.support.console import json_option, print_json


@click.command()
@click.option("--cpu-actors", type=click.IntRange(min=1), required=True, help="CPU services.")
@click.option("--system", "name", help="The system's name; the only running one without it.")
@json_option
def scale(cpu_actors: int, name: str | None, as_json: bool) -> None:
    """Change how many CPU services a running system has; its requests go on.

    The system's threads are assigned again, and neurons move. Where the new services cannot be
    loaded the old ones go on.
    """
    from hotcold.actors.processes.cluster import connect
    from hotcold.actors.system import System
    from hotcold.model.errors import UsageError

    connect("auto")
    name = name or _only_system()
    system = System.attach(name)
    if system is None:
        raise UsageError(f"no system named {name!r} is running; see `ray list actors`")
    before = system.call("describe")
    after: Any = system.call("scale", cpu_actors)
    click.echo(
        f"the system {name!r} has {after.num_cpu_actors} CPU services of {after.num_threads} "
        f"threads together; it had {before.num_cpu_actors}"
    )
    if as_json:
        print_json(
            {
                "system": name,
                "num_cpu_actors": after.num_cpu_actors,
                "num_cpu_actors_before": before.num_cpu_actors,
                "num_threads": after.num_threads,
            }
        )


def _only_system() -> str:
    import ray

    from hotcold.model.errors import UsageError

    names = sorted(ray.util.list_named_actors())
    if len(names) == 1:
        return str(names[0])
    found = ", ".join(names) or "none"
    raise UsageError(f"which system is meant? name it with --system; running: {found}")
