"""Predictors as a service has them that reads its next layer's neurons ahead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numba_kernels.serve.predict_team import SignPredictors
from predictors.predictor_file import Predictors
from predictors.sign import SignLayer
from predictors.sign_team import stacked


def can_read_ahead(predictors: Predictors) -> bool:
    """Whether all of them are bits, which take little memory, and look at the FFN's input."""
    layers = [layer for layer in predictors.layers if layer is not None]
    known = bool(layers) and all(isinstance(layer, SignLayer) for layer in layers)
    return known and predictors.input_name == "ffn_input"


def shard_predictors(
    predictors: Predictors, neuron_ids: Sequence[np.ndarray]
) -> SignPredictors | None:
    """Those of a shard's neurons, neuron_ids[l] of layer l; None where they cannot be used."""
    if not can_read_ahead(predictors):
        return None
    layers = zip(predictors.layers, neuron_ids, strict=True)
    return stacked([x.arranged(ids) if isinstance(x, SignLayer) else None for x, ids in layers])
