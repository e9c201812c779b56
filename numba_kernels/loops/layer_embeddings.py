"""What is left of a layer whose output is scaled, after its FFN: `scales_output` of a layer order.

    output_scale * (hidden + norm(projection . (gelu(gate . hidden) * e)))
    e = (context_norm(context . embedded) + own) / sqrt(2)

`own` is the layer's own embedding of the token; models without such embeddings have only the scale.
Source:  Gemma 3n and Gemma 4, transformers/models/gemma4/modeling_gemma4.py
"""

import math

import numpy as np

from hotcold.numba_kernels.checks import GELU_TANH
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import Activation, activate
from hotcold.numba_kernels.decode.norm import rms_norm_kernel
from hotcold.numba_kernels.decode.vectors import quantize_activations
from hotcold.numba_kernels.loops.mailbox import barrier_wait
from hotcold.numba_kernels.loops.work_stealing import work_stealing_rows

_GELU = Activation(GELU_TANH, np.float32(0))
_HALF_ROOT = np.float32(math.sqrt(0.5))


@njit(nogil=True, cache=True)
def mix_embedding(gate, context, own, norm_weight, epsilon, out):
    """out = gelu(gate) * e, where `context` is not normed yet; all (P,) float32, no checks."""
    rms_norm_kernel(context, norm_weight, epsilon, out)
    for i in range(out.shape[0]):
        out[i] = activate(_GELU, gate[i]) * ((out[i] + own[i]) * _HALF_ROOT)


@njit(nogil=True, cache=True)
def own_embedding(buffers, layer, size, t):
    """Token t's embedding of the layer: (size,) of `layer_embeddings`."""
    return buffers.layer_embeddings[t, layer * size : (layer + 1) * size]


@njit(nogil=True, cache=True)
def layer_part(
    thread, num_threads, service, layer, first, end, buffers, arrays, epsilon, scratch, counters
):  # fmt: skip
    """This thread's share of projection . (gelu(gate . hidden) * e) of tokens first..end-1.

    Written to scratch.parts, which all threads may read then. `arrays` is `PerLayerArrays`, or None
    where there are none; counters: three kinds
    """
    if arrays is None:
        return
    hidden, embedded = buffers.hidden[first:end], buffers.embedded[first:end]
    count, inputs, none = end - first, scratch.inputs, hidden[0, :0]
    weights = arrays.gate[layer]
    x = quantize_activations(weights, hidden, inputs, thread)
    work_stealing_rows(
        counters[0], thread, num_threads, weights, none, x, hidden[:0], scratch.gates[:count], 0
    )
    weights = arrays.context[layer]
    x = quantize_activations(weights, embedded, inputs, thread)
    work_stealing_rows(
        counters[1], thread, num_threads, weights, none, x, hidden[:0], scratch.contexts[:count], 0
    )
    barrier_wait(buffers.cells, service, num_threads)
    mixed, size = scratch.mixed[thread, :count], scratch.gates.shape[1]
    for t in range(count):
        mix_embedding(
            scratch.gates[t], scratch.contexts[t], own_embedding(buffers, layer, size, first + t),
            arrays.context_norm, epsilon, mixed[t],
        )  # fmt: skip
    weights = arrays.projection[layer]
    x = quantize_activations(weights, mixed, inputs, thread)
    work_stealing_rows(
        counters[2], thread, num_threads, weights, none, x, hidden[:0], scratch.parts[:count], 0
    )
    barrier_wait(buffers.cells, service, num_threads)


@njit(nogil=True, cache=True)
def scaled_output(hidden, part, norm_weight, epsilon, scale, out):
    """out = scale * (hidden + norm(part)), without part where norm_weight is (0,); no checks."""
    if norm_weight.shape[0]:
        rms_norm_kernel(part, norm_weight, epsilon, out)
        for i in range(out.shape[0]):
            out[i] = scale * (hidden[i] + out[i])
    else:
        for i in range(out.shape[0]):
            out[i] = scale * hidden[i]
