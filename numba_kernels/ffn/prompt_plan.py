"""What a prompt's FFN works on: choices of blocks, their parts in stripes, and how sums meet.

A choice is a token and one of its blocks of neurons (`prefill.block_tokens`), a part what a block
has in a stripe (`decode.stripes`), some neighbours of which are one here. One thread plans a layer
while the others wait.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.block_rows import BEGIN, END, NUM_PLACE_NUMBERS, ROW_ITEMS
from hotcold.numba_kernels.compiler import njit
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
)
from hotcold.numba_kernels.prefill.ffn import RUN, FiredNeurons
from hotcold.numba_kernels.prefill.shared_rows import (
    Tokens,
    new_tokens,
    space_of,
    token_layout,
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


class PromptPlan(NamedTuple):
    """A layer's choices and parts: of T tokens at most, B blocks, S stripes; int64 but for weights.

    choices: of blocks; rows, weights: of choices, as in `Parts`, and factors; firsts, widths (B,);
    places (B, 4): of gate and up rows that are no `BlockRows`; row_starts, input_starts (B + 1,):
    where blocks' rows of gates, and tokens as gate rows take them, begin
    whole (B, 2), columns (S * B, 2): first and last column of blocks, of parts; ends (B, S + 1):
    where stripes begin in blocks, and end; num_fired (S, choices)
    first, second: parts that are added up first and then, those whose few neurons that fire go one
    by one
    part_firsts (S * B,): first rows of parts; up_places, up_starts, late_starts: of late products
    with up rows, where their inputs and they begin
    tree (S, 4), left (S, 4): steps of stripes, of what is left over of parts one by one;
    stack (S,), num_left (1,): sums that are left over
    runs, run_starts (S + 1,): of `FiredNeurons`, and where a stripe's begin
    of_inputs, of_values: `token_layout` of what gate and down rows are multiplied with
    """

    choices: BlockTokens
    rows: np.ndarray
    weights: np.ndarray
    firsts: np.ndarray
    widths: np.ndarray
    places: np.ndarray
    row_starts: np.ndarray
    input_starts: np.ndarray
    whole: np.ndarray
    columns: np.ndarray
    ends: np.ndarray
    num_fired: np.ndarray
    first: Parts
    second: Parts
    part_firsts: np.ndarray
    up_places: np.ndarray
    up_starts: np.ndarray
    late_starts: np.ndarray
    tree: np.ndarray
    left: np.ndarray
    stack: np.ndarray
    num_left: np.ndarray
    runs: np.ndarray
    run_starts: np.ndarray
    of_inputs: np.ndarray
    of_values: np.ndarray


class PromptFfnScratch(NamedTuple):
    """Work space of a shard for prompts of up to T tokens.

    gates, ups float32: a row for each choice; levels, sums (threads, …) float32: of `StripeSums`,
    of `prompt_down_kernel`; inputs, values: what gate and up rows, and down rows are multiplied
    with; few: up to which share of a part's neurons they go one by one; fired: those; counters of
    pieces taken
    """

    plan: PromptPlan
    gates: np.ndarray
    ups: np.ndarray
    levels: np.ndarray
    sums: np.ndarray
    inputs: Tokens
    values: Tokens
    few: float
    fired: FiredNeurons
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
    plan = PromptPlan(
        choices=BlockTokens(ints(num_tokens * num_blocks), ints(num_blocks + 1), order),
        rows=ints(num_tokens * num_blocks),
        weights=np.zeros(num_tokens * num_blocks, np.float32),
        firsts=ints(num_blocks),
        widths=ints(num_blocks),
        places=ints(num_blocks, NUM_PLACE_NUMBERS),
        row_starts=ints(num_blocks + 1),
        input_starts=ints(num_blocks + 1),
        whole=ints(num_blocks, 2),
        columns=ints(num_parts, 2),
        ends=ints(num_blocks, num_stripes + 1),
        num_fired=ints(num_stripes, num_tokens * num_blocks),
        first=parts(),
        second=parts(),
        part_firsts=ints(num_parts),
        up_places=ints(num_parts, NUM_PLACE_NUMBERS),
        up_starts=ints(num_parts + 1),
        late_starts=ints(num_parts + 1),
        tree=ints(num_stripes, NUM_STEP_NUMBERS),
        left=ints(num_stripes, NUM_STEP_NUMBERS),
        stack=ints(num_stripes),
        num_left=ints(1),
        runs=ints(num_runs, 5),
        run_starts=ints(num_stripes + 1),
        of_inputs=token_layout(of_inputs),
        of_values=token_layout(of_values, of_rows=not is_transposed),
    )
    return PromptFfnScratch(
        plan,
        gates=aligned_zeros((num_tokens * num_neurons,)),
        ups=aligned_zeros((num_tokens * num_neurons,)),
        levels=aligned_zeros((height * num_tokens * width,)),
        sums=aligned_zeros((num_threads, (height + 1) * num_tokens * PART_COLUMNS)),
        inputs=new_tokens(of_inputs, num_threads, num_tokens, width, max(num_blocks, most_parts)),
        # Rows that are weighted and summed are longer, and some are read behind the last one.
        values=new_tokens(
            of_values, num_threads, num_tokens + LANES, widest + 2 * LANES, most_parts
        ),
        few=few,
        fired=FiredNeurons(
            plan.runs,
            np.zeros(num_listed, np.int32),
            np.zeros(num_listed, np.float32),
            np.zeros(num_runs * (num_tokens + 1), np.int32),
        ),
        # A service without neurons has no stripe, and still takes pieces of its sums.
        counters=new_block_counters(SUMS + 2 * max(num_stripes, 1), num_threads),
    )


class PromptPredictors(NamedTuple):
    """Predictors of a shard's experts, with work space for prompts.

    of_model: of all layers; inputs: what their rows are multiplied with, of blocks from
    input_starts, and rank_starts, on; places (B, 4): of inner rows; hidden, scores float32: a row
    for each choice, of blocks from hidden_starts, score_starts on; layout: `token_layout` of inputs
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
    layout: np.ndarray


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
        token_layout(kind),
    )


@njit(nogil=True, cache=True)
def plan_predictors(layer, width, predictors, plan):
    """Where choices of blocks are in a layer's `PromptPredictors`, or None; width: of tokens."""
    if predictors is None:
        return
    starts = predictors.of_model.inner_starts[layer]
    for b in range(plan.widths.shape[0]):
        rank = starts[b + 1] - starts[b]
        count = plan.choices.starts[b + 1] - plan.choices.starts[b]
        size = plan.widths[b] if rank else 0
        _set_place(predictors.places[b], starts[b], rank, predictors.of_model.inner.shape[1])
        begins = predictors.input_starts, predictors.rank_starts
        begins[0][b + 1] = begins[0][b] + space_of(predictors.layout, count, width)
        begins[1][b + 1] = begins[1][b] + space_of(predictors.layout, count, rank)
        predictors.hidden_starts[b + 1] = predictors.hidden_starts[b] + count * rank
        predictors.score_starts[b + 1] = predictors.score_starts[b] + count * size


@njit(nogil=True, cache=True)
def _set_place(place, first, height, items):
    place[BEGIN] = first * items if height else 0
    place[END], place[ROW_ITEMS] = place[BEGIN] + height * items, items


@njit(nogil=True, cache=True)
def plan_choices(
    num_tokens, width, row_items, starts, firsts, stripes, at_once, block_weights, plan
):  # fmt: skip
    """Which tokens meet which blocks, and where their stripes are.

    width: of tokens; row_items: of gate rows; starts, firsts (B,) int64: of the layer's blocks,
    and their first rows; stripes (B, n + 1) int64, or (B, 0): where those begin, and end, of which
    `at_once` neighbours are one; block_weights as in `Selection`
    """
    found = 0
    for b in range(plan.widths.shape[0]):
        first, size = found, starts[b + 1] - starts[b]
        for t in range(num_tokens if size else 0):
            weight = block_weights[t, b] if block_weights.shape[0] else np.float32(1)
            if weight != 0:
                plan.choices.ids[found], plan.weights[found] = t, weight
                plan.rows[found] = found - first
                found += 1
        count = found - first
        plan.choices.starts[b + 1] = found
        plan.row_starts[b + 1] = plan.row_starts[b] + count * size
        plan.input_starts[b + 1] = plan.input_starts[b] + space_of(plan.of_inputs, count, width)
        plan.firsts[b], plan.widths[b], plan.whole[b, 1] = firsts[b], size, size
        _set_place(plan.places[b], firsts[b], size, row_items)
        for stripe in range(plan.ends.shape[1]):
            end = stripe * size  # where a block is one
            if stripes.shape[1]:
                end = stripes[b, stripe * at_once] - stripes[b, 0]
            plan.ends[b, stripe] = end


@njit(nogil=True, cache=True)
def _list_runs(plan):
    """The runs of parts of `second`, the steps of a thread's own sums, and of what they leave."""
    num_blocks, num_stripes = plan.widths.shape[0], plan.tree.shape[0]
    parts, found, lists, starts = plan.second, 0, 0, 0
    for part in range(num_blocks * num_stripes):
        count = parts.tokens.starts[part + 1] - parts.tokens.starts[part]
        size = plan.columns[part, 1] - plan.columns[part, 0]
        num_runs = max(1, int(np.rint(size / RUN))) if count and size else 0
        for i in range(num_runs):
            run, first = plan.runs[found], plan.part_firsts[part]
            run[0], run[3], run[4] = part, lists, starts
            run[1], run[2] = first + size * i // num_runs, first + size * (i + 1) // num_runs
            lists += count * (run[2] - run[1])
            starts += count + 1
            found += 1
        plan.run_starts[part // num_blocks + 1] = found
    if plan.first.tokens.starts[num_blocks * num_stripes]:
        # A stripe's own sum is added to that of `first`.
        parts.steps[:] = 0
        for stripe in range(num_stripes):
            copy_numbers(plan.tree[stripe], plan.left[stripe])
            parts.steps[stripe * num_blocks, CLEARS] = 1
    else:
        _set_steps(parts, plan.tree, -1, True, True)  # no part is all of a sum
        plan.left[:] = 0
        for level in range(plan.num_left[0]):
            plan.left[level, LEVEL], plan.left[level, CLEARS] = level, 1


@njit(nogil=True, cache=True)
def _plan_tree(first, plan):
    """The level of each stripe's sum, and how many are merged once it is there."""
    stack, count = plan.stack, 0
    for i in range(plan.tree.shape[0]):
        stack[count], step = first + i, plan.tree[i]
        step[LEVEL], step[MERGES] = count, 0
        count += 1
        while count > 1 and meet(stack[count - 2], stack[count - 1], first, first + i + 1):
            count -= 1
            step[MERGES] += 1
    plan.num_left[0] = count


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
def plan_sums(num_tokens, width, row_items, down_items, places, first_stripe, few, plan):
    """Which parts of choices are added up first and second, and how; once gates are activated.

    width: of tokens; row_items, down_items: of gate and down rows; places (B * S, 4) int64: of down
    rows that are an output each, or (0, 4); first_stripe: the first one's number
    few: up to which share of its neurons that fire a part goes one by one; below 0: none does
    """
    num_stripes, num_blocks = plan.tree.shape[0], plan.widths.shape[0]
    first, second, choices = plan.first, plan.second, plan.choices
    num_first = num_second = part = 0
    for stripe in range(num_stripes):
        for b in range(num_blocks):
            begin, end = plan.ends[b, stripe], plan.ends[b, stripe + 1]
            size, row = end - begin, plan.firsts[b] + begin
            plan.columns[part, 0], plan.columns[part, 1] = begin, end
            plan.part_firsts[part] = row
            _set_place(plan.up_places[part], row, size, row_items)
            _set_place(first.places[part], row, size, down_items)
            if places.shape[0]:
                copy_numbers(places[b * num_stripes + stripe], first.places[part])
            for i in range(choices.starts[b], choices.starts[b + 1] if size else 0):
                if plan.num_fired[stripe, i] <= few * size:
                    second.tokens.ids[num_second] = choices.ids[i]
                    second.rows[num_second] = plan.rows[i]
                    num_second += 1
                else:
                    first.tokens.ids[num_first] = choices.ids[i]
                    first.rows[num_first] = plan.rows[i]
                    num_first += 1
            count = num_first - first.tokens.starts[part]
            plan.late_starts[part + 1] = plan.late_starts[part] + count * size
            plan.up_starts[part + 1] = plan.up_starts[part] + space_of(plan.of_inputs, count, width)
            first.tokens.starts[part + 1] = num_first
            second.tokens.starts[part + 1] = num_second
            part += 1
    end = np.int64(0)
    for parts in (first, second):
        for s in range(part):
            parts.starts[s] = end
            count = parts.tokens.starts[s + 1] - parts.tokens.starts[s]
            end += space_of(plan.of_values, count, plan.columns[s, 1] - plan.columns[s, 0])
        parts.starts[part] = end
    _plan_tree(first_stripe, plan)
    _set_steps(first, plan.tree, num_tokens, True, num_second == 0)
    _set_steps(second, plan.tree, num_tokens, num_first == 0, True)
    if not places.shape[0]:
        _list_runs(plan)
