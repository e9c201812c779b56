"""The router of a mixture: which experts a token's FFN computes, and what they weigh.

A row's product with a token, and all that follows for the token, does not depend on what is
computed beside it. So steps and prompts, which share the work in different ways, choose alike.
"""

import math

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.rows import rows_kernel
from hotcold.numba_kernels.ir.vector_ir import dot_lone_row
from hotcold.numba_kernels.layer_record import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN

_CHOSEN = np.float32(np.nan)  # in the row of choices: nothing compares with it
_LOWEST = np.float32(-np.inf)
_TOKENS_AT_ONCE = 16  # of a prompt: they stay in a core's cache while all rows go by
_LEAST_SUM = np.float32(1e-20)  # of chosen scores: sigmoids may all be 0


@njit(nogil=True, cache=True, inline="always")
def router_rows(routers, layer):
    """A layer's rows of `RouterArrays`, and their biases or none."""
    first, last = routers.starts[layer], routers.starts[layer + 1]
    bias = routers.bias[first:last] if routers.bias.shape[0] else routers.bias
    return routers.rows[first:last], bias


@njit(nogil=True, cache=True)
def choose_experts(numbers, routers, layer, logits, weights):
    """weights[b] = what block b weighs for a token: 0 of experts that are not chosen.

    As `RouterSpec` of the model package says, with a layer's LAYER_NUMBERS. Of equal experts the
    first is chosen. Where a logit is not finite all weigh NaN, which reaches the output. A shared
    expert's weight stays as it is. Checks nothing.
    Shapes:  logits (E,), the router's bias included; weights (B,), the layer's blocks first
    Dtypes:  float32; routers: `RouterArrays`
    Source:  Shazeer et al., arXiv 1701.06538; groups: DeepSeek-AI, arXiv 2405.04434; with
             selection biases: arXiv 2412.19437
    """
    first, last = routers.starts[layer], routers.starts[layer + 1]
    biases, experts = routers.selection_bias, weights[: last - first]
    if _choose(numbers, logits, biases[first:last] if biases.shape[0] else biases, experts):
        _weigh(numbers, logits, experts)
        if routers.expert_scale.shape[0]:
            for e in range(last - first):
                experts[e] *= routers.expert_scale[first + e]
    weights[numbers.num_blocks :] = 0


@njit(nogil=True, cache=True)
def weigh_shared(numbers, routers, layer, ffn_input, t, weights):
    """weights[num_experts] = what the shared expert weighs for token t, if there is one: 1, or
    sigmoid(shared . ffn_input[t]). Shapes: ffn_input (T, d), weights (B,); checks nothing."""
    if numbers.num_blocks > numbers.num_experts:
        share = np.float32(1)
        if routers.shared.shape[1]:
            share = _sigmoid(dot_lone_row(routers.shared, layer, ffn_input, t))
        weights[numbers.num_experts] = share


@njit(nogil=True, cache=True, inline="always")
def _sigmoid(value):
    return np.float32(1.0 / (1.0 + math.exp(-np.float64(value))))


@njit(nogil=True, cache=True)
def _sum_of_exponentials(logits):
    """The largest logit, and sum over e of exp(logits[e] - the largest)."""
    top = logits[0]
    for e in range(1, logits.shape[0]):
        top = max(top, logits[e])
    total = np.float32(0)
    for e in range(logits.shape[0]):
        total += np.float32(math.exp(logits[e] - top))
    return top, total


@njit(nogil=True, cache=True, inline="always")
def _score(score, logit, top, total):
    """The score of one expert; `top` and `total` are `_sum_of_exponentials` of all."""
    if score == SOFTMAX:
        return np.float32(math.exp(logit - top)) / total
    return _sigmoid(logit) if score == SIGMOID else logit


@njit(nogil=True, cache=True)
def _choose(numbers, logits, selection_bias, choice):
    """Mark the chosen experts in `choice` (E,) by _CHOSEN; False, and all NaN, without a choice.

    Scores grow with logits, which are compared instead where nothing is added to them: scores are
    rounded once more, so that unequal ones may become equal.
    """
    check = np.float32(0)
    for e in range(logits.shape[0]):
        check += logits[e] * np.float32(0)
        choice[e] = logits[e]
    if check != 0:
        choice[:] = np.nan
        return False
    if selection_bias.shape[0] or numbers.num_groups > 1:
        top, total = _sum_of_exponentials(logits)
        for e in range(logits.shape[0]):
            choice[e] = _score(numbers.router_score, logits[e], top, total)
            if selection_bias.shape[0]:
                choice[e] += selection_bias[e]
    for _ in range(numbers.num_groups - numbers.num_chosen_groups):
        size = choice.shape[0] // numbers.num_groups
        _leave_worst_group(choice, size, size > 1 and selection_bias.shape[0] > 0)
    for _ in range(numbers.num_chosen):
        best = 0
        while not choice[best] > _LOWEST:
            best += 1
        for e in range(best + 1, choice.shape[0]):
            if choice[e] > choice[best]:
                best = e
        choice[best] = _CHOSEN
    return True


@njit(nogil=True, cache=True)
def _leave_worst_group(choice, size, adds_second):
    """Let the experts of one group be -infinity, the last of those with the lowest score.

    A group's score is its largest number, or the sum of its two largest.
    """
    worst, lowest = 0, np.float32(np.inf)
    for begin in range(0, choice.shape[0], size):
        first, second = _LOWEST, _LOWEST
        for e in range(begin, begin + size):
            if choice[e] > first:
                first, second = choice[e], first
            elif choice[e] > second:
                second = choice[e]
        score = first + second if adds_second else first
        if first > _LOWEST and score <= lowest:
            worst, lowest = begin, score
    choice[worst : worst + size] = _LOWEST


@njit(nogil=True, cache=True)
def _weigh(numbers, logits, weights):
    """weights[e] = what the experts marked by _CHOSEN weigh, 0 of all others."""
    score, top, total = numbers.router_score, _LOWEST, np.float32(1)
    if score == SOFTMAX:
        top, total = _sum_of_exponentials(logits)
    for e in range(weights.shape[0]):
        if not math.isnan(weights[e]):
            weights[e] = _LOWEST  # never a weight
        elif score == SOFTMAX_OF_CHOSEN:
            top = max(top, logits[e])
    chosen = np.float32(0)
    for e in range(weights.shape[0]):
        if math.isnan(weights[e]):
            kind = SOFTMAX if score == SOFTMAX_OF_CHOSEN else score
            weights[e] = _score(kind, logits[e], top, total)
            chosen += weights[e]
    if not numbers.norms_chosen and score != SOFTMAX_OF_CHOSEN:
        chosen = np.float32(1)
    factor = numbers.router_scale
    for e in range(weights.shape[0]):
        weights[e] = weights[e] / max(chosen, _LEAST_SUM) * factor if weights[e] >= 0 else 0


@njit(nogil=True, cache=True)
def product_of_tokens(rows, bias, x, out):
    """out[t] = rows . x[t] + bias of a prompt's tokens, some at a time; rows (E, d) float32.

    With the bits of a step, where threads share the rows. Checks nothing.
    """
    for first in range(0, x.shape[0], _TOKENS_AT_ONCE):
        some = slice(first, min(first + _TOKENS_AT_ONCE, x.shape[0]))
        rows_kernel(rows, bias, x[some], out[some], 0, rows.shape[0])


@njit(nogil=True, cache=True)
def route_tokens(numbers, routers, layer, x, ffn_input, logits, weights):
    """`choose_experts` and `weigh_shared` of tokens, whose router reads x; checks nothing.

    Shapes:  x, ffn_input (T, d); logits (T, E) is work space; weights (T, B)   Dtypes: float32
    """
    rows, bias = router_rows(routers, layer)
    product_of_tokens(rows, bias, x, logits)
    for t in range(x.shape[0]):
        choose_experts(numbers, routers, layer, logits[t], weights[t])
        weigh_shared(numbers, routers, layer, ffn_input, t, weights[t])
