"""What `hotcold plan` asks of the planner: for one model, options and machine.

The model is one on this machine, or only its config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hotcold.actors.protocol.messages import NO_MODEL, PREDICTED_MODES, SystemConfig
from hotcold.actors.protocol.options import AUTO_DRAFT, QUANTIZED, SystemOptions
from hotcold.actors.setup.account import account
from hotcold.actors.setup.choose import choose_system, within
from hotcold.actors.setup.gpu_share import only_on_cpu
from hotcold.actors.setup.modes import require_predictable
from hotcold.actors.setup.placement_choice import own_profile, plan_request, predictor_cost
from hotcold.actors.setup.preflight import in_memory, prepare_system, read_model
from hotcold.actors.setup.storage import fit_storage
from hotcold.jobs.support.offload_plan import (
    OffloadPlan,
    offload_plans,
)
from hotcold.model.config.build import build_config, read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import loaded_config
from hotcold.model.errors import MemoryBudgetError, UsageError, shown
from hotcold.model.files import hub
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.locate import locate_model
from hotcold.model.sparsity import MAX_DENSITY, MIN_DENSITY, known_firing_share
from hotcold.model.synthetic.shape import DTYPES, config_json, resolve_shape
from hotcold.placement.machine.description import Machine
from hotcold.placement.machine.survey import read_layout
from hotcold.placement.machine.this_machine import this_machine
from hotcold.placement.plan import PlacementPlan
from hotcold.placement.planner import Planner
from hotcold.placement.profile import ActivationProfile, read_profile, stated_profile
from hotcold.placement.solver.cost import PredictorCost, assumed_predictors
from hotcold.placement.solver.plan_devices import gpu_budget

_PLOTTED = 17  # sizes of memory in a plot
_ROOMY = 1 << 50  # bytes of a node in which every model fits


@dataclass(frozen=True)
class PlannedModel:
    """A model to plan for. `path` is None without its weights."""

    config: ModelConfig
    path: Path | None

    @property
    def identity(self) -> ModelIdentity:
        """Of the model that is here. Errors: ValueError where none is."""
        if self.path is None:
            raise ValueError("no model is here")
        return ModelIdentity.of(self.path)


def planned_model(
    model: str | None, shape: str | None, config_source: str | None, weight_dtype: str | None
) -> PlannedModel:
    """The model that the command's arguments name: at most one of the three.

    Errors:  UsageError, ConfigError, CheckpointError
    """
    if sum(name is not None for name in (model, shape, config_source)) > 1:
        raise UsageError("MODEL, --shape and --config each name a model; give one of them")
    if shape is not None:
        config = build_config(config_json(resolve_shape(shape, {}), DTYPES["f16"]), name=shape)
        return PlannedModel(loaded_config(config, weight_dtype or ""), None)
    if config_source is not None:
        config = read_config(_config_folder(config_source))
        return PlannedModel(loaded_config(config, weight_dtype or ""), None)
    path = locate_model(model)
    return PlannedModel(read_model(path, weight_dtype), path)


def _config_folder(source: str) -> Path:
    """The folder of a config.json: a path to either, or an org/repo of Hugging Face."""
    path = Path(source).expanduser()
    if path.name == "config.json" and path.is_file():
        return path.parent
    if path.is_dir():
        return path
    if (match := hub.REPOSITORY.fullmatch(source)) and not match["name"]:
        return hub.fetch_config(match["repo"]).parent
    raise UsageError(f"--config is {shown(source)}; give a config.json, its folder, or org/repo")


def planned_profile(
    model: PlannedModel, file: Path | None, density: float | None
) -> ActivationProfile | None:
    """How often neurons fire: counted for a model that is here, stated for another.

    Errors:  UsageError where it must be stated, or cannot be; ArtifactError
    """
    if model.path is not None:
        if density is not None:
            raise UsageError(
                "--density states what is not known, for --shape and --config; `hotcold profile` "
                "counts which neurons of this model fire"
            )
        if file is None:
            return own_profile(model.path, model.config) or _stated(
                model.config, "`hotcold profile` counts", is_even=True
            )
        return read_profile(file, model.identity, model.config)
    if file is not None:
        raise UsageError("--profile is of a model that is here; leave --shape and --config out")
    if density is not None:
        return stated_profile(model.config, density, "--density")
    stated = _stated(model.config, "--density states it")
    if stated is None and model.config.is_sparse:
        raise UsageError(
            f"nobody published how many neurons of {model.config.name} fire; state a share, such "
            "as --density 0.1"
        )
    return stated


def _stated(config: ModelConfig, how: str, is_even: bool = False) -> ActivationProfile | None:
    """As many neurons as config.json or others say; None where nobody does, or all fire."""
    known = known_firing_share(config)
    if known is None or not config.is_sparse:
        return None
    share, who = known
    share = min(max(share, MIN_DENSITY), MAX_DENSITY)
    return stated_profile(config, share, f"{who}; {how}", is_even)


@dataclass(frozen=True)
class Planning:
    """One model, options, and a machine: what `described` says, else this one.

    `has_plan`: --plan will name the plan.
    """

    model: PlannedModel
    options: SystemOptions
    described: Machine | None
    profile: ActivationProfile | None
    has_plan: bool = False

    @property
    def system(self) -> SystemConfig:
        """The system, with all neurons in memory. Errors: UsageError, ArtifactError."""
        return self._in_memory[0]

    def require_room(self) -> None:
        """Raise what keeps this from being planned, as far as no speed is needed to know it.

        Errors:  MemoryBudgetError; those of `system`
        """
        self._planner(self._sizes).require_room()

    def measured(self, on_stage: Callable[[str], None]) -> Machine:
        """The machine with its speeds. Errors: MemoryBudgetError where it cannot be measured."""
        return self.described or this_machine(on_stage=on_stage)

    def plan(self, machine: Machine, time_limit_s: float = 1.0) -> PlacementPlan:
        """The plan on `machine`. Errors: MemoryBudgetError."""
        return self._planner(machine).plan(time_limit_s)

    def fitting_dtype(self) -> str:
        """Of a model that is not here the most precise --dtype that fits; "" for none."""
        if self.model.path is not None or self.options.weight_dtype is not None:
            return ""
        for dtype in QUANTIZED:
            with suppress(MemoryBudgetError, UsageError):
                smaller = replace(self.model, config=loaded_config(self.model.config, dtype))
                chosen = replace(self.options, weight_dtype=dtype)
                replace(self, model=smaller, options=chosen).require_room()
                return dtype
        return ""

    def require_least(self) -> None:
        """Raise MemoryBudgetError, naming the least, where --cpu-memory is too little for that."""
        assert self.options.cpu_memory_bytes is not None
        self._stored_within(self.options.cpu_memory_bytes)

    def stored(self, machine: Machine, is_plotted: bool = False) -> list[OffloadPlan]:
        """Plans with neurons on storage, by size of memory from --cpu-memory on; [] if none is.

        Errors:  MemoryBudgetError naming the least that would do
        """
        given = self.options.cpu_memory_bytes
        assert given is not None
        with_all = replace(self, options=replace(self.options, cpu_memory_bytes=None))
        nodes = tuple(replace(node, free_bytes=_ROOMY) for node in machine.nodes)
        report = with_all.plan(replace(machine, nodes=nodes)).report
        head_s = sum(part["ms"] for part in report["parts"] if part["name"] == "head") / 1e3
        number = {"num_sizes": _PLOTTED} if is_plotted else {}
        return offload_plans(
            self._stored_within, given, self.profile, report["token_s"], head_s=head_s, **number
        )

    def _stored_within(self, num_bytes: int) -> tuple[SystemConfig, ModelConfig]:
        """The system with so much memory, and neurons on storage where that takes it."""
        config, path = self.model.config, self.model.path
        if path is not None:
            return prepare_system(path, replace(self.options, cpu_memory_bytes=num_bytes))
        system, gpus = self._planned, self._placed_on(self._sizes).gpus
        if self._uses_gpu:
            budget = max(1, gpu_budget(self.options.gpu_memory_bytes, gpus[0].free_bytes))
            system = replace(system, device="cuda", gpu_memory_bytes=budget)
        storage = fit_storage(self.profile, system, config, num_bytes)
        return replace(system, storage=storage), config

    @cached_property
    def _sizes(self) -> Machine:
        """The machine with its memory; its speeds need not be its own."""
        return self.described or read_layout().unmeasured

    @property
    def _uses_gpu(self) -> bool:
        return bool(self._placed_on(self._sizes).gpus) and self.options.gpu_memory_bytes != 0

    def _placed_on(self, machine: Machine) -> Machine:
        return replace(machine, gpus=()) if only_on_cpu(self.model.config) else machine

    @cached_property
    def _planned(self) -> SystemConfig:
        """The system to plan for, with cores and nodes of the `described` machine.

        Errors:  UsageError; ArtifactError for predictors
        """
        # Planned for, not used by this process.
        options = replace(self.options, gpu_memory_bytes=None, device="cpu")
        if self.described is None:
            return _chosen(self.model, options)
        cores = sum(node.num_cores for node in self.described.nodes)
        num_threads = cores if options.num_threads is None else options.num_threads
        if not 1 <= num_threads <= cores:
            raise UsageError(f"--threads is {num_threads}; the machine has 1 to {cores}")
        fewest = min(len(self.described.nodes), num_threads)
        num_actors = within("--cpu-actors", options.num_cpu_actors, 1, num_threads, fewest)
        here = _chosen(self.model, replace(options, num_threads=None, num_cpu_actors=None))
        return replace(here, num_threads=num_threads, num_cpu_actors=num_actors)

    @cached_property
    def _in_memory(self) -> tuple[SystemConfig, ModelConfig]:
        """The system, and the config with the formats of its matrices."""
        system = replace(self._planned, device="cuda" if self._uses_gpu else "cpu")
        if self.model.path is None:
            return system, self.model.config
        return in_memory(system, self.model.config, self.has_plan)

    def _predictors(self, system: SystemConfig) -> PredictorCost | None:
        """What the mode's predictors cost. Errors: ArtifactError"""
        model = self.model
        if model.path is not None:
            return predictor_cost(system, model.identity, model.config)
        is_predicted = system.mode in PREDICTED_MODES
        return assumed_predictors(model.config, system.mode) if is_predicted else None

    def _planner(self, machine: Machine) -> Planner:
        system, config = self._in_memory
        need = account(self._planned, config)
        return Planner(
            config,
            self._placed_on(machine),
            self.profile,
            plan_request(system, self.options, machine.identity, self.profile),
            need.kv_cache_bytes,
            need.process_bytes + need.arena_bytes + need.draft_bytes,
            self._predictors(system),
        )


def _chosen(model: PlannedModel, options: SystemOptions) -> SystemConfig:
    """Options checked; predictors of a model that is not here need no file."""
    if options.draft == AUTO_DRAFT:
        options = replace(options, draft=NO_MODEL)  # a plan places no layer that drafts
    if model.path is not None:
        return choose_system(model.path, model.config, options)
    if options.predictors is not None:
        raise UsageError("--predictors are of a model that is here; leave --shape and --config out")
    if options.draft != NO_MODEL:
        raise UsageError("--draft is of a model that is here; leave --shape and --config out")
    is_predicted = options.mode in PREDICTED_MODES
    if is_predicted:
        require_predictable(model.config, f"--mode {options.mode}")
    plain = replace(options, mode=None) if is_predicted else options
    system = choose_system(Path(model.config.name), model.config, plain)
    return replace(system, mode=str(options.mode)) if is_predicted else system
