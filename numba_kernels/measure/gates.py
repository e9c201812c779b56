"""What a token computes to know which neurons fire: gates, all or listed, or scores."""

from __future__ import annotations

import numpy as np

from hotcold.numba_kernels.checks import RELU
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import Activation
from hotcold.numba_kernels.decode.ffn import gate_values_kernel
from hotcold.numba_kernels.decode.predict import (
    lowrank_hidden_kernel,
    lowrank_scores_kernel,
    pack_planes_kernel,
    sign_scores_kernel,
)
from hotcold.numba_kernels.decode.vectors import quantize_activations

_NO_BIAS = np.empty(0, np.float32)


@njit(nogil=True, cache=True)
def gates_of(gate, ids, x, room, values):  # type: ignore[no-untyped-def]
    """values[i] = relu(gate[ids[i]] . x[0]), of all rows where `ids` is empty.

    Shapes:  gate (N, row items), ids (A,), x (1, d), values (A,) or (N,)
    """
    vectors = quantize_activations(gate, x, room, 0)
    function, count = Activation(RELU, np.float32(0)), values.shape[0]
    gate_values_kernel(gate, _NO_BIAS, ids, vectors, function, 0, count, count, values)


@njit(nogil=True, cache=True)
def signs_of(bits, planes, x, center, scale, thresholds, out):  # type: ignore[no-untyped-def]
    """Scores of a sign predictor for each of several layers.

    Shapes:  bits (L, N, P * W), planes (3, W) uint64; x, center, scale (d,), thresholds,
             out (N,) float32
    """
    for layer in range(bits.shape[0]):
        unit = pack_planes_kernel(x, center, scale, planes)
        sign_scores_kernel(bits[layer], planes, unit, x.shape[0], thresholds, out, 0, out.shape[0])


@njit(nogil=True, cache=True)
def lowrank_of(down, scales, up, x, hidden, thresholds, out):  # type: ignore[no-untyped-def]
    """Scores of a low-rank predictor for each of several layers.

    Shapes:  down (L, r, d), up (L, r, N); scales (r,), x (1, d), hidden (1, r), thresholds,
             out (N,) float32
    """
    for layer in range(down.shape[0]):
        lowrank_hidden_kernel(down[layer], scales, x, hidden, 0, scales.shape[0])
        lowrank_scores_kernel(up[layer], hidden[0], thresholds, out, 0, out.shape[0])
