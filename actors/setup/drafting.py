"""`--draft`: what drafts tokens in a system, and for which models and systems that is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hotcold.actors.protocol.messages import (
    DRAFT_DTYPES,
    PREDICTED_DRAFT,
    PREDICTED_MODES,
    SystemConfig,
)
from hotcold.actors.protocol.options import DRAFTS, SystemOptions
from hotcold.actors.setup.memory_needs import draft_bytes
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError, shown
from hotcold.model.files.artifact import ModelIdentity, check_artifact
from hotcold.placement.memory import weight_bytes
from hotcold.predictors.predictor_file import predictors_path

_MOST = 0.7  # of the target's bytes: a draft's step that reads more is hardly a faster one


def with_draft(
    path: Path, system: SystemConfig, config: ModelConfig, options: SystemOptions
) -> SystemConfig:
    """`system` with the draft of --draft; `config` has the formats that matrices are loaded in.

    Errors:  UsageError where this system cannot have it, ArtifactError for unusable predictors
    """
    draft = options.draft
    if draft not in DRAFTS:
        raise UsageError(f"no draft named {shown(draft)}; give {' or '.join(DRAFTS)}")
    if draft in DRAFT_DTYPES:
        return _with_weights(replace(system, draft=draft), config)
    if draft == PREDICTED_DRAFT:
        return _with_predictors(path, system, options)
    return system


def _with_weights(system: SystemConfig, config: ModelConfig) -> SystemConfig:
    """The system if it can hold its second weights."""
    given = f"--draft {system.draft}"
    if system.device == "cuda":
        raise UsageError(
            f"{given} is for systems without a GPU; give --device cpu, or leave it out"
        )
    if system.hosts:
        raise UsageError(f"{given} is for systems of one host; leave it out, or --hosts")
    try:
        draft, target = draft_bytes(system, config), weight_bytes(config)
    except UsageError as problem:
        raise UsageError(f"{given}: {str(problem).removeprefix('--dtype ')}") from None
    if draft > _MOST * target:
        raise UsageError(
            f"{given}: the draft takes {draft / 1e9:.2f} GB and the model itself "
            f"{target / 1e9:.2f} GB, so it would hardly be faster; leave it out"
        )
    return system


def _with_predictors(path: Path, system: SystemConfig, options: SystemOptions) -> SystemConfig:
    """The system with the predictors of the first predicted mode that has some."""
    if system.mode in PREDICTED_MODES or system.auto_mode:
        raise UsageError(
            f"--draft {PREDICTED_DRAFT} drafts for a model that computes all that fires; "
            f"leave it out with --mode {'auto' if system.auto_mode else system.mode}"
        )
    for mode in PREDICTED_MODES:
        own = predictors_path(path, mode, options.weight_dtype or "")
        found = own if own.exists() else predictors_path(path, mode)
        if found.exists():
            check_artifact(found, "predictors", ModelIdentity.of(path))
            return replace(system, draft=mode, draft_predictors_path=str(found.resolve()))
    raise UsageError(
        f"--draft {PREDICTED_DRAFT} takes predictors, and none lie beside the model; "
        "`hotcold train-predictors` makes some"
    )


def draft_note(system: SystemConfig, config: ModelConfig) -> str:
    """A line about the memory of the second weights; "" where there are none.

    `config` has the formats that matrices are loaded in.
    """
    if system.draft_system is None:
        return ""
    draft, target = draft_bytes(system, config), weight_bytes(config)
    return (
        f"the draft, the model's weights in {system.draft}, takes {draft / 1e9:.2f} GB of memory "
        f"beside the model's {target / 1e9:.2f}"
    )
