"""The model that `hotcold plan` plans for: one on this machine, or only its config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hotcold.actors.protocol.messages import NO_MODEL, PREDICTED_MODES, SystemConfig
from hotcold.actors.protocol.options import AUTO_DRAFT
from hotcold.actors.setup.choose import choose_system
from hotcold.actors.setup.modes import require_predictable
from hotcold.actors.setup.placement_choice import own_profile, predictor_cost
from hotcold.actors.setup.preflight import SystemOptions, in_memory, read_model
from hotcold.model.config.build import build_config, read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import loaded_config
from hotcold.model.errors import UsageError, shown
from hotcold.model.files import hub
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.files.locate import locate_model
from hotcold.model.sparsity import MAX_DENSITY, MIN_DENSITY, known_firing_share
from hotcold.model.synthetic.shape import DTYPES, config_json, resolve_shape
from hotcold.placement.machine.description import Machine
from hotcold.placement.profile import ActivationProfile, read_profile, stated_profile
from hotcold.placement.solver.cost import PredictorCost, assumed_predictors


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


def planned_predictors(model: PlannedModel, system: SystemConfig) -> PredictorCost | None:
    """What the mode's predictors cost. Errors: ArtifactError"""
    if model.path is not None:
        return predictor_cost(system, model.identity, model.config)
    is_predicted = system.mode in PREDICTED_MODES
    return assumed_predictors(model.config, system.mode) if is_predicted else None


def planned_system(
    model: PlannedModel, options: SystemOptions, described: Machine | None
) -> SystemConfig:
    """The system to plan for, with cores and nodes of the `described` machine.

    Errors:  UsageError; ArtifactError for predictors
    """
    # Planned for, not used by this process.
    options = replace(options, gpu_memory_bytes=None, device="cpu")
    if described is None:
        return _chosen(model, options)
    cores = sum(node.num_cores for node in described.nodes)
    num_threads = cores if options.num_threads is None else options.num_threads
    if not 1 <= num_threads <= cores:
        raise UsageError(f"--threads is {num_threads}; the machine has 1 to {cores}")
    num_actors = options.num_cpu_actors
    if num_actors is None:
        num_actors = min(len(described.nodes), num_threads)
    if not 1 <= num_actors <= num_threads:
        raise UsageError(f"--cpu-actors is {num_actors}; give a number from 1 to {num_threads}")
    here = _chosen(model, replace(options, num_threads=None, num_cpu_actors=None))
    return replace(here, num_threads=num_threads, num_cpu_actors=num_actors)


def planned_in_memory(
    model: PlannedModel, system: SystemConfig, uses_gpu: bool, has_plan: bool
) -> tuple[SystemConfig, ModelConfig]:
    """The planned system, and the config with the formats that it will hold matrices in.

    `has_plan`: --plan will name the plan. Errors: CheckpointError, UsageError
    """
    system = replace(system, device="cuda" if uses_gpu else "cpu")
    if model.path is None:
        return system, model.config
    return in_memory(model.path, system, model.config, has_plan)


def _chosen(model: PlannedModel, options: SystemOptions) -> SystemConfig:
    """Options checked; predictors of a model that is not here need no file."""
    if model.path is not None:
        return choose_system(model.path, model.config, options)
    if options.predictors is not None:
        raise UsageError("--predictors are of a model that is here; leave --shape and --config out")
    if options.draft not in (AUTO_DRAFT, NO_MODEL):
        raise UsageError("--draft is of a model that is here; leave --shape and --config out")
    is_predicted = options.mode in PREDICTED_MODES
    if is_predicted:
        require_predictable(model.config, f"--mode {options.mode}")
    plain = replace(options, mode=None) if is_predicted else options
    system = choose_system(Path(model.config.name), model.config, plain)
    return replace(system, mode=str(options.mode)) if is_predicted else system
