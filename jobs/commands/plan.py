"""`hotcold plan`: which neurons, layers and caches go to which device, and what speed to expect."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotcold.actors.protocol.messages import MODES
from hotcold.actors.protocol.options import QUANTIZED
from hotcold.jobs.profile.files import require_plot
from hotcold.jobs.support.console import json_option, print_json, status_line
from hotcold.jobs.support.extras import require_extra
from hotcold.jobs.support.options import split_system_options, system_option
from hotcold.jobs.support.settings import GroupedCommand
from hotcold.model.errors import ArtifactError, MemoryBudgetError, UsageError
from hotcold.model.files.artifact_places import ARTIFACTS, place_to_write
from hotcold.model.files.locate import resolved_model

if TYPE_CHECKING:
    from hotcold.actors.protocol.messages import SystemConfig
    from hotcold.actors.setup.preflight import SystemOptions
    from hotcold.jobs.support.planned_model import PlannedModel
    from hotcold.placement.machine.description import Machine
    from hotcold.placement.plan import PlacementPlan
    from hotcold.placement.profile import ActivationProfile

_PLOTTED = 17  # sizes of memory in a plot
_ROOMY = 1 << 50  # bytes of a node in which every model fits
_FILE = click.Path(path_type=Path, dir_okay=False)
_LOADS_WITHOUT = (
    "where no neuron is chosen first, down projections stay as the file has them, and services "
    "hold runs of neurons; with --out they are by neurons, for a system whose --plan names that "
    "file"
)
_LOADS_BY_IT = f"systems of these options load by it; another place: --out or {ARTIFACTS}"


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@system_option("mode", type=click.Choice(MODES), help="Which neurons to compute, as of generate.")
@system_option("predictors", type=_FILE, help="Predictors of --mode sign and lowrank.")
@system_option("weight_dtype")
@system_option("gpu_memory_bytes", help="VRAM to use of each GPU.")
@system_option("cpu_memory_bytes", help="Memory to use, like 8GiB.")
@system_option("context_length", help="Positions in the KV cache.")
@system_option("kv_dtype")
@system_option("num_cpu_actors", help="CPU services; one a NUMA node.")
@system_option("num_threads")
@system_option("draft", help="What drafts tokens, as of generate.")
@click.option("--machine", "machine_file", type=_FILE, help="Plan for the machine described there.")
@click.option("--profile", "profile_file", type=_FILE, help="How often neurons fire.")
@click.option("--shape", help="Plan for a named shape, as of make-model, without any weights.")
@click.option("--config", "config_source", help="Plan for a config.json, or org/repo's, alone.")
@click.option("--density", type=float, help="Share of neurons that fire, for --shape and --config.")
@click.option("--out", type=_FILE, help="Where to write the plan; beside the model without it.")
@click.option("--plot", type=_FILE, help="Draw speed by --cpu-memory, where neurons are stored.")
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
    shape: str | None,
    config_source: str | None,
    density: float | None,
    out: Path | None,
    plot: Path | None,
    time_limit_s: float,
    as_json: bool,
    **values: Any,
) -> None:
    """Decide where each neuron, attention layer and cache, and the head, of MODEL goes.

    Frequent neurons go to the GPU as far as bytes allow, rare ones to the CPU in equal work. The
    plan is written beside the model, where systems of these options find it; one for another
    machine (--machine) only with --out. --shape and --config say what a model that is not here
    would need, and how fast it would be.
    """
    from hotcold.jobs.support.plan_tables import plan_json, print_plan
    from hotcold.jobs.support.planned_model import planned_model, planned_profile
    from hotcold.placement.plan import plan_path, write_plan

    require_extra("plan", "plan")
    if plot is not None:
        require_plot(plot)
    options = split_system_options(values)
    found = planned_model(model, shape, config_source, options.weight_dtype)
    if found.path is None and out is not None:
        raise UsageError("--out writes a plan to load by, of a model that is here; leave it out")
    with status_line("looking at this machine") as tell:
        profile = planned_profile(found, profile_file, density)
        machine = _machine(machine_file, tell)
        described = machine if machine_file else None
        tell(f"placing neurons, at most {time_limit_s:g} s", is_brief=True)
        try:
            made, system = _make_plan(
                found, options, machine, described, profile, time_limit_s, out is not None
            )
        except MemoryBudgetError as problem:
            if found.path is not None and _plans_storage(
                found, options, machine, profile, as_json, plot
            ):
                return
            fits = _fitting_dtype(found, options, machine, described, profile)
            raise MemoryBudgetError(f"{problem}{fits}") from None
    if plot is not None:
        raise UsageError(
            "--plot draws what neurons on storage cost, and all of this model fits; give less "
            "--cpu-memory"
        )
    about = "give --out" if found.path else "the model's weights are not here"
    if out is not None:
        write_plan(out, found.identity, made)
        about = "to load by it give --plan"
    elif system.down_transposed:
        about = _LOADS_WITHOUT
    elif machine_file is None and found.path is not None:
        own = place_to_write(found.path, plan_path(found.path, made.request))
        try:
            write_plan(own, found.identity, made)
            out, about = own, _LOADS_BY_IT
        except ArtifactError as problem:  # as in a folder of others
            about = str(problem)
    print_plan(made, out, about)
    if as_json:
        print_json(plan_json(made, out))


def _plans_storage(
    model: PlannedModel,
    options: SystemOptions,
    machine: Machine,
    profile: ActivationProfile | None,
    as_json: bool,
    plot: Path | None,
) -> bool:
    """Say what stays in memory of a model that is here and does not fit; whether that can be done.

    Errors:  MemoryBudgetError naming the least that would do
    """
    from hotcold.jobs.profile.plot import plot_offload
    from hotcold.jobs.support.offload_plan import offload_plans, offload_text

    assert model.path is not None
    roomy = replace(machine, nodes=tuple(replace(n, free_bytes=_ROOMY) for n in machine.nodes))
    with_all = replace(options, cpu_memory_bytes=None)
    whole, _ = _make_plan(model, with_all, roomy, None, profile, time_limit_s=1.0)
    memory_s = float(whole.report["token_s"])
    head_s = sum(part["ms"] for part in whole.report["parts"] if part["name"] == "head") / 1e3
    plans = offload_plans(model.path, options, profile, memory_s, head_s=head_s)
    if plans:
        click.echo(offload_text(plans))
    if plans and plot is not None:
        more = offload_plans(model.path, options, profile, memory_s, _PLOTTED, head_s)
        plot_offload(plot, more, resolved_model(model.path).name)
        click.echo(f"drew {plot}")
    if plans and as_json:
        print_json({"storage": [asdict(plan) for plan in plans]})
    return bool(plans)


def _make_plan(
    model: PlannedModel,
    options: SystemOptions,
    machine: Machine,
    described: Machine | None,
    profile: ActivationProfile | None,
    time_limit_s: float,
    has_plan: bool = False,
) -> tuple[PlacementPlan, SystemConfig]:
    """A plan, and the system that it is of; `has_plan`: --plan will name it."""
    from hotcold.actors.setup.memory_needs import system_need
    from hotcold.actors.setup.placement_choice import plan_request
    from hotcold.jobs.support.planned_model import (
        planned_in_memory,
        planned_predictors,
        planned_system,
    )
    from hotcold.placement.planner import make_plan

    budgets = options.gpu_memory_bytes, options.cpu_memory_bytes
    experts = model.config.experts
    if experts is not None and experts.has_predictors:  # they run on the CPU only
        placed_on = replace(machine, gpus=())
    else:
        placed_on = machine
    uses_gpu = bool(placed_on.gpus) and options.gpu_memory_bytes != 0
    planned = planned_system(model, options, described)
    system, config = planned_in_memory(model, planned, uses_gpu, has_plan)
    need = system_need(planned, config)
    made = make_plan(
        config,
        placed_on,
        profile,
        plan_request(system, *budgets, machine.digest, profile),
        predictor=planned_predictors(model, system),
        host_reserve_bytes=need.process_bytes + need.arena_bytes + need.draft_bytes,
        time_limit_s=time_limit_s,
    )
    return made, system


def _fitting_dtype(
    model: PlannedModel,
    options: SystemOptions,
    machine: Machine,
    described: Machine | None,
    profile: ActivationProfile | None,
) -> str:
    """What to add to the error of a model that is not here: the most precise --dtype that fits."""
    from hotcold.model.config.weight_formats import loaded_config

    if model.path is not None or options.weight_dtype is not None:
        return ""
    for dtype in QUANTIZED:
        with suppress(MemoryBudgetError, UsageError):
            smaller = replace(model, config=loaded_config(model.config, dtype))
            chosen = replace(options, weight_dtype=dtype)
            _make_plan(smaller, chosen, machine, described, profile, time_limit_s=1.0)
            return f", or --dtype {dtype}, which fits"
    return ""


def _machine(file: Path | None, on_stage: Callable[[str], None]) -> Machine:
    from hotcold.placement.machine.description import read_machine
    from hotcold.placement.machine.this_machine import this_machine

    return this_machine(on_stage=on_stage) if file is None else read_machine(file)
