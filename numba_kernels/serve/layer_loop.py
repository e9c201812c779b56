"""The driver's way through the layers: what is asked of whom, in which order, and what is added up.

The loop is written once, for every way of asking. Where the driver rings doorbells itself the loop
asks, waits and goes on, layer after layer, without Python. It comes back to Python where something
is to be decided or done there, and goes on from there when it is called again: `run_layers`.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.finite import finite_pair
from hotcold.numba_kernels.decode.norm import norm_kernel
from hotcold.numba_kernels.serve.doorbell import now_ns
from hotcold.numba_kernels.serve.mailbox import (
    ALL_NEURONS,
    ATTENTION,
    BUSY_NS,
    FFN,
    GATE_THRESHOLD,
    LAYER,
    NEXT_NUMBER,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_TOKENS,
    NUM_UP,
    OPERATION,
    PRODUCT_THRESHOLD,
    send_requests,
)
from hotcold.numba_kernels.serve.predict_team import choose_neurons, write_task

GPU = 0  # the service of attention, head and hot neurons; the CPU services follow

# words of a walk: where it is
AT_LAYER, AT_PHASE, END_LAYER, TOKENS = range(4)
PREDICTS, OWN_FFN = 4, 5  # who has a predictor choose neurons; whether Python asks for the FFN
FIRST, END, IS_ASKED = 6, 7, 8  # services first..end - 1 are, or were, asked; not counted yet
ASK_WAITED_NS = 9  # for their answers
# and sums over its layers, as `StepTimes` has them
ATTENTION_BUSY_NS, ATTENTION_WAITED_NS, FFN_BUSY_NS, FFN_WAITED_NS = range(10, 14)
SUM_COMPUTED, SUM_UPS, SUM_GATES = range(14, 17)
PREDICTOR_NS = 17
PREDICTOR_INPUT = 18  # which array of the buffers: as INPUT of `predict_team`
NUM_WALK_WORDS = 24  # whole cache lines

# as PREDICTS
NOBODY, IN_PYTHON, IN_TEAM = range(3)

# what a layer consists of, in order
_ANNOUNCE, _ATTEND, _CHOOSE, _COMPUTE, _ADD = range(5)
_NUM_PHASES = 5

# why a walk comes back to Python
DONE = 0  # all layers are done
ASK = 1  # services FIRST..END - 1 are to be asked what their request words say
RESUME = 2  # they were rung: one is silent for so long that it is to be looked after, or failed
ANNOUNCE = 3  # the GPU service is about to be asked for a predictor's input, which is Python's
CHOOSE = 4  # the input is there: NUM_IDS and ids of the CPU services are to be written
COMPUTE = 5  # services FIRST..END - 1 have their request words; their sum is added next
NOT_FINITE = 6  # the layer's FFN input or output


class LayerFacts(NamedTuple):
    """What a walk knows of the model and of who holds it; L layers, width d, S services.

    thresholds (L, 2) int64: `threshold_words`; num_hot (L,) int64: neurons of the GPU service;
    output_norm (L, d) or (L, 0) float32: of the FFN's output; services: 0..S - 1, (S,) int64
    """

    thresholds: np.ndarray
    num_hot: np.ndarray
    ffn_size: int
    output_norm: np.ndarray
    norm_kind: int
    norm_epsilon: np.float32
    residual_scale: np.float32
    services: np.ndarray


def new_layer_state() -> np.ndarray:
    """A walk's record, for `begin_layers`."""
    return np.zeros(NUM_WALK_WORDS, np.int64)


def begin_layers(
    layer_state: np.ndarray,
    layers: range,
    num_tokens: int,
    predicts: int = NOBODY,
    own_ffn: bool = False,
    predictor_input: int = 0,
) -> None:
    """Let `layer_state` stand before `layers`, with nothing counted."""
    layer_state[:] = 0
    layer_state[AT_LAYER], layer_state[END_LAYER], layer_state[TOKENS] = (
        layers.start,
        layers.stop,
        num_tokens,
    )
    layer_state[PREDICTS], layer_state[OWN_FFN] = predicts, own_ffn
    layer_state[PREDICTOR_INPUT] = predictor_input


@njit(nogil=True, cache=True)
def run_layers(layer_state, request_state, buffers, facts, team):
    """Go on with a walk; returns why it comes back, or DONE.

    `request_state` is of `numba_kernels.serve.mailbox`, or empty where Python asks. `team` is a
    `PredictTeam`, NO_TEAM unless it chooses neurons; it is Python's turn without `request_state`,
    and where the team was not told of the answer that has come. After ASK and RESUME
    Python adds what it waited to ASK_WAITED_NS. A walk that failed is begun again: what its layers
    read of each other is `hidden` alone.
    """
    while layer_state[AT_LAYER] < layer_state[END_LAYER]:
        phase = layer_state[AT_PHASE]
        layer_state[AT_PHASE] = (phase + 1) % _NUM_PHASES
        if phase == _ANNOUNCE:
            reason = _announce(layer_state, request_state, team)
        elif phase == _ATTEND:
            reason = _attend(layer_state, request_state, buffers, facts)
        elif phase == _CHOOSE:
            reason = _choose(layer_state, buffers, facts, team)
        elif phase == _COMPUTE:
            reason = _compute(layer_state, request_state, buffers, facts)
        else:
            reason = _add(layer_state, buffers, facts)
        if reason != DONE:
            return reason
    return DONE


@njit(nogil=True, cache=True)
def _announce(layer_state, request_state, team):
    """Tell the team what it is to score once attention is done."""
    if layer_state[PREDICTS] == NOBODY:
        return DONE
    if layer_state[PREDICTS] == IN_PYTHON or request_state.shape[0] == 0:
        return ANNOUNCE
    number = request_state[NEXT_NUMBER]
    write_task(
        team, layer_state[AT_LAYER], layer_state[TOKENS], layer_state[PREDICTOR_INPUT], number
    )
    return DONE


@njit(nogil=True, cache=True)
def _attend(layer_state, request_state, buffers, facts):
    """Ask the GPU service for mixed and ffn_input. A GPU then begins with its hot neurons."""
    _write_request(buffers.requests[GPU], ATTENTION, layer_state, facts)
    layer_state[FIRST], layer_state[END] = GPU, GPU + 1
    return _ask(layer_state, request_state, buffers, facts)


@njit(nogil=True, cache=True)
def _choose(layer_state, buffers, facts, team):
    """Write who is to be asked for the FFN: all neurons, unless a predictor chooses."""
    busy_ns = _longest_busy(layer_state, buffers)
    layer_state[ATTENTION_BUSY_NS] += busy_ns
    layer_state[ATTENTION_WAITED_NS] += layer_state[ASK_WAITED_NS]
    layer_state[IS_ASKED] = 0
    layer_state[FIRST] = GPU if facts.num_hot[layer_state[AT_LAYER]] else GPU + 1
    layer_state[END] = facts.services.shape[0]
    for service in range(layer_state[FIRST], layer_state[END]):
        _write_request(buffers.requests[service], FFN, layer_state, facts)
        buffers.requests[service, NUM_IDS] = ALL_NEURONS
    if layer_state[PREDICTS] == NOBODY:
        return DONE
    started_ns = now_ns()
    if layer_state[PREDICTS] == IN_PYTHON or not choose_neurons(
        team, layer_state[AT_LAYER], layer_state[TOKENS], buffers, GPU
    ):
        return CHOOSE
    layer_state[PREDICTOR_NS] += now_ns() - started_ns
    return DONE


@njit(nogil=True, cache=True)
def _compute(layer_state, request_state, buffers, facts):
    """Ask for the FFN's partial outputs."""
    return COMPUTE if layer_state[OWN_FFN] else _ask(layer_state, request_state, buffers, facts)


@njit(nogil=True, cache=True)
def _add(layer_state, buffers, facts):
    """hidden = mixed + the FFN's output, normed and scaled where the model does so."""
    layer, num_tokens, first = layer_state[AT_LAYER], layer_state[TOKENS], layer_state[FIRST]
    if layer_state[IS_ASKED]:
        _count_ffn(layer_state, buffers, facts)
    partials, weight = buffers.partials[: layer_state[END]], facts.output_norm[layer]
    if weight.shape[0] == 0 and facts.residual_scale == 1:
        merge_partials(buffers.mixed, partials, first, num_tokens, buffers.hidden)
    else:
        merge_normed(
            buffers.mixed, partials, first, num_tokens, facts.norm_kind, weight, facts.norm_epsilon,
            facts.residual_scale, buffers.hidden,
        )  # fmt: skip
    # Before anything else is asked: a gate that is NaN fires for nobody, and would hide it.
    if not finite_pair(buffers.ffn_input, buffers.hidden, num_tokens):
        return NOT_FINITE
    layer_state[AT_LAYER] = layer + 1
    return DONE


@njit(nogil=True, cache=True)
def merge_partials(mixed, partials, first, num_tokens, hidden):
    """hidden[t] = mixed[t] + sum over services s >= first of partials[s, t]; checks nothing.

    mixed, hidden (T, d), partials (S, T, d) float32; always summed in the services' order.
    """
    for t in range(num_tokens):
        target = hidden[t]
        target[:] = mixed[t]
        for s in range(first, partials.shape[0]):
            part = partials[s, t]
            for i in range(target.shape[0]):
                target[i] += part[i]


@njit(nogil=True, cache=True)
def merge_normed(mixed, partials, first, num_tokens, kind, weight, epsilon, scale, hidden):
    """hidden[t] = mixed[t] + scale * norm(sum over services s >= first of partials[s, t]).

    weight (d,) float32, or (0,) for no norm; shapes and order as in `merge_partials`. No checks.
    """
    for t in range(num_tokens):
        target = hidden[t]
        target[:] = partials[first, t]
        for s in range(first + 1, partials.shape[0]):
            part = partials[s, t]
            for i in range(target.shape[0]):
                target[i] += part[i]
        norm_kernel(kind, target, weight, weight[:0], epsilon, target)
        for i in range(target.shape[0]):
            target[i] = mixed[t, i] + scale * target[i]


@njit(nogil=True, cache=True)
def _write_request(request, operation, layer_state, facts):
    layer = layer_state[AT_LAYER]
    request[OPERATION], request[LAYER], request[NUM_TOKENS] = operation, layer, layer_state[TOKENS]
    request[GATE_THRESHOLD] = facts.thresholds[layer, 0]
    request[PRODUCT_THRESHOLD] = facts.thresholds[layer, 1]


@njit(nogil=True, cache=True)
def _ask(layer_state, request_state, buffers, facts):
    layer_state[IS_ASKED], layer_state[ASK_WAITED_NS] = 1, 0
    if request_state.shape[0] == 0:
        return ASK
    started_ns = now_ns()
    services = facts.services[layer_state[FIRST] : layer_state[END]]
    is_answered = send_requests(request_state, buffers.cells, buffers.replies, services)
    layer_state[ASK_WAITED_NS] = now_ns() - started_ns
    return DONE if is_answered else RESUME


@njit(nogil=True, cache=True)
def _longest_busy(layer_state, buffers):
    longest_ns = 0
    for service in range(layer_state[FIRST], layer_state[END]):
        longest_ns = max(longest_ns, buffers.replies[service, BUSY_NS])
    return longest_ns


@njit(nogil=True, cache=True)
def _count_ffn(layer_state, buffers, facts):
    """Add an answered FFN to the walk's sums."""
    layer_state[IS_ASKED] = 0
    layer_state[FFN_BUSY_NS] += _longest_busy(layer_state, buffers)
    layer_state[FFN_WAITED_NS] += layer_state[ASK_WAITED_NS]
    num_gates, is_chosen = facts.num_hot[layer_state[AT_LAYER]], False
    for service in range(layer_state[FIRST], layer_state[END]):
        layer_state[SUM_COMPUTED] += buffers.replies[service, NUM_COMPUTED]
        layer_state[SUM_UPS] += buffers.replies[service, NUM_UP]
        if buffers.requests[service, NUM_IDS] != ALL_NEURONS:
            num_gates += buffers.requests[service, NUM_IDS]
            is_chosen = True
    layer_state[SUM_GATES] += num_gates if is_chosen else facts.ffn_size
