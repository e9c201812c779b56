"""`--draft`: what drafts tokens in a system, and for which models and systems that is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hotcold.actors.protocol.messages import (
    AUTO_MODE,
    DRAFT_DTYPES,
    LAYER_DRAFT,
    NO_MODEL,
    PREDICTED_DRAFT,
    PREDICTED_MODES,
    SystemConfig,
)
from hotcold.actors.protocol.options import AUTO_DRAFT, SystemOptions
from hotcold.actors.setup.account import draft_bytes
from hotcold.actors.setup.modes import require_predictable
from hotcold.actors.setup.shards import served_config
from hotcold.model.byte_sizes import size_text
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError
from hotcold.model.files.artifact import ModelIdentity, check_artifact
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.check import why_no_drafts
from hotcold.model.weights.sizes import weight_bytes
from hotcold.predictors.predictor_file import predictors_path

_MOST = 0.7  # of the target's bytes: a draft's step that reads more is hardly a faster one


def with_draft(
    path: Path, system: SystemConfig, config: ModelConfig, options: SystemOptions
) -> SystemConfig:
    """`system` with the draft of --draft; `config` has the formats that matrices are loaded in.

    Errors:  UsageError where this system cannot have it, ArtifactError for unusable predictors
    """
    if options.draft == AUTO_DRAFT:
        refusal = _refusal(path, system, config, options)
        return system if refusal else replace(system, draft=LAYER_DRAFT)
    if options.speculate == "off" and options.draft != NO_MODEL:
        raise UsageError(f"--draft {options.draft} is for --speculate, which is off; leave one out")
    if options.draft == LAYER_DRAFT and (refusal := _refusal(path, system, config, options)):
        raise UsageError(f"--draft {LAYER_DRAFT}: {refusal}; leave it out")
    system = replace(system, draft=options.draft)
    if system.draft in DRAFT_DTYPES:
        _require_weights(system, config)
    if system.draft == PREDICTED_DRAFT:
        require_predictable(config, f"--draft {PREDICTED_DRAFT}")
        file = _predictors(path, system, options)
        check_artifact(file, "predictors", ModelIdentity.of(path))
        return replace(system, draft_predictors_path=str(file.resolve()))
    return system


def _refusal(path: Path, system: SystemConfig, config: ModelConfig, options: SystemOptions) -> str:
    """Why the system cannot have the model's layer that drafts; "" where it can."""
    is_predicted = system.auto_mode or system.mode in PREDICTED_MODES
    places = {
        "speculation is off": options.speculate == "off",
        "the layer is computed on the CPU alone": system.device == "cuda",
        "the layer is of systems of one host": bool(system.hosts),
        "the mode has predictors, and none are of that layer": is_predicted,
        "a plan places neurons, and none of that layer": options.plan is not None,
    }
    for why, is_so in places.items():
        if is_so:
            return why
    return why_no_drafts(Checkpoint(path), config)


def _require_weights(system: SystemConfig, config: ModelConfig) -> None:
    """Raise UsageError unless the system can hold its second weights, and they are fewer bytes."""
    given = f"--draft {system.draft}"
    if system.device == "cuda":
        raise UsageError(f"{given} is for the CPU alone; give --device cpu, or leave it out")
    if system.hosts:
        raise UsageError(f"{given} is for systems of one host; leave it out, or --hosts")
    try:
        draft, target = draft_bytes(system, config), weight_bytes(config)
    except UsageError as problem:
        raise UsageError(f"{given}: {str(problem).removeprefix('--dtype ')}") from None
    if draft > _MOST * target:
        raise UsageError(
            f"{given}: the draft takes {size_text(draft)} and the model itself "
            f"{size_text(target)}, so it would hardly be faster; leave it out"
        )


def _predictors(path: Path, system: SystemConfig, options: SystemOptions) -> Path:
    """The file of predictors that draft: the one that is named, else one beside the model."""
    if system.mode in PREDICTED_MODES or system.auto_mode:
        mode = AUTO_MODE if system.auto_mode else system.mode
        raise UsageError(
            f"--draft {PREDICTED_DRAFT} is for a model that computes all that fires, not for "
            f"--mode {mode}; leave one of them out"
        )
    if options.predictors is not None:
        return options.predictors
    for mode in PREDICTED_MODES:
        file = predictors_path(path, mode, options.weight_dtype or "")
        if file.exists():
            return file
    raise UsageError(
        f"--draft {PREDICTED_DRAFT} takes predictors, and none lie beside the model; "
        "`hotcold train-predictors` makes some"
    )


def draft_note(system: SystemConfig) -> str:
    """A line about the memory of the second weights; "" where there are none.

    Errors:  CheckpointError
    """
    if system.draft_system is None:
        return ""
    config = served_config(system, read_config(system.model_path))
    draft, target = draft_bytes(system, config), weight_bytes(config)
    return (
        f"the draft, the model's weights in {system.draft}, takes {size_text(draft)} of memory "
        f"beside the model's {size_text(target)}"
    )
