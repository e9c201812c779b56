"""`--mode auto`: which predictors it tries; `--mode threshold`: for which models, by which file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotcold.actors.protocol.messages import AUTO_MODE, PREDICTED_MODES, THRESHOLD, SystemConfig
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError
from hotcold.model.files.artifact import ModelIdentity, check_artifact, sampled_digest
from hotcold.numba_kernels.kernel_cache import sources_digest
from hotcold.numba_kernels.own_cache import host_cpu
from hotcold.placement.solver.cost import RowBytes
from hotcold.predictors.magnitude_thresholds import Calibrated, read_thresholds, thresholds_path
from hotcold.predictors.predictor_file import Predictors, predictors_path, read_predictors

AUTO_RECALL = 0.99  # target of predictors that `--mode auto` tries
_INSTRUCTIONS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
_FILES = ("predictors_path", "plan_path")


def auto_mode(path: Path, config: ModelConfig, weight_dtype: str) -> str | None:
    """The predicted mode to try: of those with enough recall the one that reads fewest bytes.

    None where there is none, as for mixtures and where no activation is exactly zero.
    Errors:  ArtifactError for predictors that are damaged or another model's
    """
    if unpredictable(config):
        return None
    found = dict(_candidates(path, config, weight_dtype))
    return min(found, key=lambda mode: found[mode]) if found else None


def _candidates(path: Path, config: ModelConfig, weight_dtype: str) -> Iterator[tuple[str, float]]:
    """Modes, and the bytes that a token reads of predictors and gates."""
    for mode in PREDICTED_MODES:
        file = predictors_path(path, mode, weight_dtype)
        if not file.exists():
            continue
        predictors = read_predictors(file, ModelIdentity.of(path), config)
        if (predictors.target_recall or 0.0) >= AUTO_RECALL:
            yield mode, predictors.num_bytes + _gate_bytes(predictors, config)


def _gate_bytes(predictors: Predictors, config: ModelConfig) -> float:
    """Bytes of the gates that predictors select; all of them where that was not measured."""
    first = RowBytes.of(config).first
    if predictors.qualities is None:
        return float(config.num_neurons * first)
    return sum(
        quality.computed * size * first
        for quality, size in zip(predictors.qualities, config.ffn_sizes, strict=True)
    )


def trial_key(system: SystemConfig) -> dict[str, Any]:
    """All that the speed of a system's modes depends on: options, files, processor. Can be JSON.

    Files count by content, not by path.
    Errors:  CheckpointError, ConfigError; OSError for a file that is gone
    """
    key = asdict(system) | {
        "model_path": ModelIdentity.of(system.model_path).digest,
        "home": None,  # a name that Ray gives anew at each start
        "kernels": sources_digest(),
        "cpu": host_cpu(),
        "instructions": [os.environ.get(name, "") for name in _INSTRUCTIONS],
    }
    return key | {name: sampled_digest(key[name]) for name in _FILES}


def has_thresholds(config: ModelConfig) -> bool:
    """Whether the model can use threshold mode: gated, and its activation never exactly zero."""
    return config.has_gate and not config.is_sparse


def unpredictable(config: ModelConfig) -> str:
    """Why predictors cannot choose this model's neurons, and what to do; "" where they can."""
    if config.experts is not None:
        return (
            "is for models without experts: predictors choose among all neurons, and in this one a "
            "router does; leave it out"
        )
    if config.is_sparse:
        return ""
    pays = "fewer bits a weight pay instead (--dtype q8 or q4)"
    if has_thresholds(config):
        pays += f", and --mode {THRESHOLD} leaves out what is small (`hotcold profile` calibrates)"
    return f"chooses neurons that fire, and {no_zeros(config)}; {pays}"


def no_zeros(config: ModelConfig) -> str:
    """A clause about a model that is not sparse."""
    return f"no activation of this model ({config.activation_fn}) is exactly zero: all neurons fire"


def require_predictable(config: ModelConfig, what: str) -> None:
    """Raise UsageError for `what`, which makes or needs predictors, where there can be none."""
    if why := unpredictable(config):
        raise UsageError(f"{what} {why}")


def no_predictors_note(config: ModelConfig, mode: str) -> str:
    """Why `--mode auto` is `mode`: no predictors are good enough, or there can be none."""
    if why := unpredictable(config):
        return f"mode {mode}: --mode {AUTO_MODE} {why}"
    return (
        f"mode {mode}: no predictors made for a recall of {AUTO_RECALL} or more lie beside the "
        f"model (`hotcold train-predictors --recall {AUTO_RECALL}` makes some)"
    )


def thresholds_file(path: Path, config: ModelConfig, mode: str, named: Path | None) -> str:
    """The checked thresholds file of threshold mode; "" in other modes.

    Errors:  UsageError for another mode or kind of model; ArtifactError for a file that is missing,
             damaged or another model's
    """
    if mode != THRESHOLD:
        if named is not None:
            raise UsageError(f"--thresholds go with --mode {THRESHOLD}, not with {mode}")
        return ""
    if not has_thresholds(config):
        gate = " of a gate" if config.has_gate else ", without a gate"
        raise UsageError(
            f"--mode {THRESHOLD} is for gated models whose activation is never exactly zero; this "
            f"one's is {config.activation_fn}{gate}: leave it out"
        )
    found = named or thresholds_path(path)
    if config.experts is not None and not found.exists():
        raise UsageError(
            f"{found}: there is no thresholds file; of a mixture of experts "
            "`hotcold profile --target-kl 0.03` makes one"
        )
    check_artifact(found, "thresholds", ModelIdentity.of(path))
    return str(found.resolve())


def require_memory_to_calibrate(is_stored: bool) -> None:
    """Raise UsageError with neurons on storage: each of many trials would read all of them."""
    if is_stored:
        raise UsageError(
            "thresholds are calibrated with all neurons in memory; give more --cpu-memory, or a "
            "--dtype of fewer bits"
        )


def system_thresholds(system: SystemConfig, config: ModelConfig) -> Calibrated | None:
    """The system's thresholds; None where its mode has none. Errors: ArtifactError."""
    if not system.thresholds_path:
        return None
    identity = ModelIdentity.of(system.model_path)
    return read_thresholds(Path(system.thresholds_path), identity, config)


def threshold_note(system: SystemConfig, config: ModelConfig) -> str:
    """A line about what the thresholds cost and save; "" without any.

    `config` has the formats that weights are loaded in.
    Errors:  ArtifactError
    """
    found = system_thresholds(system, config)
    return "" if found is None else f"threshold: not exact; {promise(found, config)}"


def promise(found: Calibrated, config: ModelConfig) -> str:
    """The expected error of thresholds, and the bytes that they save."""
    return (
        f"expected mean KL divergence from dense {found.mean_kld:.2g} nats, reads "
        f"{ffn_share(found, config):.0%} of the FFN's bytes"
    )


def ffn_share(found: Calibrated, config: ModelConfig) -> float:
    """The share of the FFN's bytes that a token reads, in the formats of `config`."""
    rows = RowBytes.of(config)
    shares = float(found.up_share.mean()), float(found.down_share.mean())
    return rows.read(1, *shares) / (rows.first + rows.rest)


def own_thresholds(path: Path, config: ModelConfig) -> Calibrated | None:
    """The thresholds beside the model, or None. Errors: ArtifactError for an unusable file."""
    file = thresholds_path(path)
    return read_thresholds(file, ModelIdentity.of(path), config) if file.exists() else None


def keeps_down_outputs(mode: str, config: ModelConfig) -> bool:
    """Whether services compute with down rows that are an output each, as GGUF files have them.

    That takes a mode that selects no neurons before their gates are computed. With thresholds, and
    where a third of a chosen expert's neurons fire, whole rows of few bits are read as fast as
    selected rows of 8.
    """
    experts = config.experts
    is_exact_mixture = mode == "exact" and experts is not None and not experts.has_predictors
    return mode in ("dense", THRESHOLD) or is_exact_mixture
