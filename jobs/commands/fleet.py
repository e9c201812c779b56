"""`hotcold fleet`: many systems behind one door, on Ray Serve."""

from __future__ import annotations

import importlib.util
import logging
import math
import string
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotcold.jobs.commands.serve import check_keys
from hotcold.jobs.support.extras import require_extra, require_known_gradio
from hotcold.jobs.support.listening import listen
from hotcold.jobs.support.options import DURATION, split_system_options, system_options
from hotcold.jobs.support.settings import GroupedCommand, ModelsArgument
from hotcold.jobs.support.signals import Signals
from hotcold.model.errors import HotcoldError, ServiceError
from hotcold.model.secret_variable import API_KEY

if TYPE_CHECKING:
    from hotcold.ui.fleet.arguments import FleetArgs

_STORE_BYTES = 200_000_000  # of a pod's object store
_GROUPS = "    workerGroupSpecs:\n"
_USABLE = 0.95  # of its memory, before Ray's monitor ends processes


@click.command(cls=GroupedCommand)
@click.argument("model", cls=ModelsArgument)
@click.option(
    "--replicas", type=click.IntRange(0), default=1,
    help="Systems of each model; 0: one is loaded with its model's first request, and where memory "
    "is short, that of the least recently used model is unloaded.",
)  # fmt: skip
@click.option(
    "--nnodes", type=click.IntRange(1), default=1,
    help="Nodes of each system, which share its CPU services; attention is on the first.",
)  # fmt: skip
@click.option(
    "--max-replicas",
    type=click.IntRange(1),
    help="As many where requests wait; --replicas without it.",
)
@click.option(
    "--stay", "stay_s", type=DURATION, default=-1,
    help="With --replicas 0: unload a model so long after its last answer; -1: where memory is "
    "short.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", help="Address to listen at, on each node.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, help="Port to listen at.")
@click.option(
    "--api-key", "keys", multiple=True, envvar=API_KEY,
    help="What clients must send; may be given several times. Better in HOTCOLD_API_KEY.",
)  # fmt: skip
@click.option(
    "--queue", "max_queue", type=click.IntRange(0, 100_000), default=64,
    help="Requests of a model that may wait; others are refused with status 429.",
)  # fmt: skip
@click.option(
    "--drain", "drain_s", type=click.FloatRange(0), default=60.0,
    help="Seconds in which a system that is to end goes on; another one then takes over.",
)  # fmt: skip
@click.option("--no-page", is_flag=True, help="Only the API, without the chat page.")
@click.option(
    "--write", type=click.Path(path_type=Path, dir_okay=False),
    help="Write a file for `serve run` and `serve deploy`, and start nothing.",
)  # fmt: skip
@click.option(
    "--kuberay", is_flag=True,
    help="With --write: a RayService for `kubectl apply`, whose pods have what the plans say.",
)  # fmt: skip
@system_options
def fleet(
    model: tuple[str, ...],
    replicas: int,
    nnodes: int,
    max_replicas: int | None,
    stay_s: float,
    host: str,
    port: int,
    keys: tuple[str, ...],
    max_queue: int,
    drain_s: float,
    no_page: bool,
    write: Path | None,
    kuberay: bool,
    **values: Any,
) -> None:
    """Serve MODELs (the embedded demo model without one), or all in a folder, by several systems
    of each.

    They run in the Ray cluster of RAY_ADDRESS, else on this machine.
    """
    require_extra("fleet", "fleet")
    if not no_page and importlib.util.find_spec("gradio") is not None:
        require_known_gradio()
    from hotcold.ui.fleet.arguments import FleetArgs, flags_of
    from hotcold.ui.fleet.models import models_in

    args = FleetArgs(
        models=list(models_in(model)),
        replicas=replicas,
        nnodes=nnodes,
        max_replicas=max_replicas,
        stay=stay_s,
        options=flags_of(split_system_options(values)),
        queue=max_queue,
        drain=drain_s,
        page=not no_page,
    )
    _ = args.system  # its errors
    if write is not None:
        ways = "`kubectl apply -f {0}`" if kuberay else "`serve run {0}` or `serve deploy {0}`"
        write.write_text(_ray_service(args) if kuberay else _config_file(args, host, port))
        click.echo(f"wrote {write}; {ways.format(write)} runs it")
        return
    from hotcold.ui.gate import is_loopback

    check_keys(host, keys, is_loopback(host))
    _run(args, host, port, keys)


def _ray_service(args: FleetArgs) -> str:
    """A manifest for KubeRay: a pod for each node of a system, of the memory of the largest.

    Errors:  HotcoldError
    """
    from importlib.resources import files

    from ray import __version__

    from hotcold.ui.fleet.models import fleet_models

    threads = args.system.num_threads  # as many in a pod as are written here
    args = args.model_copy(update={"options": {**args.options, "threads": threads}})
    models = fleet_models(args.models, args.system)
    bundles = [model.bundle for model in models]
    num_bytes = (max(one["memory"] for one in bundles) + _STORE_BYTES) / _USABLE
    resources = f'cpu: "{bundles[0]["CPU"]:.0f}", memory: {math.ceil(num_bytes / (1 << 30))}Gi'
    folders = [one.parent for one in map(Path, args.models) if one.is_absolute()]
    num_gpus = int("GPU" in bundles[0])  # of a system: on its first node
    groups = {
        "gpu": (num_gpus, resources + ', nvidia.com/gpu: "1"'),
        "cpu": (args.nnodes - num_gpus, resources),
    }
    head, pods = (files("hotcold.ui.fleet") / "ray_service.yaml").read_text().split(_GROUPS)
    values = {
        "config": _config_file(args, "0.0.0.0", 8000).replace("\n", "\n    ").rstrip(),
        "version": __version__,
        "folder": folders[0] if folders else "/models",
        "store": _STORE_BYTES,
    }
    return string.Template(head + _GROUPS).substitute(values) + "".join(
        string.Template(pods).substitute(
            values,
            name=name,
            least=args.replicas * number * len(models),
            most=max(args.replicas, args.max_replicas or 1) * number * len(models),
            resources=needs,
        )
        for name, (number, needs) in groups.items()
        if number
    )


def _config_file(args: FleetArgs, host: str, port: int) -> str:
    """A file of Serve's; keys are not in it."""
    import yaml

    from hotcold.ui.fleet.application import IMPORT_PATH, NAME

    one = {
        "name": NAME,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": args.model_dump(exclude_defaults=True),
    }
    values = {"http_options": {"host": host, "port": port}, "applications": [one]}
    lines = [
        "# Clients' keys are read from HOTCOLD_API_KEY, with blanks between them:",
        "# runtime_env: {env_vars: {HOTCOLD_API_KEY: ...}} of the application.",
        yaml.safe_dump(values, sort_keys=False),
    ]
    return "\n".join(lines)


def _run(args: FleetArgs, host: str, port: int, keys: tuple[str, ...]) -> None:
    """Serve until a signal comes; running requests are finished then.

    Errors:  HotcoldError
    """
    import ray

    from hotcold.actors.processes.cluster import connect, in_cluster
    from hotcold.actors.system import start_ray
    from hotcold.jobs.running.served import model_plans

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    listen(host, port).close()  # says who has it
    with Signals() as signals:
        if in_cluster():
            connect()
        else:
            plans = model_plans(args.models, args.system)
            most = max(args.replicas, args.max_replicas or 1)
            start_ray([plan.system for plan in plans for _ in range(most)])
        try:
            from ray import serve

            from hotcold.ui.fleet.application import NAME, application

            if args.replicas:
                click.echo("loading; the door opens once each model has a system", err=True)
            serve.start(http_options={"host": host, "port": port})
            try:
                serve.run(application(args, keys), name=NAME)
            except HotcoldError:
                raise
            except Exception as error:  # Serve raises many kinds, none of them its own
                raise ServiceError(f"the fleet could not be started: {error}") from error
            click.echo(f"hotcold serves at http://{host}:{port} (API: http://{host}:{port}/v1)")
            sys.stdout.flush()
            signals.wait()
            click.echo("finishing running requests", err=True)
        finally:
            with suppress(Exception):
                serve.delete(NAME)
                if not in_cluster():
                    serve.shutdown()
            ray.shutdown()
