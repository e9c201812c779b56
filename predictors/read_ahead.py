"""Predictors as a service has them that reads its next layer's neurons ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hotcold.numba_kernels.serve.predict_team import SignPredictors
from hotcold.predictors.predictor_file import Predictors
from hotcold.predictors.sign import SignLayer
from hotcold.predictors.sign_team import NOWHERE, bit_starts, stacked


def words_to_read_ahead(predictors: Predictors) -> int:
    """Words of their bits; 0 where neurons cannot be read ahead by them.

    All have to be bits, which take little memory, and to look at the FFN's input.
    """
    num_words = 0
    for layer in predictors.layers if predictors.input_name == "ffn_input" else ():
        if isinstance(layer, SignLayer):
            num_words += layer.bits.size
        elif layer is not None:
            return 0
    return num_words


def shard_predictors(
    predictors: Predictors, neuron_ids: Sequence[np.ndarray], among: np.ndarray | None = None
) -> SignPredictors | None:
    """Those of a shard's neurons, neuron_ids[l] of layer l; None where they cannot be used.

    among (L, 2) int64: how many of each layer's neurons come before the shard's among those of
    `Predictors.arranged`, and how many these are. Then bits are not taken, but still to be added:
    `predictors.sign_team.stacked` laid all of them in one array.
    """
    if predictors.input_name != "ffn_input":
        return None
    layers, row_words = [], np.zeros(len(neuron_ids), np.int64)
    for i, (layer, ids) in enumerate(zip(predictors.layers, neuron_ids, strict=True)):
        if layer is not None and not isinstance(layer, SignLayer):
            return None
        if layer is not None:
            row_words[i] = layer.bits.shape[1]
            bits = layer.bits if among is None else layer.bits[:, :0]
            layer = replace(layer, bits=bits).arranged(ids)
        layers.append(layer)
    if not row_words.any():
        return None
    found = stacked(layers)
    if among is None:
        return found
    starts = bit_starts(among[:, 1], row_words)[0] + among[:, 0] * row_words
    return found._replace(starts=starts, row_words=row_words, bits=NOWHERE)
