"""The FFN of a prompt's tokens: products of gates, then what fired neurons add.

Tokens are multiplied with the blocks of neurons that they chose. Products with down are added up by
stripes (`decode.stripes`). For parts of choices for which few neurons fire, where down has a row
for each neuron, up and down are computed only for those; for the others they are products of
matrices too. The part's own neurons decide, so a token's result depends neither on its batch-mates
nor on what else a service has. In a stripe a token's parts are added in the order of blocks,
matrices before the others.
"""

import numpy as np
from numba import types

from hotcold.numba_kernels.checks import ACTIVATES_UP
from hotcold.numba_kernels.compiler import by_types, inlined_by_types, njit
from hotcold.numba_kernels.decode.rows import split_range
from hotcold.numba_kernels.decode.vectors import BothOrders, copy_numbers
from hotcold.numba_kernels.ffn.in_memory import has_rows
from hotcold.numba_kernels.ffn.prompt_plan import (
    FIRED,
    GATES,
    INNER,
    LATE_UPS,
    OUTER,
    SUMS,
    UPS,
    PromptPredictors,
    plan_choices,
    plan_predictors,
    plan_sums,
)
from hotcold.numba_kernels.ffn_arrays import TransposedArrays
from hotcold.numba_kernels.ir.operands import PART_COLUMNS
from hotcold.numba_kernels.loops.mailbox import barrier_wait
from hotcold.numba_kernels.loops.work_stealing import take_piece
from hotcold.numba_kernels.prefill.block_tokens import (
    BlockTokens,
    ChoiceRows,
    CutRows,
    StripeSums,
    is_of,
)
from hotcold.numba_kernels.prefill.ffn import (
    activate_kernel,
    add_bias_kernel,
    list_fired,
    prompt_down_kernel,
    prompt_up_kernel,
    scale_kernel,
)
from hotcold.numba_kernels.prefill.float_matmul import combine_kernel, pack_rows_kernel
from hotcold.numba_kernels.prefill.shared_rows import (
    multiply_blocks,
    num_pieces,
    prepare_blocks,
    prepare_vectors,
    share_blocks,
    vectors_of,
)


@njit(nogil=True, cache=True)
def multiplies_ups(function, waits):
    """Whether up rows are multiplied with gates; `waits`: it is asked which neurons fire."""
    return not waits or function.code in ACTIVATES_UP


@njit(nogil=True, cache=True, inline="always")
def prompt_gates(
    thread, num_threads, cells, service, x, arrays, layer, firsts, block_weights, waits, predictors,
    scratch, function,
):  # fmt: skip
    """This thread's part of a layer's gates, activated, with `multiplies_ups` times up; no checks.

    All of a service's threads call it, then `prompt_sums`, before which up and down rows have to be
    in memory, or with `multiplies_ups` before this.
    Shapes:  x (T, d) float32; firsts (B,) int64, the blocks' first rows in `arrays`; block_weights
             as in `Selection`; predictors: `PromptPredictors`, or None
    """
    plan = scratch.plan
    if thread == 0:
        scratch.counters[:] = 0
        stripes, _, _ = _of_down(arrays, layer, plan.places)
        plan_choices(
            x.shape[0], x.shape[1], _row_items(arrays.gate), arrays.starts[layer], firsts, stripes,
            arrays.stripes_at_once, block_weights, plan,
        )  # fmt: skip
        plan_predictors(layer, x.shape[1], predictors, plan)
    barrier_wait(cells, service, num_threads)
    choices, starts = plan.choices, plan.input_starts
    h = ChoiceRows(scratch.gates, plan.row_starts)
    factors = ChoiceRows(scratch.ups[:0], plan.row_starts)
    gates, places = _matrices(arrays.gate, layer, plan.places)
    ups, up_places = _matrices(arrays.up, layer, plan.places)
    if has_rows(arrays.up):
        _prepare_other_order(
            ups, up_places, x, choices, scratch.inputs, starts, thread, thread, num_threads
        )  # fmt: skip
    _multiply(
        thread, num_threads, cells, service, scratch.counters[GATES], gates, places, x, choices,
        scratch.inputs, starts, h,
    )  # fmt: skip
    if has_rows(arrays.up) and multiplies_ups(function, waits):
        factors = ChoiceRows(scratch.ups, plan.row_starts)
        share_blocks(
            scratch.counters[UPS], thread, num_threads, ups, up_places, choices, scratch.inputs,
            starts, factors,
        )  # fmt: skip
    scores = _scores(thread, num_threads, cells, service, layer, x, predictors, scratch)
    barrier_wait(cells, service, num_threads)
    count = choices.starts[choices.starts.shape[0] - 1]
    first, last = split_range(count, thread, num_threads, 1)
    activate_kernel(
        function, plan.weights[: count if block_weights.shape[0] else 0], arrays.gate_bias,
        arrays.up_bias, plan.firsts, choices, scores, factors, plan.ends, h,
        plan.num_fired, first, last,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)


@inlined_by_types
def _matrices(weights, layer, places):  # type: ignore[no-untyped-def]
    """Arrays and places of a layer's gate or up rows; those of an array are planned."""
    if isinstance(weights, types.Array):
        return lambda weights, layer, places: ((weights.reshape(weights.size),), places)
    return lambda weights, layer, places: (weights.arrays, weights.places[layer])


@inlined_by_types
def _row_items(weights):  # type: ignore[no-untyped-def]
    """Items of a row whose place is planned."""
    if isinstance(weights, types.Array):
        return lambda weights: weights.shape[1]
    return lambda weights: 0


@by_types
def _prepare_other_order(arrays, places, x, choices, tokens, starts, buffer, thread, num_threads):  # type: ignore[no-untyped-def]
    """`prepare_blocks` for up rows where they may take another order than gate rows."""
    if is_of(tokens, BothOrders):
        return prepare_blocks.py_func
    return lambda arrays, places, x, choices, tokens, starts, buffer, thread, num_threads: None


@njit(nogil=True, cache=True)
def _multiply(
    thread, num_threads, cells, service, counters, arrays, places, x, choices, tokens, starts, out
):  # fmt: skip
    """`share_blocks` of rows of `x`, which the threads make `tokens` of before; all call it."""
    prepare_blocks(arrays, places, x, choices, tokens, starts, thread, thread, num_threads)
    barrier_wait(cells, service, num_threads)
    share_blocks(counters, thread, num_threads, arrays, places, choices, tokens, starts, out)


@by_types
def _of_down(arrays, layer, no_places):  # type: ignore[no-untyped-def]
    """Stripes (B, n + 1) or (B, 0); places of rows that are an output each; items of others."""
    if is_of(arrays, TransposedArrays):
        return lambda arrays, layer, no_places: (
            _stripes_of(arrays.cuts, layer), arrays.down.places[layer], 0,
        )  # fmt: skip
    return lambda arrays, layer, no_places: (
        _stripes_of(arrays.stripes, layer), no_places[:0], arrays.down.shape[1],
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _stripes_of(stripes, layer):
    """Those of a layer: all have none, or each its own."""
    return stripes[layer if stripes.shape[2] else 0]


@by_types
def _scores(thread, num_threads, cells, service, layer, x, predictors, scratch):  # type: ignore[no-untyped-def]
    """outer . relu(inner . x) of choices' neurons, in blocks that have predictors; else none."""
    if is_of(predictors, PromptPredictors):
        return _predicted
    return lambda thread, num_threads, cells, service, layer, x, predictors, scratch: ChoiceRows(
        scratch.ups[:0], scratch.plan.row_starts
    )


def _predicted(thread, num_threads, cells, service, layer, x, predictors, scratch):  # type: ignore[no-untyped-def]
    of_model, choices, inputs = predictors.of_model, scratch.plan.choices, predictors.inputs
    hidden = ChoiceRows(predictors.hidden, predictors.hidden_starts)
    scores = ChoiceRows(predictors.scores, predictors.score_starts)
    _multiply(
        thread, num_threads, cells, service, scratch.counters[INNER],
        (of_model.inner.reshape(of_model.inner.size),), predictors.places, x, choices, inputs,
        predictors.input_starts, hidden,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    count = predictors.hidden_starts[predictors.hidden_starts.shape[0] - 1]
    first, last = split_range(count, thread, num_threads, 1)
    for i in range(first, last):
        if predictors.hidden[i] < 0:  # a NaN stays
            predictors.hidden[i] = 0
    barrier_wait(cells, service, num_threads)
    outer = of_model.outer
    _multiply(
        thread, num_threads, cells, service, scratch.counters[OUTER], outer.arrays,
        outer.places[layer], hidden, choices, inputs, predictors.rank_starts, scores,
    )  # fmt: skip
    return scores


@njit(nogil=True, cache=True)
def _count_fired(thread, num_threads, starts, scratch, counts):
    """counts[n] += tokens for which neuron n's activation is not 0: this thread's share."""
    plan = scratch.plan
    for b in range(plan.widths.shape[0]):
        width, begin = plan.widths[b], starts[b] - starts[0]
        first, last = split_range(width, thread, num_threads, 1)
        h = scratch.gates[plan.row_starts[b] : plan.row_starts[b + 1]]
        for row in range(0, h.shape[0], max(np.int64(1), width)):
            for n in range(first, last):
                counts[begin + n] += h[row + n] != 0


@njit(nogil=True, cache=True, inline="always")
def prompt_sums(
    thread, num_threads, cells, service, x, arrays, layer, block_weights, skips, counts,
    scratch, function, out, more,
):  # fmt: skip
    """This thread's part of a layer's sums over neurons, after `prompt_gates`; checks nothing.

    out, more = what is left over of the sums of stripes, as of `layer_ffn`, for all tokens. `skips`
    allows to leave out neurons whose activation is zero; thresholds do not apply to so many tokens,
    which together want nearly all. counts[n] += number of tokens for which the activation of neuron
    n, counted from the layer's first, is not 0; with drelu also its up product; or counts (0,).
    Shapes:  out (T, d), more (M, at least T, d) float32; counts int64
    """
    plan = scratch.plan
    num_tokens = x.shape[0]
    if counts.shape[0]:
        _count_fired(thread, num_threads, arrays.starts[layer], scratch, counts)
    if thread == 0:
        _, places, down_items = _of_down(arrays, layer, plan.places)
        plan_sums(
            num_tokens, x.shape[1], _row_items(arrays.gate), down_items, places,
            arrays.first_stripe // arrays.stripes_at_once, scratch.few if skips else -1.0,
            plan,
        )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    waits = skips or counts.shape[0] > 0
    is_late = has_rows(arrays.up) and not multiplies_ups(function, waits)
    if is_late:
        _scale_late(thread, num_threads, cells, service, x, arrays, layer, scratch, function)
    size = out.shape[0] * out.shape[1]
    height = scratch.levels.shape[0] // max(np.int64(1), size)
    levels = scratch.levels[: height * size].reshape(height, out.shape[0], out.shape[1])
    _add_up(thread, num_threads, cells, service, x, arrays, scratch, is_late, out, levels)
    barrier_wait(cells, service, num_threads)
    first, last = split_range(num_tokens, thread, num_threads, 1)
    num_left = plan.num_left[0]
    for t in range(first, last):
        for i in range(1, num_left):
            copy_numbers(levels[i - 1, t], more[i - 1, t])
        if num_left == 0:
            out[t] = 0
    if arrays.down_bias.shape[2]:
        of_biases = out
        if more.shape[0]:
            of_biases = more[max(num_left - 1, 0), :num_tokens]
            of_biases[first:last] = 0
        add_bias_kernel(block_weights, arrays.down_bias[layer], of_biases, first, last)


@njit(nogil=True, cache=True)
def _scale_late(thread, num_threads, cells, service, x, arrays, layer, scratch, function):
    """Multiply what down rows are multiplied with, where that is a matrix, by up products."""
    plan, inputs, counters = scratch.plan, scratch.inputs, scratch.counters[LATE_UPS]
    (up, places), h = _matrices(arrays.up, layer, plan.places), _rows_of(scratch)
    if plan.run_starts[plan.run_starts.shape[0] - 1]:  # others go neuron by neuron
        tokens, firsts, factors = (
            plan.first.tokens, plan.part_firsts, ChoiceRows(scratch.ups, plan.late_starts),
        )  # fmt: skip
        own = h
        _multiply(
            thread, num_threads, cells, service, counters, up, plan.up_places, x, tokens, inputs,
            plan.up_starts, factors,
        )  # fmt: skip
    else:  # whole blocks, which meet what gates have met
        tokens, firsts, factors = (
            plan.choices, plan.firsts, ChoiceRows(scratch.ups, plan.row_starts),
        )  # fmt: skip
        own = CutRows(h.values, h.starts, h.widths, plan.whole, plan.rows)
        share_blocks(
            counters, thread, num_threads, up, places, tokens, inputs, plan.input_starts, factors,
        )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    begin, end = split_range(tokens.starts[firsts.shape[0]], thread, num_threads, 1)
    scale_kernel(function, arrays.up_bias, firsts, tokens, factors, own, begin, end)
    barrier_wait(cells, service, num_threads)


@njit(nogil=True, cache=True)
def _rows_of(scratch):
    """What down rows are multiplied with."""
    plan = scratch.plan
    return CutRows(scratch.gates, plan.row_starts, plan.widths, plan.columns, plan.first.rows)


@njit(nogil=True, cache=True)
def _cut(parts, first, last):
    """Choices, places of work space and of down rows, and steps of parts first..last-1."""
    ids, starts, order = parts.tokens
    tokens = BlockTokens(ids, starts[first : last + 1], order)
    return tokens, parts.starts[first : last + 1], parts.places[first:last], parts.steps[first:last]


@by_types
def _add_up(thread, num_threads, cells, service, x, arrays, scratch, is_late, out, levels):  # type: ignore[no-untyped-def]
    """Add up all parts of all stripes; for compiled code."""
    function = _of_outputs if is_of(arrays, TransposedArrays) else _of_neurons
    return function.py_func


@njit(nogil=True, cache=True)
def _of_outputs(thread, num_threads, cells, service, x, arrays, scratch, is_late, out, levels):
    """Where down has a row for each output: threads share them, and go through all stripes."""
    plan = scratch.plan
    down, values, parts = arrays.down, scratch.values, plan.first
    sums = StripeSums(out, levels, parts.steps)
    prepare_blocks(
        down.arrays, parts.places, _rows_of(scratch), parts.tokens, values, parts.starts, thread,
        thread, num_threads,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    pieces = num_pieces(parts.places, sums, num_threads)
    piece = take_piece(scratch.counters[SUMS], thread, num_threads, pieces)
    while piece >= 0:
        multiply_blocks(
            down.arrays, parts.places, parts.tokens, values, parts.starts, sums, thread, piece,
            num_threads * pieces,
        )  # fmt: skip
        piece = take_piece(scratch.counters[SUMS], thread, num_threads, pieces)


@njit(nogil=True, cache=True)
def _of_neurons(thread, num_threads, cells, service, x, arrays, scratch, is_late, out, levels):
    """Where down has a row for each neuron: matrices' columns, then neurons one by one."""
    plan, values, down = scratch.plan, scratch.values, arrays.down
    first, second = plan.first, plan.second
    num_parts, num_blocks = plan.part_firsts.shape[0], plan.widths.shape[0]
    has_second = second.tokens.starts[num_parts] > 0
    has_first = first.tokens.starts[num_parts] > 0 or not has_second
    if has_second:
        if is_late:
            prepare_vectors(arrays.up, x, thread, num_threads, scratch.inputs)
            barrier_wait(cells, service, num_threads)
        _list_all(thread, num_threads, x, arrays, scratch, is_late)
    if has_first:
        pack_rows_kernel(
            _rows_of(scratch), first.tokens, values.packed, first.starts, thread, num_threads
        )
    barrier_wait(cells, service, num_threads)
    step = num_blocks if has_first and has_second else max(num_parts, 1)
    for begin in range(0, num_parts, step):
        stripe = begin // num_blocks
        if has_first:
            tokens, starts, places, steps = _cut(first, begin, begin + step)
            counters = scratch.counters[SUMS + 2 * stripe]
            part = take_piece(counters, thread, num_threads, 1)
            while part >= 0:
                combine_kernel(
                    down.reshape(down.size), places, tokens, values.packed, starts,
                    values.buffers[thread], values.sums[thread], StripeSums(out, levels, steps),
                    part, num_threads,
                )  # fmt: skip
                part = take_piece(counters, thread, num_threads, 1)
        if has_first and has_second:
            barrier_wait(cells, service, num_threads)
        if has_second:
            _add_fired(
                thread, num_threads, down, scratch, begin, step, has_first,
                StripeSums(out, levels, second.steps),
            )  # fmt: skip
            barrier_wait(cells, service, num_threads)


@njit(nogil=True, cache=True)
def _list_all(thread, num_threads, x, arrays, scratch, is_late):
    """List the neurons that fire of parts of `second`, run by run, with their up products."""
    plan = scratch.plan
    second, fired, h = plan.second, scratch.fired, _rows_of(scratch)
    own = CutRows(h.values, h.starts, h.widths, h.columns, second.rows)
    num_runs = plan.run_starts[plan.run_starts.shape[0] - 1]
    pieces = (num_runs + num_threads - 1) // num_threads
    vectors, counters = vectors_of(arrays.up, x, scratch.inputs), scratch.counters[FIRED]
    run = take_piece(counters, thread, num_threads, pieces)
    while run >= 0:
        if run < num_runs:
            list_fired(own, plan.part_firsts, second.tokens, run, fired)
            if is_late:
                prompt_up_kernel(
                    arrays.up, arrays.up_bias, vectors, second.tokens, run, num_runs, fired
                )
        run = take_piece(counters, thread, num_threads, pieces)


@njit(nogil=True, cache=True)
def _add_fired(thread, num_threads, down, scratch, first_part, num_parts, is_added, out):
    """Add the sums over the neurons that fire of parts first_part..first_part + num_parts - 1.

    is_added: to a stripe's sum of other parts
    """
    plan = scratch.plan
    num_tokens, num_blocks = out.out.shape[0], plan.widths.shape[0]
    stripe, end = first_part // num_blocks, (first_part + num_parts) // num_blocks
    steps = plan.second.steps[first_part : first_part + num_parts]
    height = scratch.sums.shape[1] // (num_tokens * PART_COLUMNS)
    sums = scratch.sums[thread, : height * num_tokens * PART_COLUMNS]
    left = plan.left[: plan.num_left[0]]
    if is_added:
        left = plan.left[stripe : stripe + 1]
    columns = (out.out.shape[1] + PART_COLUMNS - 1) // PART_COLUMNS
    # Columns that are cut by tokens are read twice.
    pieces = max(1, min(4, columns // num_threads))
    counters = scratch.counters[SUMS + 2 * stripe + 1]
    piece = take_piece(counters, thread, num_threads, pieces)
    while piece >= 0:
        first, last = split_range(columns * num_tokens, piece, num_threads * pieces, 1)
        prompt_down_kernel(
            down, plan.second.tokens, scratch.fired, steps, left, first_part,
            plan.run_starts[stripe], plan.run_starts[end], first, last,
            sums.reshape(height, num_tokens, PART_COLUMNS), out,
        )  # fmt: skip
        piece = take_piece(counters, thread, num_threads, pieces)
