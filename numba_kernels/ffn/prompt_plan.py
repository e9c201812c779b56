"""What a prompt's FFN works on: choices of blocks, their parts in stripes, and how sums meet.

A choice is a token and one of its blocks of neurons (`prefill.block_tokens`), a part what a block
has in a stripe (`decode.stripes`), some neighbours of which are one here. One thread plans a layer
while the others wait.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.block_rows import BEGIN, END, IS_SECOND, NUM_PLACE_NUMBERS, ROW_ITEMS
from hotcold.numba_kernels.compiler import by_types, njit
from hotcold.numba_kernels.decode.stripes import meet
from hotcold.numba_kernels.decode.vectors import aligned_zeros, copy_numbers
from hotcold.numba_kernels.ffn_arrays import (
    ExpertPredictors,
    FfnArrays,
    TransposedArrays,
    most_rows,
)
from hotcold.numba_kernels.ir.operands import PART_COLUMNS
from hotcold.numba_kernels.ir.target import LANES
from hotcold.numba_kernels.loops.work_stealing import new_block_counters
from hotcold.numba_kernels.prefill.block_tokens import (
    CLEARS,
    IS_WHOLE,
    LEVEL,
    MERGES,
    NUM_STEP_NUMBERS,
    BlockTokens,
    is_of,
)
from hotcold.numba_kernels.prefill.ffn import RUN, FiredNeurons
from hotcold.numba_kernels.prefill.float_items import items_in, row_stride
from hotcold.numba_kernels.prefill.shared_rows import (
    Tokens,
    new_tokens,
    space_of,
)

GATES, UPS, INNER, OUTER, LATE_UPS, FIRED, SUMS = range(7)  # of SUMS two kinds a stripe


class Parts(NamedTuple):
    """Choices of parts of blocks, stripe after stripe: part s of S * B is of block s % B.

    tokens: by part; rows: each choice's row in its block; starts (parts + 1,) int64: where parts
    begin among what down rows are multiplied with; places (parts, 4) int64 of down rows, as in
    `block_rows`; steps (parts, 4) int64 of `StripeSums`
    """

    tokens: BlockTokens
    rows: np.ndarray
    starts: np.ndarray
    places: np.ndarray
    steps: np.ndarray


class PromptFfnScratch(NamedTuple):
    """Work space of a shard for prompts of up to T tokens; of a layer, B blocks and S stripes.

    choices: of blocks; rows, weights: of choices, as in `Parts`, and factors; firsts, widths (B,)
    int64; places (B, 4): of gate and up rows; whole (B, 2), columns (S * B, 2): first and last
    column of blocks, of parts; ends (B, S + 1): where stripes begin in blocks, and end
    gates, ups float32: a row for each choice, those of blocks from row_starts (B + 1,) on
    num_fired (S, choices) int64
    first, second: parts that are added up first and then, of rows of outputs those in the second
    format, else those whose few neurons that fire go one by one: up to the share `few`
    part_firsts (S * B,): first rows of parts; up_places, up_starts, late_starts: of late products
    with up rows, where their inputs and they begin
    tree (S, 4), left (S, 4): steps of stripes, of what is left over of parts one by one;
    stack (S,), num_left (1,): sums that are left over
    levels, sums (threads, …) float32: of `StripeSums`, of `prompt_down_kernel`
    inputs, values: what gate and up rows, and down rows are multiplied with; inputs of blocks begin
    at input_starts (B + 1,)
    fired, run_starts (S + 1,): neurons one by one, and where a stripe's runs begin
    counters of pieces taken
    """

    choices: BlockTokens
    rows: np.ndarray
    weights: np.ndarray
    firsts: np.ndarray
    widths: np.ndarray
    places: np.ndarray
    whole: np.ndarray
    columns: np.ndarray
    ends: np.ndarray
    gates: np.ndarray
    ups: np.ndarray
    row_starts: np.ndarray
    num_fired: np.ndarray
    first: Parts
    second: Parts
    few: float
    part_firsts: np.ndarray
    up_places: np.ndarray
    up_starts: np.ndarray
    late_starts: np.ndarray
    tree: np.ndarray
    left: np.ndarray
    stack: np.ndarray
    num_left: np.ndarray
    levels: np.ndarray
    sums: np.ndarray
    inputs: Tokens
    values: Tokens
    input_starts: np.ndarray
    fired: FiredNeurons
    run_starts: np.ndarray
    counters: np.ndarray


def new_prompt_ffn_scratch(
    arrays: FfnArrays | TransposedArrays, num_threads: int, num_tokens: int, width: int,
    kinds: tuple[type, type], few: float,
) -> PromptFfnScratch:  # fmt: skip
    """Work space for the worst choices; what is not used of it takes no memory.

    kinds: what gate and up rows, and down rows are multiplied as (`shared_rows`); few: up to which
    share of a part's neurons they go one by one
    """
    starts, is_transposed = arrays.starts, isinstance(arrays, TransposedArrays)
    num_blocks, num_neurons = starts.shape[1] - 1, most_rows(starts)
    every = arrays.cuts if isinstance(arrays, TransposedArrays) else arrays.stripes
    sizes = np.diff(starts)[:, :, None]
    if every.shape[2]:
        sizes = np.diff(every[:, :, :: arrays.stripes_at_once])
    num_stripes, most_parts = sizes.shape[2], int(np.count_nonzero(sizes, axis=(1, 2)).max())
    widest, num_parts = int(sizes.max(initial=1)), num_blocks * num_stripes
    height, order = 2 * num_stripes.bit_length(), np.arange(num_tokens, dtype=np.int64)

    def ints(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.int64)

    def parts() -> Parts:
        chosen, of_parts = ints(num_tokens * most_parts), ints(num_parts + 1)
        tokens = BlockTokens(chosen, of_parts, order)
        places, steps = ints(num_parts, NUM_PLACE_NUMBERS), ints(num_parts, NUM_STEP_NUMBERS)
        return Parts(tokens, np.zeros_like(chosen), np.zeros_like(of_parts), places, steps)

    of_inputs, of_values = kinds
    num_runs = 0 if is_transposed else num_parts + 2 * num_neurons // RUN
    num_listed = 0 if is_transposed else num_tokens * num_neurons
    return PromptFfnScratch(
        choices=BlockTokens(ints(num_tokens * num_blocks), ints(num_blocks + 1), order),
        rows=ints(num_tokens * num_blocks),
        weights=np.zeros(num_tokens * num_blocks, np.float32),
        firsts=ints(num_blocks),
        widths=ints(num_blocks),
        places=ints(num_blocks, NUM_PLACE_NUMBERS),
        whole=ints(num_blocks, 2),
        columns=ints(num_parts, 2),
        ends=ints(num_blocks, num_stripes + 1),
        gates=aligned_zeros((num_tokens * num_neurons,)),
        ups=aligned_zeros((num_tokens * num_neurons,)),
        row_starts=ints(num_blocks + 1),
        num_fired=ints(num_stripes, num_tokens * num_blocks),
        first=parts(),
        second=parts(),
        few=few,
        part_firsts=ints(num_parts),
        up_places=ints(num_parts, NUM_PLACE_NUMBERS),
        up_starts=ints(num_parts + 1),
        late_starts=ints(num_parts + 1),
        tree=ints(num_stripes, NUM_STEP_NUMBERS),
        left=ints(num_stripes, NUM_STEP_NUMBERS),
        stack=ints(num_stripes),
        num_left=ints(1),
        levels=aligned_zeros((height * num_tokens * width,)),
        sums=aligned_zeros((num_threads, (height + 1) * num_tokens * PART_COLUMNS)),
        inputs=new_tokens(of_inputs, num_threads, num_tokens, width, max(num_blocks, most_parts)),
        # Rows that are weighted and summed are longer, and some are read behind the last one.
        values=new_tokens(
            of_values, num_threads, num_tokens + LANES, widest + 2 * LANES, most_parts
        ),
        input_starts=ints(num_blocks + 1),
        fired=FiredNeurons(
            ints(num_runs, 5),
            np.zeros(num_listed, np.int32),
            np.zeros(num_listed, np.float32),
            np.zeros(num_runs * (num_tokens + 1), np.int32),
        ),
        run_starts=ints(num_stripes + 1),
        counters=new_block_counters(SUMS + 2 * num_stripes, num_threads),
    )


class PromptPredictors(NamedTuple):
    """Predictors of a shard's experts, with work space for prompts.

    of_model: of all layers; inputs: what their rows are multiplied with, of blocks from
    input_starts, and rank_starts, on; places (B, 4): of inner rows; hidden, scores float32: a row
    for each choice, of blocks from hidden_starts, score_starts on
    """

    of_model: ExpertPredictors
    inputs: Tokens
    input_starts: np.ndarray
    rank_starts: np.ndarray
    places: np.ndarray
    hidden: np.ndarray
    hidden_starts: np.ndarray
    scores: np.ndarray
    score_starts: np.ndarray


def new_prompt_predictors(
    of_model: ExpertPredictors, num_threads: int, num_tokens: int, num_neurons: int, width: int,
    kind: type,
) -> PromptPredictors:  # fmt: skip
    """With work space for `num_tokens` tokens; `kind`: what rows are multiplied as."""
    starts = of_model.inner_starts
    num_blocks, ranks = starts.shape[1] - 1, np.diff(starts)
    widest, num_inner = max(width, int(ranks.max(initial=0))), int(ranks.sum(axis=1).max(initial=0))

    def ends() -> np.ndarray:
        return np.zeros(num_blocks + 1, np.int64)

    return PromptPredictors(
        of_model,
        new_tokens(kind, num_threads, num_tokens, widest, num_blocks),
        ends(),
        ends(),
        np.zeros((num_blocks, NUM_PLACE_NUMBERS), np.int64),
        aligned_zeros((num_tokens * num_inner,)),
        ends(),
        aligned_zeros((num_tokens * num_neurons,)),
        ends(),
    )


@njit(nogil=True, cache=True)
def plan_predictors(layer, width, predictors, scratch):
    """Where choices of blocks are in a layer's `PromptPredictors`, or None; width: of tokens."""
    if predictors is None:
        return
    starts, inputs = predictors.of_model.inner_starts[layer], predictors.inputs
    for b in range(scratch.widths.shape[0]):
        rank = starts[b + 1] - starts[b]
        count = scratch.choices.starts[b + 1] - scratch.choices.starts[b]
        size = scratch.widths[b] if rank else 0
        _set_place(predictors.places[b], starts[b], rank, predictors.of_model.inner.shape[1])
        begins = predictors.input_starts, predictors.rank_starts
        begins[0][b + 1] = begins[0][b] + space_of(inputs, count, width)
        begins[1][b + 1] = begins[1][b] + space_of(inputs, count, rank)
        predictors.hidden_starts[b + 1] = predictors.hidden_starts[b] + count * rank
        predictors.score_starts[b + 1] = predictors.score_starts[b] + count * size


@by_types
def _stripes_of(arrays):  # type: ignore[no-untyped-def]
    """First rows of stripes (L, B, n + 1), and ends; for compiled code, as below."""
    if is_of(arrays, TransposedArrays):
        return lambda arrays: arrays.cuts
    return lambda arrays: arrays.stripes


@njit(nogil=True, cache=True)
def _set_place(place, first, height, items):
    place[BEGIN] = first * items if height else 0
    place[END], place[ROW_ITEMS] = place[BEGIN] + height * items, items


@njit(nogil=True, cache=True)
def plan_choices(x, arrays, layer, firsts, block_weights, scratch):
    """Which tokens meet which blocks, and where their stripes are.

    firsts (B,) int64: the blocks' first rows; block_weights as in `Selection`
    """
    starts, stripes, found = arrays.starts[layer], _stripes_of(arrays), 0
    for b in range(scratch.widths.shape[0]):
        first, width = found, starts[b + 1] - starts[b]
        for t in range(x.shape[0] if width else 0):
            weight = block_weights[t, b] if block_weights.shape[0] else np.float32(1)
            if weight != 0:
                scratch.choices.ids[found], scratch.weights[found] = t, weight
                scratch.rows[found] = found - first
                found += 1
        scratch.choices.starts[b + 1] = found
        scratch.row_starts[b + 1] = scratch.row_starts[b] + (found - first) * width
        scratch.input_starts[b + 1] = scratch.input_starts[b] + space_of(
            scratch.inputs, found - first, x.shape[1]
        )
        scratch.firsts[b], scratch.widths[b], scratch.whole[b, 1] = firsts[b], width, width
        _set_place(scratch.places[b], firsts[b], width, arrays.gate.shape[1])
        for stripe in range(scratch.ends.shape[1]):
            end = stripe * width  # where a block is one
            if stripes.shape[2]:
                own = stripes[layer, b]
                end = own[stripe * arrays.stripes_at_once] - own[0]
            scratch.ends[b, stripe] = end


@by_types
def _is_second(arrays, layer, place, num_fired, width, skips, few):  # type: ignore[no-untyped-def]
    """Whether a part of a choice is of `second`: down's place is number `place`."""
    if is_of(arrays, TransposedArrays):
        return lambda arrays, layer, place, num_fired, width, skips, few: (
            arrays.down.places[layer, place, IS_SECOND] != 0
        )
    return lambda arrays, layer, place, num_fired, width, skips, few: (
        skips and num_fired <= few * width
    )


@by_types
def _value_space(arrays, values, count, width):  # type: ignore[no-untyped-def]
    """What so many rows of a part take of `values`."""
    if is_of(arrays, TransposedArrays):
        return lambda arrays, values, count, width: space_of(values, count, width)
    return lambda arrays, values, count, width: (
        count * row_stride(items_in(width, values.packed), values.packed)
    )


@by_types
def _set_down_place(arrays, layer, number, first, width, is_second, place):  # type: ignore[no-untyped-def]
    """The place of a part's down rows, of those in one format."""

    def outputs(arrays, layer, number, first, width, is_second, place):  # type: ignore[no-untyped-def]
        own = arrays.down.places[layer, number]
        for i in range(place.shape[0]):
            place[i] = own[i] if (own[IS_SECOND] != 0) == is_second else 0

    def neurons(arrays, layer, number, first, width, is_second, place):  # type: ignore[no-untyped-def]
        _set_place(place, first, width, arrays.down.shape[1])

    return outputs if is_of(arrays, TransposedArrays) else neurons


@by_types
def _plan_fired(arrays, scratch):  # type: ignore[no-untyped-def]
    """How parts of `second` are added up neuron by neuron, where down has a row for each."""
    if is_of(arrays, TransposedArrays):
        return lambda arrays, scratch: None
    return lambda arrays, scratch: _list_runs(scratch)


@njit(nogil=True, cache=True)
def _list_runs(scratch):
    """The runs of parts of `second`, the steps of a thread's own sums, and of what they leave."""
    num_blocks, num_stripes = scratch.widths.shape[0], scratch.tree.shape[0]
    parts, fired, found, lists, starts = scratch.second, scratch.fired, 0, 0, 0
    for part in range(num_blocks * num_stripes):
        count = parts.tokens.starts[part + 1] - parts.tokens.starts[part]
        size = scratch.columns[part, 1] - scratch.columns[part, 0]
        num_runs = max(1, int(np.rint(size / RUN))) if count and size else 0
        for i in range(num_runs):
            run, first = fired.runs[found], scratch.part_firsts[part]
            run[0], run[3], run[4] = part, lists, starts
            run[1], run[2] = first + size * i // num_runs, first + size * (i + 1) // num_runs
            lists += count * (run[2] - run[1])
            starts += count + 1
            found += 1
        scratch.run_starts[part // num_blocks + 1] = found
    if scratch.first.tokens.starts[num_blocks * num_stripes]:
        # A stripe's own sum is added to that of `first`.
        parts.steps[:] = 0
        for stripe in range(num_stripes):
            copy_numbers(scratch.tree[stripe], scratch.left[stripe])
            parts.steps[stripe * num_blocks, CLEARS] = 1
    else:
        _set_steps(parts, scratch.tree, -1, True, True)  # no part is all of a sum
        scratch.left[:] = 0
        for level in range(scratch.num_left[0]):
            scratch.left[level, LEVEL], scratch.left[level, CLEARS] = level, 1


@njit(nogil=True, cache=True)
def _plan_tree(first, scratch):
    """The level of each stripe's sum, and how many are merged once it is there."""
    stack, count = scratch.stack, 0
    for i in range(scratch.tree.shape[0]):
        stack[count], step = first + i, scratch.tree[i]
        step[LEVEL], step[MERGES] = count, 0
        count += 1
        while count > 1 and meet(stack[count - 2], stack[count - 1], first, first + i + 1):
            count -= 1
            step[MERGES] += 1
    scratch.num_left[0] = count


@njit(nogil=True, cache=True)
def _set_steps(parts, tree, num_tokens, is_first, is_last):
    """Steps of parts that are added up first and last in each stripe, or one of both.

    Where all tokens chose one block alone, which is both, there is nothing to add to.
    """
    num_blocks = parts.steps.shape[0] // max(1, tree.shape[0])
    for stripe in range(tree.shape[0]):
        own = slice(stripe * num_blocks, (stripe + 1) * num_blocks)
        steps, starts, last, whole = parts.steps[own], parts.tokens.starts[own], num_blocks - 1, -1
        end = parts.tokens.starts[own.stop]
        steps[:] = 0
        steps[:, LEVEL] = tree[stripe, LEVEL]
        if is_first and is_last and end - starts[0] == num_tokens:
            for b in range(num_blocks):
                if parts.tokens.starts[own.start + b + 1] - starts[b] == num_tokens:
                    whole = b
        if whole >= 0:
            last = whole
            steps[whole, IS_WHOLE] = 1
        elif is_first:
            steps[0, CLEARS] = 1
        if is_last:
            steps[last, MERGES] = tree[stripe, MERGES]


@njit(nogil=True, cache=True)
def plan_sums(arrays, layer, num_tokens, width, skips, scratch):
    """Which parts of choices are added up first and second, and how; once gates are activated.

    width: of tokens; skips: parts of which few neurons fire may go one by one
    """
    num_stripes, num_blocks = scratch.tree.shape[0], scratch.widths.shape[0]
    first, second, ids = scratch.first, scratch.second, scratch.choices.ids
    num_first = num_second = part = 0
    for stripe in range(num_stripes):
        for b in range(num_blocks):
            begin, end = scratch.ends[b, stripe], scratch.ends[b, stripe + 1]
            size, row, number = end - begin, scratch.firsts[b] + begin, b * num_stripes + stripe
            scratch.columns[part, 0], scratch.columns[part, 1] = begin, end
            scratch.part_firsts[part] = row
            _set_place(scratch.up_places[part], row, size, arrays.gate.shape[1])
            _set_down_place(arrays, layer, number, row, size, False, first.places[part])
            _set_down_place(arrays, layer, number, row, size, True, second.places[part])
            of_block = scratch.choices.starts[b], scratch.choices.starts[b + 1]
            for i in range(of_block[0], of_block[1] if size else of_block[0]):
                fired = scratch.num_fired[stripe, i]
                if _is_second(arrays, layer, number, fired, size, skips, scratch.few):
                    second.tokens.ids[num_second], second.rows[num_second] = ids[i], scratch.rows[i]
                    num_second += 1
                else:
                    first.tokens.ids[num_first], first.rows[num_first] = ids[i], scratch.rows[i]
                    num_first += 1
            count = num_first - first.tokens.starts[part]
            scratch.late_starts[part + 1] = scratch.late_starts[part] + count * size
            scratch.up_starts[part + 1] = scratch.up_starts[part] + space_of(
                scratch.inputs, count, width
            )
            first.starts[part + 1] = first.starts[part] + _value_space(
                arrays, scratch.values, count, size
            )
            first.tokens.starts[part + 1] = num_first
            second.tokens.starts[part + 1] = num_second
            part += 1
    second.starts[0] = first.starts[part]
    for s in range(part):
        count = second.tokens.starts[s + 1] - second.tokens.starts[s]
        size = scratch.columns[s, 1] - scratch.columns[s, 0]
        second.starts[s + 1] = second.starts[s] + _value_space(arrays, scratch.values, count, size)
    _plan_tree(arrays.first_stripe // arrays.stripes_at_once, scratch)
    _set_steps(first, scratch.tree, num_tokens, True, num_second == 0)
    _set_steps(second, scratch.tree, num_tokens, num_first == 0, True)
    _plan_fired(arrays, scratch)
