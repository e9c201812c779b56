"""End a system that a job has left running.

ray job submit --working-dir . -- python -m hotcold.jobs.stop --system NAME
"""

import hotcold.jobs.foreign_folder  # noqa: F401

# isort: split
import time

import click

from hotcold.actors.processes.cluster import connect
from hotcold.actors.system import System
from hotcold.jobs.cli import run
from hotcold.model.errors import ServiceError, UsageError

_TIMEOUT_S = 30.0


@click.command()
@click.option("--system", "name", required=True, help="The name that it was started with.")
def stop(name: str) -> None:
    """End the running system of a name; requests in progress fail."""
    connect("auto")
    system = System.attach(name)
    if system is None:
        raise UsageError(f"no system named {name!r} is running; see `ray list actors`")
    system.end()
    deadline = time.monotonic() + _TIMEOUT_S
    while System.attach(name) is not None:
        if time.monotonic() > deadline:
            raise ServiceError(f"the system {name!r} does not end; see `ray list actors`")
        time.sleep(0.05)
    click.echo(f"the system {name!r} has ended")


if __name__ == "__main__":
    run(command=stop, program="python -m hotcold.jobs.stop")
