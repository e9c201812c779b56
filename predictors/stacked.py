"""Predictors of all layers, one after the other in a few arrays, as compiled code takes them."""

import numpy as np
from numpy.typing import ArrayLike

from hotcold.model.weights.memory import aligned_empty
from hotcold.numba_kernels.loops.predict_team import (
    LowRankPredictors,
    SignPredictors,
    bit_rows,
    float16_matrix,
    int8_matrix,
)
from hotcold.predictors.lowrank import LowRankLayer
from hotcold.predictors.sign import SignLayer

AnyLayer = SignLayer | LowRankLayer

NOWHERE = np.zeros(0, np.uint64)
_LINE_BYTES = 64


def stacked_signs(layers: list[AnyLayer | None], into: np.ndarray = NOWHERE) -> SignPredictors:
    """Move the sign predictors out of `layers`; without one a layer has no neurons.

    A layer's arrays are freed once they are copied. Bits are written to `into` (words,) uint64
    where they fit.
    """
    counts = [one.num_neurons if isinstance(one, SignLayer) else 0 for one in layers]
    words = [one.bits.shape[1] if isinstance(one, SignLayer) else 0 for one in layers]
    width = max((one.center.size for one in layers if isinstance(one, SignLayer)), default=0)
    offsets, row_words = _offsets(counts), np.array(words, np.int64)
    starts, num_words = bit_starts(counts, row_words)
    bits = into if into.size >= num_words else aligned_empty((num_words,), np.uint64)
    thresholds = np.empty(offsets[-1], np.float32)
    centers, scales = (np.zeros((len(layers), width), np.float32) for _ in range(2))
    for i, layer in enumerate(layers):
        if isinstance(layer, SignLayer):
            bits[starts[i] : starts[i] + layer.bits.size] = layer.bits.reshape(-1)
            thresholds[offsets[i] : offsets[i + 1]] = layer.thresholds
            centers[i], scales[i] = layer.center, layer.scale
            layers[i] = None
    return SignPredictors(offsets, starts, row_words, bits, thresholds, centers, scales)


def stacked_lowrank(layers: list[AnyLayer | None]) -> LowRankPredictors:
    """Move the low-rank predictors out of `layers`, as `stacked_signs`."""
    sizes = np.zeros((len(layers), 5), np.int64)  # neurons, hidden, item bytes, down, up
    width = 0
    for i, layer in enumerate(layers):
        if isinstance(layer, LowRankLayer):
            width = layer.down.shape[1]
            sizes[i, :3] = layer.num_neurons, layer.hidden_size, layer.down.itemsize
            sizes[i, 3:] = layer.down.nbytes, layer.up.nbytes
    offsets, hidden_offsets = _offsets(sizes[:, 0]), _offsets(sizes[:, 1])
    ends = _offsets(-(-sizes[:, 3:].reshape(-1) // _LINE_BYTES) * _LINE_BYTES)
    starts, weights = ends[:-1].reshape(-1, 2), aligned_empty((int(ends[-1]),), np.uint8)
    scales = np.empty(hidden_offsets[-1], np.float32)
    thresholds = np.empty(offsets[-1], np.float32)
    for i, layer in enumerate(layers):
        if isinstance(layer, LowRankLayer):
            for start, matrix in zip(starts[i], (layer.down, layer.up), strict=True):
                weights[start : start + matrix.nbytes] = matrix.reshape(-1).view(np.uint8)
            scales[hidden_offsets[i] : hidden_offsets[i + 1]] = layer.scales
            thresholds[offsets[i] : offsets[i + 1]] = layer.thresholds
            layers[i] = None
    item_bytes = sizes[:, 2].copy()
    return LowRankPredictors(
        width, offsets, hidden_offsets, starts, item_bytes, weights, scales, thresholds
    )


def sign_layer(predictors: SignPredictors, layer: int) -> SignLayer:
    """A layer's sign predictor, as views."""
    part = predictors.thresholds[predictors.offsets[layer] : predictors.offsets[layer + 1]]
    center, scale = predictors.centers[layer], predictors.scales[layer]
    return SignLayer(bit_rows.py_func(predictors, layer), part, center, scale)


def lowrank_layer(predictors: LowRankPredictors, layer: int) -> LowRankLayer:
    """A layer's low-rank predictor, as views."""
    part = predictors.thresholds[predictors.offsets[layer] : predictors.offsets[layer + 1]]
    first, last = predictors.hidden_offsets[layer : layer + 2]
    kind = int8_matrix if predictors.item_bytes[layer] == 1 else float16_matrix
    matrix = kind.py_func
    at_down, at_up = predictors.starts[layer]
    down = matrix(predictors.weights, at_down, last - first, predictors.width)
    up = matrix(predictors.weights, at_up, last - first, part.size)
    return LowRankLayer(down, predictors.scales[first:last], up, part)


def bit_starts(counts: ArrayLike, row_words: np.ndarray) -> tuple[np.ndarray, int]:
    """Return where each layer's rows begin, counts[l] of row_words[l] words, and the total."""
    ends = np.cumsum(np.asarray(counts, np.int64) * row_words)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    return starts, int(ends[-1])


def _offsets(counts: ArrayLike) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
