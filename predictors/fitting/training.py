"""Fits a model's predictors, layer by layer, to recorded inputs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.predictors.fitting.fit_lowrank import fit_lowrank
from hotcold.predictors.fitting.fit_sign import fit_sign
from hotcold.predictors.fitting.inputs import LayerInputs
from hotcold.predictors.fitting.layer_data import LayerData
from hotcold.predictors.fitting.read_prices import ReadPrices
from hotcold.predictors.predictor_file import Predictors, Quality
from hotcold.predictors.stacked import AnyLayer

_Fit = Callable[[LayerData, float], tuple[AnyLayer, Quality]]
_FITS: dict[str, tuple[_Fit, ...]] = {
    "sign": (fit_sign,),
    "lowrank": (fit_lowrank,),
    "best": (fit_sign, fit_lowrank),
}


@dataclass(frozen=True)
class Fitted:
    """A layer's predictor, None for none, and its quality.

    share_of_gates: a token's cost with it, as a share of the cost of all gate rows
    """

    layer: AnyLayer | None
    quality: Quality
    share_of_gates: float


def train_predictors(
    model_path: Path,
    config: ModelConfig,
    inputs: LayerInputs,
    kind: str,
    target_recall: float,
    measure: Callable[[], ReadPrices],
) -> Iterator[Fitted]:
    """Yield each layer's predictor and its quality on tokens that it was not fitted to.

    `kind` "best" chooses for each layer what costs a token least, at the prices of `measure`: one
    of the kinds, or no predictor. A gate row's bytes are those of `config.dtype`.
    Errors:  UsageError, CheckpointError, ArtifactError
    """
    if kind not in _FITS:
        raise UsageError(f"no kind of predictor named {kind!r}; give {' or '.join(_FITS)}")
    if not 0.5 <= target_recall < 1:
        raise UsageError(f"--recall is {target_recall}; give a share from 0.5 to below 1")
    checkpoint, prices = Checkpoint(model_path), measure()
    for layer in range(config.num_layers):
        if not config.ffn_sizes[layer]:
            yield Fitted(None, Quality(recall=1.0, precision=1.0, computed=0.0, active=0.0), 0.0)
            continue
        data = LayerData.load(checkpoint, config, layer, inputs.inputs[layer], prices)
        found = [_fitted(data, *fit(data, target_recall)) for fit in _FITS[kind]]
        if kind == "best":
            found.append(Fitted(None, Quality.of_all(data.check.fires), 1.0))
        yield min(found, key=lambda fitted: fitted.share_of_gates)


def _fitted(data: LayerData, layer: AnyLayer, quality: Quality) -> Fitted:
    return Fitted(layer, quality, data.token_cost(layer, quality.computed) / data.gates_cost)


def gather(made: Sequence[Fitted], inputs: LayerInputs, target_recall: float) -> Predictors:
    """Return all layers' predictors, for `write_predictors`."""
    layers = [fitted.layer for fitted in made]
    qualities = [fitted.quality for fitted in made]
    return Predictors(layers, "ffn_input", qualities, target_recall, inputs.text_digest)
