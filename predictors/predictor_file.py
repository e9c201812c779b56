"""A model's predictors and their file: a sign or low-rank predictor for each layer, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args, overload

import numpy as np

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import ArtifactError
from hotcold.model.files.artifact import (
    Artifact,
    ModelIdentity,
    check_artifact,
    read_artifact,
    write_artifact,
)
from hotcold.model.files.artifact_places import artifact_folders
from hotcold.model.mapped_file import forget_pages
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.predictor import NeuronPredictor, PredictorInput
from hotcold.predictors.sign import SignLayer
from hotcold.predictors.stacked import NOWHERE, AnyLayer

if TYPE_CHECKING:  # torch takes a second to import
    from torch import Tensor

KINDS = ("sign", "lowrank")


@dataclass(frozen=True)
class Quality:
    """How well a layer's predictor does on tokens that it was not fitted to, from 0 to 1."""

    recall: float  # share of the firing neurons that is computed
    precision: float  # share of the computed neurons that fires
    computed: float  # share of all neurons that is computed
    active: float  # share of all neurons that fires

    @classmethod
    def of(cls, computed: Tensor, fires: Tensor) -> Quality:
        """Return the quality of a prediction. Shapes: both (T, N) bool."""
        both = int((computed & fires).sum())
        num_computed, num_fires = int(computed.sum()), int(fires.sum())
        return cls(
            recall=both / num_fires if num_fires else 1.0,
            precision=both / num_computed if num_computed else 1.0,
            computed=num_computed / computed.numel(),
            active=num_fires / fires.numel(),
        )

    @classmethod
    def of_all(cls, fires: Tensor) -> Quality:
        """Return the quality of computing all neurons. Shapes: (T, N) bool."""
        active = int(fires.sum()) / fires.numel()
        return cls(recall=1.0, precision=active, computed=1.0, active=active)


@dataclass(frozen=True)
class Predictors:
    """All layers' predictors in the checkpoint's neuron order, and how good they are.

    layers[l] is None where all neurons of layer l are computed. `qualities` and `target_recall` are
    None where they are unknown.
    """

    layers: Sequence[AnyLayer | None]
    input_name: PredictorInput
    qualities: Sequence[Quality] | None = None
    target_recall: float | None = None
    text_digest: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes that a token reads."""
        return sum(layer.num_bytes for layer in self.layers if layer is not None)

    def arranged(
        self, shards: Sequence[Sequence[np.ndarray]], bits: np.ndarray = NOWHERE
    ) -> NeuronPredictor:
        """Return the predictors for services s with the neurons shards[s][l], in that order.

        bits (words,) uint64: where sign predictors' bits are put if they fit
        """
        sizes = np.array([[ids.size for ids in shard] for shard in shards], np.int64).T
        layers = [
            None if layer is None else layer.arranged(np.concatenate([s[i] for s in shards]))
            for i, layer in enumerate(self.layers)
        ]
        return NeuronPredictor(layers, sizes, self.input_name, bits)


@dataclass(frozen=True, eq=False)
class FileLayers(Sequence[AnyLayer | None]):
    """Layers in a file, each read anew at every access.

    Errors:  ArtifactError where a layer is damaged
    """

    path: Path
    identity: ModelIdentity
    config: ModelConfig
    kinds: Sequence[Any]
    keeps_pages: bool

    def __len__(self) -> int:
        return len(self.kinds)

    @overload
    def __getitem__(self, layer: int) -> AnyLayer | None: ...
    @overload
    def __getitem__(self, layer: slice) -> Sequence[AnyLayer | None]: ...
    def __getitem__(self, layer: int | slice) -> AnyLayer | Sequence[AnyLayer | None] | None:
        """Read layer `layer`."""
        if isinstance(layer, slice):
            return [self[i] for i in range(len(self))[layer]]
        layer = range(len(self))[layer]
        prefix = f"{layer}."
        artifact = read_artifact(self.path, "predictors", self.identity, prefix)
        if not self.keeps_pages:
            forget_pages(self.path)
        return _read_layer(artifact, self.config, layer, self.kinds[layer])


def predictors_name(kind: str, weight_dtype: str = "") -> str:
    """The name of a model's file of predictors of a kind.

    Quantized weights, `weight_dtype` such as "q8", may have predictors of their own.
    """
    return "-".join(filter(None, ("predictors", kind, weight_dtype))) + ".safetensors"


def predictors_path(model_path: str | Path, kind: str, weight_dtype: str = "") -> Path:
    """The predictors that a model uses: of several those that were fitted for the highest recall.

    Of equal ones those for `weight_dtype`, and those that came with the model. Where there are
    none, where they would be written.
    Errors:  UsageError as of `artifact_folders`
    """
    names = [predictors_name(kind, dtype) for dtype in dict.fromkeys((weight_dtype, ""))]
    folders = artifact_folders(model_path)
    files = [folder / name for name in names for folder in reversed(folders)]
    found = [file for file in files if file.exists()]
    if len(found) < 2:
        return found[0] if found else folders[0] / names[0]
    identity = ModelIdentity.of(model_path)
    return max(found, key=lambda file: recall_of(file, identity))


def recall_of(path: Path, identity: ModelIdentity) -> float:
    """The recall that a file's predictors were fitted for, 0 where that or the file is unknown."""
    try:
        found = check_artifact(path, "predictors", identity).get("target_recall")
    except ArtifactError:
        return 0.0
    return found if isinstance(found, float) else 0.0


def write_predictors(path: Path, identity: ModelIdentity, predictors: Predictors) -> None:
    """Write the predictors of the model `identity`. Errors: ArtifactError."""
    tensors: dict[str, np.ndarray] = {}
    kinds = []
    for i, layer in enumerate(predictors.layers):
        kinds.append(_kind(layer))
        if layer is not None:
            arrays = {name: a for name, a in vars(layer).items() if isinstance(a, np.ndarray)}
            tensors |= {f"{i}.{name}": array for name, array in arrays.items()}
    facts = {
        "kinds": kinds,
        "input": predictors.input_name,
        "target_recall": predictors.target_recall,
        "text_digest": predictors.text_digest,
        "qualities": None
        if predictors.qualities is None
        else [asdict(quality) for quality in predictors.qualities],
    }
    write_artifact(path, "predictors", identity, tensors, facts)


def read_predictors(
    path: Path, identity: ModelIdentity, config: ModelConfig, keeps_pages: bool = True
) -> Predictors:
    """Check the predictors of the model `identity` and return them, layers as `FileLayers`.

    Without `keeps_pages` the file does not stay in the page cache.
    Errors:  ArtifactError where the file is missing, damaged or another model's
    """
    artifact = Artifact(path, {}, check_artifact(path, "predictors", identity))
    kinds = artifact.fact("kinds", list)
    input_name = artifact.fact("input", str)
    if len(kinds) != config.num_layers:
        raise ArtifactError(f"{path}: has predictors of {len(kinds)} layers; make it again")
    if input_name not in get_args(PredictorInput):
        raise ArtifactError(f"{path}: its input is unknown; make it again")
    target_recall = artifact.facts.get("target_recall")
    if target_recall is not None:
        target_recall = artifact.fact("target_recall", float)
    layers = FileLayers(path, identity, config, kinds, keeps_pages)
    for _ in layers:
        pass  # reading checks
    return Predictors(
        layers,
        cast(PredictorInput, input_name),
        _read_qualities(artifact, config.num_layers),
        target_recall,
        artifact.fact("text_digest", str),
    )


def _kind(layer: AnyLayer | None) -> str:
    if layer is None:
        return "none"
    return "sign" if isinstance(layer, SignLayer) else "lowrank"


def _read_layer(artifact: Artifact, config: ModelConfig, layer: int, kind: Any) -> AnyLayer | None:
    count, width = config.ffn_sizes[layer], config.hidden_size

    def take(name: str, dtype: Any, *shape: int) -> np.ndarray:
        array = artifact.tensor(f"{layer}.{name}", dtype, shape)
        if dtype is np.float32 and np.isnan(array).any():
            raise ArtifactError(f"{artifact.path}: {layer}.{name} holds a NaN; make it again")
        return array

    if kind == "none":
        return None
    thresholds = take("thresholds", np.float32, count)
    if kind == "sign":
        words = -(-width // 64)
        found = artifact.tensors.get(f"{layer}.bits")
        is_double = found is not None and found.shape == (count, 2 * words)
        bits = take("bits", np.uint64, count, 2 * words if is_double else words)
        center, scale = (take(name, np.float32, width) for name in ("center", "scale"))
        return SignLayer(bits, thresholds, center, scale)
    down = artifact.tensors.get(f"{layer}.down")
    if (
        kind != "lowrank"
        or down is None
        or down.ndim != 2
        or down.dtype not in (np.uint16, np.int8)
    ):
        raise ArtifactError(f"{artifact.path}: layer {layer} has no valid predictor; make it again")
    size, dtype = down.shape[0], down.dtype
    return LowRankLayer(
        take("down", dtype, size, width),
        take("scales", np.float32, size),
        take("up", dtype, size, count),
        thresholds,
    )


def _read_qualities(artifact: Artifact, num_layers: int) -> list[Quality] | None:
    found = artifact.facts.get("qualities")
    if found is None:
        return None
    try:
        read = [Quality(**{name: float(share) for name, share in one.items()}) for one in found]
        if len(read) == num_layers:
            return read
    except (TypeError, ValueError, AttributeError):
        pass
    raise ArtifactError(f"{artifact.path}: its qualities are wrong; make it again")
