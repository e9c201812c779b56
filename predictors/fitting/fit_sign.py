"""Calibrates a sign predictor: nothing is trained except one threshold a neuron."""

import numpy as np
import torch
from torch import Tensor

from hotcold.numba_kernels.decode.predict import pack_weights, sign_scores
from hotcold.predictors.fitting.layer_data import LayerData
from hotcold.predictors.fitting.thresholds import MarginFit, least_margin
from hotcold.predictors.quality import Quality
from hotcold.predictors.sign import SignLayer


def fit_sign(data: LayerData, target_recall: float) -> tuple[SignLayer, Quality]:
    """The sign predictor of a layer that reaches the target recall, and how good it is.

    Of the signs alone and signs with sizes, the one with which a token pays less: for its own bytes
    and those of the gate rows that it lets through.
    """
    found = [_fit(data, target_recall, num_planes) for num_planes in (1, 2)]
    return min(found, key=lambda pair: data.token_cost(pair[0], pair[1].computed))


def _fit(data: LayerData, target_recall: float, num_planes: int) -> tuple[SignLayer, Quality]:
    """With so many bits of each weight.

    The input is centred by its mean, which the thresholds make up for, so that its few bits hold
    what differs between tokens. It is scaled by the gate's mean magnitude in each column, and the
    weights by its inverse, so that columns of any size are rounded alike.
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
