"""Sign predictors of a service that reads the next layer's neurons ahead, from storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hotcold.numba_kernels.loops.predict_team import SignPredictors
from hotcold.predictors.predictor_file import Predictors
from hotcold.predictors.sign import SignLayer
from hotcold.predictors.stacked import NOWHERE, AnyLayer, bit_starts, stacked_signs


def words_to_read_ahead(predictors: Predictors) -> int:
    """Return the number of words of bits; 0 where these predictors cannot read ahead.

    All must be sign predictors, which take little memory, of the FFN's input.
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
    """Return the predictors of a shard's neurons, neuron_ids[l] of layer l; None if unusable.

    among (L, 2) int64: for each layer the number of neurons before the shard's in the order of
    `Predictors.arranged`, and the total. Then the result has no bits: the caller adds the array
    into which `predictors.stacked.stacked_signs` wrote those of all shards.
    """
    if predictors.input_name != "ffn_input":
        return None
    layers: list[AnyLayer | None] = []
    row_words = np.zeros(len(neuron_ids), np.int64)
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
    found = stacked_signs(layers)
    if among is None:
        return found
    starts = bit_starts(among[:, 1], row_words)[0] + among[:, 0] * row_words
    return found._replace(starts=starts, row_words=row_words, bits=NOWHERE)
