"""Which predictors `--mode auto` tries: those that are nearly as exact as no predictor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llvmlite.binding

from hotcold.actors.protocol.messages import PREDICTED_MODES, SystemConfig
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact import ModelIdentity
from hotcold.numba_kernels.kernel_cache import sources_digest
from hotcold.placement.solver.cost import RowBytes
from hotcold.predictors.predictor_file import Predictors, predictors_path, read_predictors

AUTO_RECALL = 0.99  # that they were made for
_INSTRUCTIONS = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
_FILES = ("predictors_path", "plan_path")


def auto_mode(path: Path, config: ModelConfig, weight_dtype: str) -> str | None:
    """The predicted mode to try for this model: of those that promise enough, the one that reads
    the fewest bytes a token; None where there is none.

    Errors:  ArtifactError for predictors that are damaged or another model's
    """
    found = dict(_candidates(path, config, weight_dtype))
    return min(found, key=lambda mode: found[mode]) if found else None


def _candidates(path: Path, config: ModelConfig, weight_dtype: str) -> Iterator[tuple[str, float]]:
    """Modes, and the bytes that a token reads to know which neurons fire."""
    for mode in PREDICTED_MODES:
        own = predictors_path(path, mode, weight_dtype)
        file = own if own.exists() else predictors_path(path, mode)
        if not file.exists():
            continue
        predictors = read_predictors(file, ModelIdentity.of(path), config)
        if (predictors.target_recall or 0.0) >= AUTO_RECALL:
            yield mode, predictors.num_bytes + _gate_bytes(predictors, config)


def _gate_bytes(predictors: Predictors, config: ModelConfig) -> float:
    """Bytes of the gates that predictors let through, all of them where that was not measured."""
    layer = config.ffn_size * RowBytes.of(config).first
    if predictors.qualities is None:
        return float(config.num_layers * layer)
    return sum(quality.computed * layer for quality in predictors.qualities)


def trial_key(system: SystemConfig) -> dict[str, Any]:
    """All that the speed of a system's modes depends on, as JSON has it: options, files, processor.

    Files are told by what they are, not by where they lie.
    Errors:  CheckpointError, ConfigError; OSError for a file that is gone
    """
    key = asdict(system) | {
        "model_path": ModelIdentity.of(system.model_path).digest,
        "kernels": sources_digest(),
        "cpu": llvmlite.binding.get_host_cpu_name(),
        "instructions": [os.environ.get(name, "") for name in _INSTRUCTIONS],
    }
    for name in _FILES:
        if key[name]:
            found = Path(key[name]).stat()
            key[name] = [found.st_size, found.st_mtime_ns]
    return key
