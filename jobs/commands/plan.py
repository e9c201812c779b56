"""`hotcold plan`: which neurons, layers and caches go to which device, and what speed to expect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from actors.protocol.messages import MODES
from jobs.support.console import json_option, print_json, stderr_console
from jobs.support.options import Bytes, split_system_options
from jobs.support.weight_dtype import dtype_option

if TYPE_CHECKING:
    from actors.protocol.messages import SystemConfig
    from actors.setup.preflight import SystemOptions
    from model.config.model_config import ModelConfig
    from model.files.artifact import ModelIdentity
    from placement.machine.description import Machine
    from placement.plan import PlacementPlan
    from placement.profile import ActivationProfile

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("model", required=False)
@click.option("--mode", type=click.Choice(MODES), help="Which neurons to compute, as of generate.")
@click.option("--predictors", type=_FILE, help="Predictors of --mode sign and lowrank.")
@dtype_option
@click.option("--gpu-memory", "gpu_memory_bytes", type=Bytes(), help="VRAM to use of each GPU.")
@click.option("--cpu-memory", "cpu_memory_bytes", type=Bytes(), help="Memory to use, like 8GiB.")
@click.option("--context", "context_length", type=int, help="Positions in the KV cache.")
@click.option("--kv-dtype", type=click.Choice(["float16", "float32"]), help="KV cache format.")
@click.option("--cpu-actors", "num_cpu_actors", type=int, help="CPU services; one a NUMA node.")
@click.option("--threads", "num_threads", type=int, help="Cores to use; all without it.")
@click.option("--machine", "machine_file", type=_FILE, help="Plan for the machine described there.")
@click.option("--profile", "profile_file", type=_FILE, help="How often neurons fire.")
@click.option("--out", type=_FILE, help="Where to write the plan; beside the model without it.")
@click.option(
    "--time-limit",
    "time_limit_s",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    help="Seconds that the solver may take.",
)
@json_option
def plan(
    model: str | None,
    machine_file: Path | None,
    profile_file: Path | None,
    out: Path | None,
    time_limit_s: float,
    as_json: bool,
    **values: Any,
) -> None:
    """Decide where each neuron, attention layer and cache, and the head, of MODEL goes.

    Frequent neurons go to the GPU as far as bytes allow, rare ones to the CPU in equal work. The
    plan is written beside the model; one for another machine (--machine) only with --out.
    """
    from actors.setup.preflight import read_model
    from jobs.support.plan_tables import plan_json, print_plan
    from model.files.artifact import ModelIdentity
    from model.files.locate import locate_model
    from placement.plan import plan_path, write_plan

    path = locate_model(model)
    options = split_system_options(values)
    config = read_model(path, options.weight_dtype)
    console = stderr_console()
    with console.status("looking at this machine") as status:
        machine = _machine(machine_file, status.update)
        system = _choose(path, config, options, machine if machine_file else None)
        identity = ModelIdentity.of(path)
        profile = _profile(path, profile_file, identity, config)
        status.update(f"placing neurons, at most {time_limit_s:g} s")
        found = _make_plan(path, config, system, options, machine, profile, time_limit_s)
    if profile is None:
        console.print("no profile: every neuron counts as always firing (see `hotcold profile`)")
    if out is None and machine_file is None:
        out = plan_path(path, found.request)
    if out is not None:
        write_plan(out, identity, found)
    print_plan(found, out)
    if as_json:
        print_json(plan_json(found, out))


def _make_plan(
    path: Path,
    config: ModelConfig,
    system: SystemConfig,
    options: SystemOptions,
    machine: Machine,
    profile: ActivationProfile | None,
    time_limit_s: float,
) -> PlacementPlan:
    from actors.setup.placement_choice import plan_request, predictor_cost
    from actors.setup.preflight import system_need
    from model.files.artifact import ModelIdentity
    from placement.planner import make_plan

    budgets = options.gpu_memory_bytes, options.cpu_memory_bytes
    need = system_need(system, config)
    return make_plan(
        config,
        machine,
        profile,
        plan_request(system, *budgets, machine.digest, profile),
        predictor=predictor_cost(system, ModelIdentity.of(path), config),
        host_reserve_bytes=need.process_bytes + need.arena_bytes,
        time_limit_s=time_limit_s,
    )


def _machine(file: Path | None, on_stage: Callable[[str], None]) -> Machine:
    from placement.machine.description import read_machine
    from placement.machine.this_machine import this_machine

    return this_machine(on_stage=on_stage) if file is None else read_machine(file)


def _choose(
    path: Path, config: ModelConfig, options: SystemOptions, described: Machine | None
) -> SystemConfig:
    """The system that is planned for; cores and nodes are those of the `described` machine.

    Errors:  UsageError
    """
    from actors.setup.preflight import choose_system
    from model.errors import UsageError

    # Planned for, not used by this process.
    options = replace(options, gpu_memory_bytes=None, device="cpu")
    if described is None:
        return choose_system(path, config, options)
    cores = sum(node.num_cores for node in described.nodes)
    num_threads = cores if options.num_threads is None else options.num_threads
    if not 1 <= num_threads <= cores:
        raise UsageError(f"--threads is {num_threads}; the machine has 1 to {cores}")
    num_actors = options.num_cpu_actors
    if num_actors is None:
        num_actors = min(len(described.nodes), num_threads)
    if not 1 <= num_actors <= num_threads:
        raise UsageError(f"--cpu-actors is {num_actors}; give a number from 1 to {num_threads}")
    here = choose_system(path, config, replace(options, num_threads=None, num_cpu_actors=None))
    return replace(here, num_threads=num_threads, num_cpu_actors=num_actors)


def _profile(
    path: Path, file: Path | None, identity: ModelIdentity, config: ModelConfig
) -> ActivationProfile | None:
    """The profile that was named, else the model's own if it has one."""
    from actors.setup.placement_choice import own_profile
    from placement.profile import read_profile

    return (
        own_profile(path, identity, config)
        if file is None
        else read_profile(file, identity, config)
    )
