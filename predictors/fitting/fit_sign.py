"""Fits a sign predictor: one threshold for each neuron."""

import numpy as np
import torch
from torch import Tensor

from hotcold.numba_kernels.decode.predict import pack_weights, sign_scores
from hotcold.predictors.fitting.layer_data import LayerData
from hotcold.predictors.fitting.thresholds import MarginFit, least_margin
from hotcold.predictors.predictor_file import Quality
from hotcold.predictors.sign import SignLayer


def fit_sign(data: LayerData, target_recall: float) -> tuple[SignLayer, Quality]:
    """Return a layer's sign predictor that reaches the target recall, and its quality.

    Of one and two bits a weight, the one whose own bytes and selected gate rows cost a token less.
    """
    found = [_fit(data, target_recall, num_planes) for num_planes in (1, 2)]
    return min(found, key=lambda pair: data.token_cost(pair[0], pair[1].computed))


def _fit(data: LayerData, target_recall: float, num_planes: int) -> tuple[SignLayer, Quality]:
    """Fit with `num_planes` bits of each weight.

    The mean is subtracted from the input, so that its few bits hold differences between tokens;
    thresholds include it. Inputs are scaled by the gate's mean magnitude in each column, weights by
    its inverse, so that columns are rounded alike.
    """
    scale = data.gate.abs().mean(dim=0).clamp_min(1e-30).numpy()
    bits = pack_weights(data.gate.numpy() / scale, num_planes)
    center = data.fit.inputs.mean(dim=0).numpy()
    zeros = np.zeros(bits.shape[0], np.float32)

    def estimate(inputs: Tensor) -> Tensor:
        return torch.from_numpy(sign_scores(bits, inputs.numpy(), zeros, center, scale))

    margins = MarginFit.of(estimate(data.fit.inputs), data.fit.pre_activations)
    calibration = margins.margins(estimate(data.calibrate.inputs))
    least = least_margin(calibration, data.calibrate.fires, target_recall)
    thresholds = margins.thresholds(least)
    computed = estimate(data.check.inputs) > thresholds
    layer = SignLayer(bits, thresholds.numpy(), center, scale)
    return layer, Quality.of(computed, data.check.fires)
