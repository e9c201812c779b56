"""The mode that leaves out neurons which add little: for which models, by which thresholds."""

from __future__ import annotations

from pathlib import Path

from hotcold.actors.protocol.messages import THRESHOLD, SystemConfig
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError
from hotcold.model.files.artifact import ModelIdentity, check_artifact
from hotcold.placement.solver.cost import RowBytes
from hotcold.predictors.magnitude_thresholds import Calibrated, read_thresholds, thresholds_path


def has_thresholds(config: ModelConfig) -> bool:
    """Whether the mode is for such a model: gated, and never exactly zero."""
    return config.has_gate and not config.is_sparse


def thresholds_file(path: Path, config: ModelConfig, mode: str, named: Path | None) -> str:
    """The thresholds of that mode, found to be this model's; no other mode has any.

    Errors:  UsageError for another mode or model; ArtifactError for a file that is missing, damaged
             or another model's
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
    check_artifact(found, "thresholds", ModelIdentity.of(path))
    return str(found.resolve())


def require_memory_to_calibrate(is_stored: bool) -> None:
    """Refuse to calibrate with neurons on storage: each of many trials would read all of them.

    Errors:  UsageError
    """
    if is_stored:
        raise UsageError(
            "thresholds are calibrated with all neurons in memory; give more --cpu-memory, or a "
            "--dtype of fewer bits"
        )


def system_thresholds(system: SystemConfig, config: ModelConfig) -> Calibrated | None:
    """What the system runs with; None where its mode has none. Errors: ArtifactError."""
    if not system.thresholds_path:
        return None
    identity = ModelIdentity.of(system.model_path)
    return read_thresholds(Path(system.thresholds_path), identity, config)


def threshold_note(system: SystemConfig, config: ModelConfig) -> str:
    """What the thresholds are expected to cost and to save, in a line; "" without any.

    `config` has the formats that weights are loaded in.
    Errors:  ArtifactError
    """
    found = system_thresholds(system, config)
    return "" if found is None else f"threshold: not exact; {promise(found, config)}"


def promise(found: Calibrated, config: ModelConfig) -> str:
    """What thresholds are expected to cost and to save."""
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
    """Those beside the model; None without any. Errors: ArtifactError for a file of no use."""
    file = thresholds_path(path)
    return read_thresholds(file, ModelIdentity.of(path), config) if file.exists() else None
