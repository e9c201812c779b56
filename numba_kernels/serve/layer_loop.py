"""The layer loop of the driver: attention, choice of neurons, FFN and residual, layer by layer.

The loop is a state machine in one record, written once for all kinds of exchange. With doorbells it
sends requests, waits and goes on, layer after layer, without Python. Otherwise, and wherever Python
has to decide or do something, it yields to Python with a reason and resumes at the next call of
`run_layers`.
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

ATTENTION_SERVICE = 0  # of attention, head and hot neurons; the CPU services follow

# Words of the loop's state: its position
AT_LAYER, AT_PHASE, END_LAYER, TOKENS = range(4)
PREDICTS, OWN_FFN = 4, 5  # who chooses neurons; whether Python computes the FFN
FIRST, END, IS_SENT = 6, 7, 8  # services first..end - 1; a request was sent and is not counted yet
REQUEST_WAITED_NS = 9  # for its replies
# and sums over its layers, as in `StepTimes`
ATTENTION_BUSY_NS, ATTENTION_WAITED_NS, FFN_BUSY_NS, FFN_WAITED_NS = range(10, 14)
SUM_COMPUTED, SUM_UPS, SUM_GATES = range(14, 17)
PREDICTOR_NS = 17
PREDICTOR_INPUT = 18  # which array of the buffers: as INPUT of `predict_team`
NUM_STATE_WORDS = 24  # whole cache lines

# values of PREDICTS
NOBODY, IN_PYTHON, IN_TEAM = range(3)

# phases of a layer
_ANNOUNCE, _ATTEND, _CHOOSE, _COMPUTE, _ADD = range(5)
_NUM_PHASES = 5

# reasons for which the loop yields to Python
DONE = 0  # all layers are done
SEND_REQUESTS = 1  # send services FIRST..END - 1 the requests in their request words, and wait
RESUME = 2  # requests were sent: a service has failed, or its health has to be polled
ANNOUNCE = 3  # a request for the predictor's input is about to be sent
CHOOSE = 4  # the predictor's input is ready: write NUM_IDS and ids of the CPU services
COMPUTE = 5  # compute the FFN; services FIRST..END - 1 have their request words
NOT_FINITE = 6  # the layer's FFN input or output has a NaN or an infinity


class LayerFacts(NamedTuple):
    """The model and its services, as the loop needs them; L layers, width d, S services.

    thresholds (L, 2) int64: `threshold_words`; num_hot (L,) int64: neurons of the attention service
    output_norm (L, d) or (L, 0) float32: of the FFN's output; services (S,) int64: 0..S - 1
    """

    thresholds: np.ndarray
    num_hot: np.ndarray
    ffn_size: int
    output_norm: np.ndarray
    norm_kind: np.int32
    norm_epsilon: np.float32
    residual_scale: np.float32
    services: np.ndarray


def new_layer_state() -> np.ndarray:
    """The loop's state, for `begin_layers`."""
    return np.zeros(NUM_STATE_WORDS, np.int64)


def begin_layers(
    layer_state: np.ndarray,
    layers: range,
    num_tokens: int,
    predicts: int = NOBODY,
    own_ffn: bool = False,
    predictor_input: int = 0,
) -> None:
    """Set `layer_state` before the first of `layers`, with all sums zero."""
    layer_state[:] = 0
    layer_state[AT_LAYER], layer_state[END_LAYER] = layers.start, layers.stop
    layer_state[TOKENS] = num_tokens
    layer_state[PREDICTS], layer_state[OWN_FFN] = predicts, own_ffn
    layer_state[PREDICTOR_INPUT] = predictor_input


@njit(nogil=True, cache=True)
def run_layers(layer_state, request_state, buffers, facts, team):
    """Run the loop from where `layer_state` is; returns the reason for which it yields, or DONE.

    `request_state` is of `numba_kernels.serve.mailbox`, or empty where Python sends requests.
    `team` is a `PredictTeam`, NO_TEAM unless it chooses neurons; without `request_state`, and for
    a reply with another sequence number than announced, Python chooses. After SEND_REQUESTS and
    RESUME Python adds its waiting time to REQUEST_WAITED_NS. A failed loop can start again at any
    layer, which reads nothing but `hidden` of the layer before.
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
    """Write the team's task, to be scored once attention is done."""
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
    """Request mixed and ffn_input. A GPU also starts with its hot neurons."""
    _write_request(buffers.requests[ATTENTION_SERVICE], ATTENTION, layer_state, facts)
    layer_state[FIRST], layer_state[END] = ATTENTION_SERVICE, ATTENTION_SERVICE + 1
    return _send(layer_state, request_state, buffers, facts)


@njit(nogil=True, cache=True)
def _choose(layer_state, buffers, facts, team):
    """Write the FFN's requests: for all neurons, unless a predictor chooses."""
    busy_ns = _longest_busy(layer_state, buffers)
    layer_state[ATTENTION_BUSY_NS] += busy_ns
    layer_state[ATTENTION_WAITED_NS] += layer_state[REQUEST_WAITED_NS]
    layer_state[IS_SENT] = 0
    has_hot = facts.num_hot[layer_state[AT_LAYER]] > 0
    layer_state[FIRST] = ATTENTION_SERVICE if has_hot else ATTENTION_SERVICE + 1
    layer_state[END] = facts.services.shape[0]
    for service in range(layer_state[FIRST], layer_state[END]):
        _write_request(buffers.requests[service], FFN, layer_state, facts)
        buffers.requests[service, NUM_IDS] = ALL_NEURONS
    if layer_state[PREDICTS] == NOBODY:
        return DONE
    started_ns = now_ns()
    if layer_state[PREDICTS] == IN_PYTHON or not choose_neurons(
        team, layer_state[AT_LAYER], layer_state[TOKENS], buffers, ATTENTION_SERVICE
    ):
        return CHOOSE
    layer_state[PREDICTOR_NS] += now_ns() - started_ns
    return DONE


@njit(nogil=True, cache=True)
def _compute(layer_state, request_state, buffers, facts):
    """Request the FFN's partial outputs."""
    return COMPUTE if layer_state[OWN_FFN] else _send(layer_state, request_state, buffers, facts)


@njit(nogil=True, cache=True)
def _add(layer_state, buffers, facts):
    """hidden = mixed + the FFN's output, which some models norm and scale."""
    layer, num_tokens, first = layer_state[AT_LAYER], layer_state[TOKENS], layer_state[FIRST]
    if layer_state[IS_SENT]:
        _count_ffn(layer_state, buffers, facts)
    partials, weight = buffers.partials[: layer_state[END]], facts.output_norm[layer]
    if weight.shape[0] == 0 and facts.residual_scale == 1:
        merge_partials(buffers.mixed, partials, first, num_tokens, buffers.hidden)
    else:
        merge_normed(
            buffers.mixed, partials, first, num_tokens, facts.norm_kind, weight, facts.norm_epsilon,
            facts.residual_scale, buffers.hidden,
        )  # fmt: skip
    # Before the next request: a NaN gate does not fire, which would hide it.
    if not finite_pair(buffers.ffn_input, buffers.hidden, num_tokens):
        return NOT_FINITE
    layer_state[AT_LAYER] = layer + 1
    return DONE


@njit(nogil=True, cache=True)
def merge_partials(mixed, partials, first, num_tokens, hidden):
    """hidden[t] = mixed[t] + sum over services s >= first of partials[s, t]; checks nothing.

    mixed, hidden (T, d), partials (S, T, d) float32; summed in the services' order.
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
def _send(layer_state, request_state, buffers, facts):
    layer_state[IS_SENT], layer_state[REQUEST_WAITED_NS] = 1, 0
    if request_state.shape[0] == 0:
        return SEND_REQUESTS
    started_ns = now_ns()
    services = facts.services[layer_state[FIRST] : layer_state[END]]
    is_done = send_requests(request_state, buffers.cells, buffers.replies, services)
    layer_state[REQUEST_WAITED_NS] = now_ns() - started_ns
    return DONE if is_done else RESUME


@njit(nogil=True, cache=True)
def _longest_busy(layer_state, buffers):
    longest_ns = 0
    for service in range(layer_state[FIRST], layer_state[END]):
        longest_ns = max(longest_ns, buffers.replies[service, BUSY_NS])
    return longest_ns


@njit(nogil=True, cache=True)
def _count_ffn(layer_state, buffers, facts):
    """Add the replies of the FFN to the loop's sums."""
    layer_state[IS_SENT] = 0
    layer_state[FFN_BUSY_NS] += _longest_busy(layer_state, buffers)
    layer_state[FFN_WAITED_NS] += layer_state[REQUEST_WAITED_NS]
    num_gates, is_chosen = facts.num_hot[layer_state[AT_LAYER]], False
    for service in range(layer_state[FIRST], layer_state[END]):
        layer_state[SUM_COMPUTED] += buffers.replies[service, NUM_COMPUTED]
        layer_state[SUM_UPS] += buffers.replies[service, NUM_UP]
        if buffers.requests[service, NUM_IDS] != ALL_NEURONS:
            num_gates += buffers.requests[service, NUM_IDS]
            is_chosen = True
    layer_state[SUM_GATES] += num_gates if is_chosen else facts.ffn_size
