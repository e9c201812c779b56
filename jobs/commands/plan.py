"""`hotcold plan`: which neurons, layers and caches go to which device, and what speed to expect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotcold.actors.protocol.messages import MODES
from hotcold.jobs.profile.files import require_plot, require_writable
from hotcold.jobs.support.console import json_option, status_line
from hotcold.jobs.support.extras import require_extra
from hotcold.jobs.support.options import given_option, split_system_options, system_option
from hotcold.jobs.support.settings import GroupedCommand
from hotcold.model.errors import ArtifactError, MemoryBudgetError, UsageError
from hotcold.model.files.artifact_places import ARTIFACTS, place_to_write
from hotcold.model.files.locate import resolved_model

if TYPE_CHECKING:
    from hotcold.jobs.support.planning import Planning
    from hotcold.placement.plan import PlacementPlan

_FILE = click.Path(path_type=Path, dir_okay=False)
_LOADS_WITHOUT = (
    "none is needed: systems of these options choose no neurons beforehand, and divide them "
    "equally; --out FILE writes one all the same, for --plan FILE"
)
_NOT_STORED = (
    "--plot draws what neurons on storage cost, and all of this model fits; give less --cpu-memory"
)
_LOADS_BY_IT = f"systems of these options load by it; another place: --out or {ARTIFACTS}"


def _of_fleet(flag: str, about: str, **how: Any) -> Any:
    how = {"type": click.FloatRange(0, min_open=True), "help": f"With --fleet: {about}.", **how}
    return click.option(flag, **how)


@click.command(cls=GroupedCommand)
@click.argument("model", required=False)
@system_option("mode", type=click.Choice(MODES), help="Which neurons to compute, as of generate.")
@system_option("predictors", type=_FILE, help="Predictors of --mode sign and lowrank.")
@system_option("weight_dtype")
@system_option("gpu_memory_bytes", help="VRAM to use, like 8GiB.")
@system_option("cpu_memory_bytes", help="Memory to use, like 8GiB.")
@system_option("context_length", help="Positions in the KV cache.")
@system_option("kv_positions")
@system_option("kv_dtype")
@system_option("max_batch")
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
    help="Seconds that the solver may take.",
)
@click.option("--fleet", "is_fleet", is_flag=True, help="Say how many such nodes a load needs.")
@_of_fleet("--requests-per-second", "the load", default=1.0)
@_of_fleet("--prompt-tokens", "their mean", default=512.0)
@_of_fleet("--answer-tokens", "their mean", default=128.0)
@_of_fleet(
    "--shared-prefix", "the share of prompts' tokens with which an earlier one began",
    type=click.FloatRange(0, 0.9), default=0.0,
)  # fmt: skip
@_of_fleet("--ttft", "seconds to the first token for 99 of 100 requests", default=20.0)
@_of_fleet("--tpot", "seconds between tokens, an answer's mean, for 99 of 100", default=0.25)
@_of_fleet(
    "--measured", "what `bench prefill` and `bench decode` print with --json on a node, "
    "instead of the plan's speed; a file for each kind of node", multiple=True,
    type=_FILE,
)  # fmt: skip
@_of_fleet("--node-cost", "of an hour, for each kind of node", multiple=True)
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
    is_fleet: bool,
    **values: Any,
) -> dict[str, Any]:
    """Decide where each neuron, attention layer and cache, and the head, of MODEL goes.

    Frequent neurons go to the GPU as far as bytes allow, rare ones to the CPU in equal work. The
    plan is written beside the model, where systems of these options find it; one for another
    machine (--machine) only with --out. --shape and --config say what a model that is not here
    would need, and how fast it would be. Of what was --measured only the --fleet is planned.
    """
    from hotcold.jobs.support.planning import Planning, planned_model, planned_profile
    from hotcold.placement.machine.description import read_machine

    require_extra("plan", "plan")
    if is_fleet:
        require_extra("fleet", "--fleet")
    if plot is not None:
        require_plot(plot)
        require_writable("--plot", plot)
    options = split_system_options(values)
    if not is_fleet and (option := given_option(*values)):
        raise UsageError(f"{option} is of --fleet; give that, too")
    found = planned_model(model, shape, config_source, options.weight_dtype)
    if out is not None:
        if found.path is None:
            raise UsageError(
                "--out writes a plan to load by, of a model that is here; leave it out"
            )
        require_writable("--out", out)
    profile = planned_profile(found, profile_file, density)
    described = None if machine_file is None else read_machine(machine_file)
    planning = Planning(found, options, described, profile, out is not None)
    report = {} if values["measured"] else _plan_system(planning, out, plot, time_limit_s)
    if is_fleet:
        from hotcold.jobs.support.fleet_plan import plan_fleet

        report["fleet"] = plan_fleet(planning.system, report, **values)
    return report


def _plan_system(
    planning: Planning, out: Path | None, plot: Path | None, time_limit_s: float
) -> dict[str, Any]:
    """Print the plan, and write it where systems look for it. Errors: HotcoldError."""
    from hotcold.jobs.support.plan_tables import plan_json, print_plan

    with status_line("looking at this machine") as tell:
        try:
            planning.require_room()
            if plot is not None:
                raise UsageError(_NOT_STORED)
            machine = planning.measured(tell)
            tell(f"placing neurons, at most {time_limit_s:g} s", is_brief=True)
            made = planning.plan(machine, time_limit_s)
        except MemoryBudgetError as problem:
            return _plan_storage(planning, problem, tell, plot)
    out, about = _written(planning, made, out)
    print_plan(made, out, about)
    return plan_json(made, out)


def _written(planning: Planning, made: PlacementPlan, out: Path | None) -> tuple[Path | None, str]:
    """Where the plan was written, if it was, and what to know of that. Errors: ArtifactError."""
    from hotcold.placement.plan import plan_path, write_plan

    path = planning.model.path
    if path is None:
        return None, "the model's weights are not here"
    if out is not None:
        write_plan(out, planning.model.identity, made)
        return out, "to load by it give --plan"
    if planning.system.down_transposed:
        return None, _LOADS_WITHOUT
    if planning.described is not None:
        return None, "it is for the machine of --machine; --out FILE writes it"
    own = place_to_write(path, plan_path(path, made.request))
    try:
        write_plan(own, planning.model.identity, made)
    except ArtifactError as problem:  # as in a folder of others
        return None, str(problem)
    return own, _LOADS_BY_IT


def _plan_storage(
    planning: Planning,
    problem: MemoryBudgetError,
    tell: Callable[[str], None],
    plot: Path | None,
) -> dict[str, Any]:
    """Say what stays in memory of a model that does not fit, and in which --dtype it would.

    Errors:  MemoryBudgetError: `problem`, or one naming the least that would do
    """
    from hotcold.jobs.profile.plot import plot_offload
    from hotcold.jobs.support.offload_plan import offload_text

    fits = planning.fitting_dtype()
    try:
        if planning.options.cpu_memory_bytes is None:
            raise problem
        planning.require_least()
        machine = planning.measured(tell)
        plans = planning.stored(machine)
        if not plans:
            raise problem
    except MemoryBudgetError as least:
        also = f", or --dtype {fits}, which fits" if fits else ""
        raise MemoryBudgetError(f"{least}{also}") from None
    click.echo(offload_text(plans))
    if fits:
        click.echo(f"with --dtype {fits} all of it fits in memory")
    if plot is not None:
        path = planning.model.path
        name = planning.model.config.name if path is None else resolved_model(path).name
        plot_offload(plot, planning.stored(machine, is_plotted=True), name)
        click.echo(f"drew {plot}")
    return {"storage": [asdict(plan) for plan in plans]}
