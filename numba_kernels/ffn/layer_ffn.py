"""A layer's feed-forward network, by all threads of a service, over any source of rows.

The flow is the same for all sources; what differs is a step of theirs, chosen when this is
compiled for the type of the source:

    begin         what has to be read is requested                    -> False: a read failed
    clear         what the outputs are added to is zero
    compute_gates threads share the candidates' gates                 -> True: and up products
    is_well       after a barrier                                     -> False: a read failed
    find_fired    where up and down rows of what fired are
    scale         gates are multiplied by up . x + bias
    add           down rows are added up, each thread its own neurons
    is_well       after a barrier
    add_up        the output, and the biases

A source: `FfnArrays`, `TransposedArrays`, `OffloadedNeurons`, or `OffloadedExperts` of `FfnArrays`
or of `TransposedArrays`.
"""

from typing import Any

import numpy as np
from numba import types

from hotcold.numba_kernels.compiler import by_types, inlined_by_types, njit
from hotcold.numba_kernels.decode.batch_ffn import (
    keep_some_kernel,
    scale_by_products,
    thread_lists,
)
from hotcold.numba_kernels.decode.candidates import (
    FIRED_END,
    TOKENS,
    first_place,
    list_spans,
    own_part,
    shift_of,
)
from hotcold.numba_kernels.decode.ffn import by_neuron, drop_small, keep_fired_kernel, weigh
from hotcold.numba_kernels.decode.vectors import quantize_activations, quantize_for_all
from hotcold.numba_kernels.ffn import experts, offloaded, transposed
from hotcold.numba_kernels.ffn import in_memory as rows
from hotcold.numba_kernels.ffn.in_memory import Share, has_rows, stripes_of
from hotcold.numba_kernels.ffn_arrays import FfnArrays, TransposedArrays
from hotcold.numba_kernels.loops.mailbox import barrier_wait
from hotcold.numba_kernels.storage.offloaded_units import OffloadedExperts, OffloadedNeurons

_SOURCES = FfnArrays, TransposedArrays, OffloadedNeurons, OffloadedExperts
_TRANSPOSED_EXPERTS = len(_SOURCES)


def _choice(source: Any, *choices: Any) -> Any:
    """The one of `choices` for the type of a source; None for another type.

    Without a fifth one the fourth is of experts in either order of down rows.

    Its code becomes the caller's: to pass so many arrays would take longer than a short row.
    """
    kind = getattr(source, "instance_class", None)
    if kind not in _SOURCES:
        return None
    number = _SOURCES.index(kind)
    if kind is OffloadedExperts and source.types[0].instance_class is TransposedArrays:
        number = min(_TRANSPOSED_EXPERTS, len(choices) - 1)
    return choices[number].py_func


def _step(*choices: Any) -> Any:
    """A step in compiled code: the one of `choices` for its source's type."""

    @by_types
    def step(source, share, scratch):  # type: ignore[no-untyped-def]
        return _choice(source, *choices)

    return step


_begin = _step(rows.begin, rows.begin, offloaded.begin, experts.begin)
_clear = _step(rows.clear, transposed.clear, rows.clear, rows.clear, transposed.clear)
_compute_gates = _step(
    rows.compute_gates, rows.compute_gates, offloaded.compute_gates, experts.compute_gates
)
_is_well = _step(rows.is_well, rows.is_well, offloaded.is_well, offloaded.is_well)
_find_fired = _step(
    rows.find_fired, rows.find_fired, offloaded.find_fired, experts.find_fired, rows.find_fired
)
_scale = _step(rows.scale, rows.scale, offloaded.scale, rows.scale)
_add = _step(rows.add, transposed.add, rows.add, rows.add, transposed.add)
_add_up = _step(rows.add_up, transposed.add_up, rows.add_up, rows.add_up, transposed.add_up)


@inlined_by_types
def _layer_rows(source, layer):  # type: ignore[no-untyped-def]
    """`FfnArrays` of a layer; for compiled code."""
    return _choice(
        source, rows.layer_rows, transposed.layer_rows, offloaded.layer_rows, offloaded.layer_rows
    )


@inlined_by_types
def _places(source, fired_ids, first):  # type: ignore[no-untyped-def]
    """Places of up and down rows of `fired_ids`, a thread's; for compiled code."""
    return _choice(
        source, rows.places, rows.places, offloaded.places, offloaded.places, rows.places
    )


@by_types
def _vectors(gate, up, x, inputs, thread):  # type: ignore[no-untyped-def]
    """x as gate and up rows take it; for compiled code."""
    if isinstance(gate, types.Array):
        return lambda gate, up, x, inputs, thread: quantize_activations(gate, x, inputs, thread)
    return lambda gate, up, x, inputs, thread: quantize_for_all(
        gate.arrays + up.arrays, x, inputs, thread
    )


@inlined_by_types
def note_reads(source, reply):  # type: ignore[no-untyped-def]
    """The reply says what was read so far; for compiled code."""
    return _choice(
        source, rows.note_reads, rows.note_reads, offloaded.note_reads, offloaded.note_reads
    )


@njit(nogil=True, cache=True)
def layer_ffn(
    thread, num_threads, cells, service, layer, selection, thresholds, x, source, scratch, function,
    out, more,
):  # fmt: skip
    """A layer's FFN: this thread's part; False where a read failed. Checks nothing.

    out[t] = sum over blocks b of w[t, b] * (down_bias[b] + sum over its neurons n of
        fn(gate[n] . x[t] + gate_bias[n]) * (up[n] . x[t] + up_bias[n]) * down[n])
    Over the neurons and with the weights of a `Selection`, whose ids are rows of the layer.
    `thresholds` decide which of them fire; those of thread t are `scratch.counts[t]` of
    scratch.fired_ids from scratch.firsts[t] on.
    Neurons are added up by `decode.stripes`: `out` is the sum that is left over first, `more`
    others.
    Shapes:  x, out (T, d), T <= 32; more (M, at least T, d), M = 0 where the service has all
             stripes; cells of `SharedBuffers`
    Dtypes:  x, out, more float32; without `BlockRows` up as gate, and down `is_summed`
    Units:   reads d weights for each candidate, 2 d more (one matrix up, one down) if it fired
    Source:  PowerInfer section 5.4; the early stop at a silent gate: PowerInfer-2 section 4.4

    All of a service's threads call it. `out` is complete when all have returned; until then none
    may start another request. The result does not depend on timing.
    """
    num_tokens, rows = x.shape[0], _layer_rows(source, layer)
    spans = list_spans(selection, rows.starts[layer], num_tokens, scratch.spans[thread])
    stripes = stripes_of(rows, layer)
    first = first_place(spans, selection, stripes, thread, num_threads)
    scratch.firsts[thread], fired_ids = first, scratch.fired_ids[first:]
    flat_gates = scratch.gates[first * num_tokens :]
    share = Share(
        thread, num_threads, cells, service, layer, selection, spans, thresholds, function, x,
        _vectors(rows.gate, rows.up, x, scratch.inputs, thread), rows,
        fired_ids, _places(source, fired_ids, first), scratch.fired_masks[first:],
        flat_gates, by_neuron(flat_gates, num_tokens),
        thread_lists(scratch.lists, thread, num_tokens), stripes, out, more,
    )  # fmt: skip
    if not _begin(source, share, scratch):
        return False
    _clear(source, share, scratch)
    has_ups = _compute_gates(source, share, scratch)
    barrier_wait(cells, service, num_threads)
    if thread == 0:
        scratch.counters[:] = 0  # also where a read has failed: the next request begins anew
        _leave_out(num_threads, scratch.counts, scratch.up_counts, scratch.num_sums)
    if not _is_well(source, share, scratch):
        return False
    num_fired = _keep_fired(share, has_ups, scratch)
    scratch.counts[thread] = scratch.up_counts[thread] = num_fired
    _find_fired(source, share, scratch)
    if not has_ups:
        _scale(source, share, scratch)
    weigh(selection.block_weights, spans, share.gates)
    if has_rows(rows.up) and thresholds.product >= 0:
        scratch.counts[thread] = drop_small(
            fired_ids, share.places, share.fired_masks, scratch.counts[thread], share.gates,
            rows.down_norms, thresholds.product,
        )  # fmt: skip
    _add(source, share, scratch)
    barrier_wait(cells, service, num_threads)
    if not _is_well(source, share, scratch):
        return False
    _add_up(source, share, scratch)
    return True


@njit(nogil=True, cache=True)
def _leave_out(num_threads, counts, up_counts, num_sums):
    """Threads from number `num_threads` on have nothing: they are left out of the request."""
    for thread in range(num_threads, counts.shape[0]):
        counts[thread] = up_counts[thread] = num_sums[thread] = 0


@njit(nogil=True, cache=True, inline="always")
def _keep_fired(share, has_ups, scratch):
    """Gather the thread's candidates that fire, span after span; returns their number.

    With `has_ups`, where all are kept, their gates are multiplied by up products.
    """
    num_tokens, num_fired, selection, rows = share.x.shape[0], 0, share.selection, share.rows
    products, gates = by_neuron(scratch.values, num_tokens), share.gates
    for span in share.spans:
        begin, end = own_part(span, selection, share.stripes, share.thread, share.num_threads)
        before, shift = num_fired, shift_of(span)
        ids, masks = share.fired_ids[before:], share.fired_masks[before:]
        if num_tokens == 1:
            num_fired += keep_fired_kernel(
                selection.ids, selection.token_masks, shift, share.thresholds.gate, begin, end,
                scratch.values[begin:end], ids, masks, share.flat_gates[before:],
            )  # fmt: skip
        else:
            num_fired += keep_some_kernel(
                rows.gate_bias, selection.ids, selection.token_masks, np.uint32(span[TOKENS]),
                shift, share.function, share.thresholds.gate, begin, end, products[begin:end], ids,
                masks, gates[before:],
            )  # fmt: skip
        if has_ups:
            scale_by_products(
                rows.up_bias, ids, masks, by_neuron(scratch.ups, num_tokens)[begin:end],
                share.function, gates[before:num_fired],
            )  # fmt: skip
        span[FIRED_END] = num_fired
    return num_fired
