"""The thresholds of a model's layers, and their file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import ModelIdentity, read_artifact, write_artifact
from hotcold.model.files.artifact_places import artifact_path
from hotcold.numba_kernels.decode.activations import Thresholds

THRESHOLDS_FILE = "thresholds.safetensors"
_KIND = "thresholds"
_REMEDY = "make it again with `hotcold profile`"


@dataclass(frozen=True, eq=False)
class LayerThresholds:
    """The thresholds of all layers; see `numba_kernels.decode.activations.Thresholds`.

    Shapes:  gate, product (L,)
    Dtypes:  float32, none below zero
    """

    gate: np.ndarray
    product: np.ndarray

    def of_layers(self) -> list[Thresholds]:
        """Return the thresholds layer by layer, for kernels."""
        return [Thresholds(*pair) for pair in zip(self.gate, self.product, strict=True)]


@dataclass(frozen=True, eq=False)
class Calibrated:
    """Thresholds, with cost and savings measured on the text that they were fitted to.

    mean_kld: KL divergence of the model with thresholds from the model, in nats;
    up_share, down_share: share of a layer's neurons whose row a token reads
    Shapes:  up_share, down_share (L,) float64
    """

    thresholds: LayerThresholds
    mean_kld: float
    target_kld: float
    up_share: np.ndarray
    down_share: np.ndarray
    text_digest: str


def thresholds_path(model_path: str | Path) -> Path:
    """Return the default path of a model's thresholds."""
    return artifact_path(model_path, THRESHOLDS_FILE)


def write_thresholds(path: Path, identity: ModelIdentity, found: Calibrated) -> None:
    """Write the thresholds of the model `identity`. Errors: ArtifactError."""
    tensors = {
        "gate": found.thresholds.gate,
        "product": found.thresholds.product,
        "up_share": found.up_share,
        "down_share": found.down_share,
    }
    facts = {
        "mean_kld": found.mean_kld,
        "target_kld": found.target_kld,
        "text_digest": found.text_digest,
    }
    write_artifact(path, _KIND, identity, tensors, facts)


def read_thresholds(path: Path, identity: ModelIdentity, config: ModelConfig) -> Calibrated:
    """Read the thresholds of the model `identity`.

    Errors:  ArtifactError where the file is missing, damaged or another model's, or holds numbers
             out of range
    """
    artifact = read_artifact(path, _KIND, identity)

    def take(name: str, dtype: Any, largest: float) -> np.ndarray:
        found = artifact.tensor(name, dtype, (config.num_layers,))
        if not ((found >= 0) & (found <= largest)).all():
            raise ArtifactError(f"{path}: its {name} is wrong; {_REMEDY}")
        return found

    max_float = float(np.finfo(np.float32).max)
    thresholds = LayerThresholds(
        take("gate", np.float32, max_float), take("product", np.float32, max_float)
    )
    return Calibrated(
        thresholds,
        artifact.fact("mean_kld", float),
        artifact.fact("target_kld", float),
        take("up_share", np.float64, 1),
        take("down_share", np.float64, 1),
        artifact.fact("text_digest", str),
    )
