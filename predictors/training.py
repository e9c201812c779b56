"""Makes the predictors of a model, layer by layer, from what the profiler recorded."""

from collections.abc import Callable, Iterator
from pathlib import Path

from model.config.model_config import ModelConfig
from model.errors import UsageError
from model.files.checkpoint import Checkpoint
from predictors.fit_lowrank import fit_lowrank
from predictors.fit_sign import fit_sign
from predictors.inputs import LayerInputs
from predictors.layer_data import LayerData
from predictors.predictor_file import AnyLayer, Predictors
from predictors.quality import Quality

_Fit = Callable[[LayerData, float], tuple[AnyLayer, Quality]]
_FITS: dict[str, tuple[_Fit, ...]] = {
    "sign": (fit_sign,),
    "lowrank": (fit_lowrank,),
    "best": (fit_sign, fit_lowrank),
}


def train_predictors(
    model_path: Path, config: ModelConfig, inputs: LayerInputs, kind: str, target_recall: float
) -> Iterator[tuple[AnyLayer, Quality]]:
    """Yield each layer's predictor and how good it is on tokens that it was not fitted to.

    `kind` "best" takes, for each layer, the kind that reads the fewest bytes a token. What a gate
    row takes depends on its format, `config.dtype`.
    Errors:  UsageError, CheckpointError, ArtifactError
    """
    if kind not in _FITS:
        raise UsageError(f"no kind of predictor named {kind!r}; give {' or '.join(_FITS)}")
    if not 0.5 <= target_recall < 1:
        raise UsageError(f"--recall is {target_recall}; give a share from 0.5 to below 1")
    if not config.is_sparse:
        raise UsageError(
            f"this model's activation is {config.activation_fn}, none of whose outputs is zero: "
            "there is nothing to predict; use --mode dense"
        )
    checkpoint = Checkpoint(model_path)
    for layer in range(config.num_layers):
        data = LayerData.load(checkpoint, config, layer, inputs.inputs[layer])
        found = [fit(data, target_recall) for fit in _FITS[kind]]
        yield min(found, key=lambda pair: data.token_bytes(pair[0].num_bytes, pair[1].computed))


def gather(
    made: list[tuple[AnyLayer, Quality]], inputs: LayerInputs, target_recall: float
) -> Predictors:
    """All layers together, ready to be written."""
    layers = [layer for layer, _ in made]
    qualities = [quality for _, quality in made]
    return Predictors(layers, "ffn_input", qualities, target_recall, inputs.text_digest)
