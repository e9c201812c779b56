"""The layer loop of the driver: attention, choice of neurons, FFN and residual, layer by layer.

Behind the last layer the head follows, where logits are wanted. Layers of which one service has
everything can be one request, and so can layers that a GPU shares with CPU services.

The loop is a state machine in one record, written once for all kinds of exchange. With doorbells it
sends requests, waits and goes on, layer after layer, without Python. Otherwise, and wherever Python
has to decide or do something, it yields to Python with a reason and resumes at the next call of
`run_layers`.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.finite import finite_pair, finite_rows
from hotcold.numba_kernels.decode.vectors import copy_numbers
from hotcold.numba_kernels.loops import mailbox
from hotcold.numba_kernels.loops.doorbell import now_ns
from hotcold.numba_kernels.loops.mailbox import (
    ALL_NEURONS,
    ATTENTION,
    BUSY_NS,
    FFN,
    FIRST_LOGIT,
    GATE_THRESHOLD,
    GIVER,
    HEAD,
    LAYER,
    LAYERS,
    LISTED,
    NUM_COMPUTED,
    NUM_IDS,
    NUM_LISTED,
    NUM_TOKENS,
    NUM_UP,
    OPERATION,
    PRODUCT_THRESHOLD,
    TARGET,
    THEN,
    WEIGHS_BLOCKS,
    send_requests,
)
from hotcold.numba_kernels.loops.output_sums import (
    add_sums,
    merge_normed,
    merge_pair,
    merge_partials,
)
from hotcold.numba_kernels.loops.selector import announce, has_predictors, predicts, select

# Words of the loop's state: its position
AT_LAYER, AT_PHASE, END_LAYER, TOKENS = range(4)
OWN_FFN = 4  # whether Python computes the FFN
NEXT_NUMBER = 5  # of the next request by doorbell where Python sends it; 0 without doorbells
REQUESTED = 6  # ATTENTION, FFN, LAYERS, SHARED or HEAD: says what `requested_services` are
IS_SENT = 7  # a request was sent and is not counted yet
REQUEST_WAITED_NS = 8  # for its replies
# and sums over its layers, as in `StepTimes`
ATTENTION_BUSY_NS, ATTENTION_WAITED_NS, FFN_BUSY_NS, FFN_WAITED_NS = range(9, 13)
SUM_COMPUTED, SUM_UPS, SUM_GATES = range(13, 16)
PREDICTOR_NS = 16
WEIGHTS = 17  # TARGET or DRAFT
UNWANTED = 18  # of a prompt's last layer: tokens before those whose output is wanted
NUM_LOGITS = 19  # of the last tokens, from the head after the last layer
HEAD_BUSY_NS, HEAD_WAITED_NS = 20, 21
JOINS = 22  # whether whole layers are joined to one request
LAYERS_BUSY_NS, LAYERS_WAITED_NS = 23, 24
SHARES = 25  # whether layers that services share are; no longer once they gave up
NUM_STATE_WORDS = 32  # whole cache lines

CHOSEN, READ = range(2)  # of `block_counts`
ALONE, FIRST, SECOND = range(3)  # of `pairs`

# as REQUESTED: both at once, the FFN's services rung by the attention service, and awaited first
_ATTENTION_THEN_FFN = -1
SHARED = -2  # LAYERS of all services that share layers
_ROUTED, _LISTED = 1, 2

# phases of a layer; _END follows the request for whole layers
_ATTEND, _CHOOSE, _COMPUTE, _ADD = range(4)
_NUM_PHASES = 4
_END = 4

# reasons for which the loop yields to Python
DONE = 0  # all layers are done, and the head
SEND_REQUESTS = 1  # send `requested_services` the requests in their request words, and wait
RESUME = 2  # requests were sent: a service has failed, or its health has to be polled
COMPUTE = 3  # compute the FFN; `requested_services` have their request words
NOT_FINITE = 4  # the layer's FFN input or output, or a logit, is a NaN or an infinity


class LayerFacts(NamedTuple):
    """The model and its services, as the loop needs them; L layers, width d, S services.

    attention_of (L,) int64: the service with a layer's attention
    ffn_of (L, S + 1) int64: the num_ffn[l] services with its FFN, in the order in which they are
    added; behind them attention_of[l]
    is_chained (L,) bool: whether attention_of[l] may ring these, as it is none of them
    num_neurons (L, S, B) int64: how many neurons of each block of a layer each service holds
    cpu_services (C,) int64: those whose neurons predictors choose, in the predictors' order
    output_norm (L, d) or (L, 0) float32: of the FFN's output
    pair_norm (L, d) or (L, 0) float32: of the sum of two FFNs' outputs, of layers that end a pair
    pairs (L,) int64: FIRST of a pair of FFNs, SECOND, or ALONE
    residual: the array of the residual stream before the FFN's norm, as INPUT of `predict_team`
    block_counts (L, B, 2) int64: how often the model's own weights of each block were chosen so
    far: by tokens (CHOSEN), and by steps, which read it once for all of their tokens (READ)
    sums (n, 3) int64: where CPU services have some stripes of neurons each, what they pass on
    (`decode.stripes`): the service, which of its outputs, the first stripe, by which they are
    ascending
    head (1,) int64: the service with the head
    end_of_whole (L,) int64: layers l to end_of_whole[l] - 1 can be one request to attention_of[l],
    in steps of few tokens; none where that is l
    joins_head: whether the head can be requested with the last of these
    end_of_shared (L,) int64: as end_of_whole, of layers that services share or one has as a whole
    sharing (n,) int64: the services that do, that with attention first
    gpu_predicts (L,) bool: whether the GPU with a layer's attention has predictors of all neurons
    """

    attention_of: np.ndarray
    ffn_of: np.ndarray
    num_ffn: np.ndarray
    is_chained: np.ndarray
    num_neurons: np.ndarray
    cpu_services: np.ndarray
    output_norm: np.ndarray
    norm_kind: np.int32
    norm_epsilon: np.float32
    residual_scale: np.float32
    residual: int
    block_counts: np.ndarray = np.zeros((0, 0, 2), np.int64)
    sums: np.ndarray = np.zeros((0, 3), np.int64)
    head: np.ndarray = np.zeros(1, np.int64)
    end_of_whole: np.ndarray = np.zeros(0, np.int64)
    joins_head: bool = False
    end_of_shared: np.ndarray = np.zeros(0, np.int64)
    sharing: np.ndarray = np.zeros(0, np.int64)
    gpu_predicts: np.ndarray = np.zeros(0, np.bool_)
    pair_norm: np.ndarray = np.zeros((0, 0), np.float32)
    pairs: np.ndarray = np.zeros(0, np.int64)


def new_layer_state() -> np.ndarray:
    """The loop's state, for `begin_layers`."""
    return np.zeros(NUM_STATE_WORDS, np.int64)


def begin_layers(
    layer_state: np.ndarray,
    layers: range,
    num_tokens: int,
    own_ffn: bool = False,
    weights: int = TARGET,
    num_unwanted: int = 0,
    num_logits: int = 0,
    joins: bool = False,
    shares: bool = False,
) -> None:
    """Set `layer_state` before the first of `layers`, with all sums zero.

    num_unwanted: of so many first tokens nothing but keys and values is computed
    num_logits: so many last tokens have logits
    joins: whether whole layers are joined, which leaves only `hidden` of the last one behind
    shares: and those that services share
    """
    layer_state[:] = 0
    layer_state[AT_LAYER], layer_state[END_LAYER] = layers.start, layers.stop
    layer_state[TOKENS] = num_tokens
    layer_state[OWN_FFN] = own_ffn
    layer_state[WEIGHTS], layer_state[UNWANTED] = weights, num_unwanted
    layer_state[NUM_LOGITS], layer_state[JOINS] = num_logits, joins
    layer_state[SHARES] = joins and shares


@njit(nogil=True, cache=True)
def requested_services(layer_state, facts):
    """The services that the loop sends requests to now, or adds partial outputs of: int64."""
    layer = layer_state[AT_LAYER]
    if layer_state[REQUESTED] == ATTENTION or layer_state[REQUESTED] == LAYERS:
        return facts.attention_of[layer : layer + 1]
    if layer_state[REQUESTED] == HEAD:
        return facts.head
    if layer_state[REQUESTED] == SHARED:
        return facts.sharing
    is_both = layer_state[REQUESTED] == _ATTENTION_THEN_FFN
    return facts.ffn_of[layer, : facts.num_ffn[layer] + is_both]


@njit(nogil=True, cache=True)
def run_layers(layer_state, request_state, buffers, facts, selector):
    """Run the loop from where `layer_state` is; returns the reason for which it yields, or DONE.

    `request_state` is of `numba_kernels.loops.mailbox`, or empty where Python sends requests.
    `selector` is the step's (`numba_kernels.loops.selector`). After SEND_REQUESTS and RESUME Python
    adds its waiting time to REQUEST_WAITED_NS. A failed loop can start again at any layer, which
    reads nothing but `hidden` of the layer before.
    """
    while layer_state[AT_LAYER] < layer_state[END_LAYER]:
        phase = layer_state[AT_PHASE]
        layer_state[AT_PHASE] = (phase + 1) % _NUM_PHASES
        if phase == _ATTEND:
            reason = _attend(layer_state, request_state, buffers, facts, selector)
        elif phase == _CHOOSE:
            reason = _choose(layer_state, buffers, facts, selector)
        elif phase == _COMPUTE:
            reason = _compute(layer_state, request_state, buffers, facts)
        elif phase == _END:
            reason = _end(layer_state, buffers, facts, selector)
        else:
            reason = _add(layer_state, buffers, facts)
        if reason != DONE:
            return reason
    return _head(layer_state, request_state, buffers, facts)


@njit(nogil=True, cache=True)
def _attend(layer_state, request_state, buffers, facts, selector):
    """Request ffn_residual and ffn_input, and behind them the FFN where it needs no choice.

    Of whole layers, and of shared ones, request all.
    """
    end, is_shared, rule = _end_of_joined(layer_state, request_state, facts, selector)
    if end > layer_state[AT_LAYER]:
        layer_state[REQUESTED], layer_state[AT_PHASE] = SHARED if is_shared else LAYERS, _END
        _write_requests(layer_state, buffers, facts, selector)
        has_head = facts.joins_head and end == facts.end_of_whole.shape[0]
        has_head &= layer_state[NUM_LOGITS] == layer_state[TOKENS]
        for service in requested_services(layer_state, facts):
            request = buffers.requests[service]
            request[mailbox.END_LAYER] = end
            request[FIRST_LOGIT] = 0 if has_head else layer_state[TOKENS]
            request[GIVER] = facts.attention_of[layer_state[AT_LAYER]]
            request[NUM_IDS] = LISTED if rule & _LISTED else ALL_NEURONS
            request[WEIGHS_BLOCKS] = rule & _ROUTED
        return _send(layer_state, request_state, buffers, facts)
    number = layer_state[NEXT_NUMBER]
    if request_state.shape[0]:
        number = request_state[mailbox.NEXT_NUMBER]
    layer, num_tokens = layer_state[AT_LAYER], layer_state[TOKENS]
    announce(selector, layer, num_tokens, facts.residual, facts.attention_of[layer], number)
    layer_state[REQUESTED] = ATTENTION
    _write_requests(layer_state, buffers, facts, selector)
    if _chains(layer_state, request_state, facts, selector):
        layer_state[REQUESTED] = FFN
        _write_requests(layer_state, buffers, facts, selector)
        asked, then = requested_services(layer_state, facts), np.int64(0)
        select(selector, layer, num_tokens, buffers, asked, facts.cpu_services)
        for service in asked:
            then |= np.int64(1) << service
        buffers.requests[facts.attention_of[layer], THEN] = then
        layer_state[REQUESTED] = _ATTENTION_THEN_FFN
    return _send(layer_state, request_state, buffers, facts)


@njit(nogil=True, cache=True)
def _end_of_joined(layer_state, request_state, facts, selector):
    """The end of the layers that are requested at once from here on; this layer where none are.

    And whether services share some of them; by which rule: CPU services' experts are _ROUTED, the
    GPU's predictors choose neurons that are _LISTED. A request has one pair of thresholds, and one
    rule.
    """
    first = end = layer_state[AT_LAYER]
    if not layer_state[JOINS] or layer_state[OWN_FFN]:
        return end, False, 0
    shares = request_state.shape[0] > 0 and layer_state[SHARES] != 0
    last = facts.end_of_shared[first] if shares else facts.end_of_whole[first]
    of_shared = listed = -1
    while (
        end < min(layer_state[END_LAYER], last)
        and selector.thresholds[end, 0] == selector.thresholds[first, 0]
        and selector.thresholds[end, 1] == selector.thresholds[first, 1]
    ):
        own = _LISTED * _gpu_predicts(layer_state, end, facts, selector)
        if listed >= 0 and own != listed:
            break
        if facts.end_of_whole[end] == end:  # it is not whole
            routed = _ROUTED * selector.is_routed[end]
            if (of_shared >= 0 and routed != of_shared) or (
                not own and predicts(selector, end, layer_state[TOKENS])
            ):
                break
            of_shared = routed
        listed, end = own, end + 1
    return end, of_shared >= 0, max(of_shared, 0) + max(listed, 0)


@njit(nogil=True, cache=True)
def _gpu_predicts(layer_state, layer, facts, selector):
    """Whether the GPU's predictors choose a layer's neurons in this step."""
    return (
        facts.gpu_predicts[layer]
        and layer_state[WEIGHTS] == TARGET
        and has_predictors(selector, layer_state[TOKENS])
    )


@njit(nogil=True, cache=True)
def _end(layer_state, buffers, facts, selector):
    """hidden = ffn_residual, the output of the layers requested, and logits where they were.

    The service with attention says how many tokens chose each block of neurons.

    What is not finite, or was given up, is requested again one by one: `hidden` is still the
    layers' input.
    """
    first, num_tokens = layer_state[AT_LAYER], layer_state[TOKENS]
    giver = facts.attention_of[first]
    request, reply = buffers.requests[giver], buffers.replies[giver]
    end = request[mailbox.END_LAYER]
    layer_state[LAYERS_BUSY_NS] += reply[BUSY_NS]
    layer_state[LAYERS_WAITED_NS] += layer_state[REQUEST_WAITED_NS]
    layer_state[IS_SENT], layer_state[AT_PHASE] = 0, _ATTEND
    if reply[NUM_COMPUTED] == mailbox.GAVE_UP:
        layer_state[SHARES] = 0
        return DONE
    if not finite_rows(buffers.ffn_residual, num_tokens):
        layer_state[JOINS] = 0
        return DONE
    for t in range(num_tokens):
        copy_numbers(buffers.ffn_residual[t], buffers.hidden[t])
    for service in requested_services(layer_state, facts):
        layer_state[SUM_COMPUTED] += buffers.replies[service, NUM_COMPUTED]
        layer_state[SUM_UPS] += buffers.replies[service, NUM_UP]
        if request[NUM_IDS] == LISTED:
            layer_state[SUM_GATES] += buffers.replies[service, NUM_LISTED]
    for layer in range(first, end):
        is_routed = selector.is_routed[layer]
        for service in requested_services(layer_state, facts):
            if request[NUM_IDS] == LISTED:
                break
            sizes = facts.num_neurons[layer, service]
            for block in range(sizes.shape[0]):
                if not is_routed or buffers.block_tokens[layer, block]:
                    layer_state[SUM_GATES] += sizes[block]
        if is_routed and layer_state[WEIGHTS] == TARGET and facts.block_counts.shape[1]:
            for block in range(facts.block_counts.shape[1]):
                num_chosen = buffers.block_tokens[layer, block]
                _count_block(num_chosen, facts.block_counts[layer, block])
    layer_state[AT_LAYER] = end
    if request[FIRST_LOGIT] == 0 and finite_rows(buffers.logits, num_tokens):
        layer_state[NUM_LOGITS] = 0  # that are left
    return DONE


@njit(nogil=True, cache=True)
def _chains(layer_state, request_state, facts, selector):
    """Whether the layer's FFN is requested with its attention: nothing has to be done between."""
    layer, num_tokens = layer_state[AT_LAYER], layer_state[TOKENS]
    return (
        request_state.shape[0] > 0
        and facts.is_chained[layer]
        and not layer_state[OWN_FFN]
        and layer_state[UNWANTED] < num_tokens
        and not predicts(selector, layer, num_tokens)
    )


@njit(nogil=True, cache=True)
def _choose(layer_state, buffers, facts, selector):
    """Write the FFN's requests, for the neurons that the selector chooses."""
    is_both = layer_state[REQUESTED] == _ATTENTION_THEN_FFN
    layer_state[REQUESTED] = ATTENTION
    busy_ns = _longest_busy(layer_state, buffers, facts)
    layer_state[ATTENTION_BUSY_NS] += busy_ns
    if is_both:
        layer_state[ATTENTION_WAITED_NS] += busy_ns
        layer_state[REQUEST_WAITED_NS] -= busy_ns
        layer_state[REQUESTED] = FFN
        return DONE
    layer_state[ATTENTION_WAITED_NS] += layer_state[REQUEST_WAITED_NS]
    layer_state[IS_SENT] = 0
    if layer_state[UNWANTED] == layer_state[TOKENS]:  # keys and values are all
        layer_state[AT_LAYER] += 1
        layer_state[AT_PHASE] = _ATTEND
        return DONE
    layer_state[REQUESTED] = FFN
    _write_requests(layer_state, buffers, facts, selector)
    started_ns, layer, num_tokens = now_ns(), layer_state[AT_LAYER], layer_state[TOKENS]
    asked = requested_services(layer_state, facts)
    select(selector, layer, num_tokens, buffers, asked, facts.cpu_services)
    giver = facts.attention_of[layer]
    if _gpu_predicts(layer_state, layer, facts, selector):
        buffers.requests[giver, NUM_IDS] = LISTED
    if predicts(selector, layer, num_tokens):
        layer_state[PREDICTOR_NS] += now_ns() - started_ns
    return DONE


@njit(nogil=True, cache=True)
def _compute(layer_state, request_state, buffers, facts):
    """Request the FFN's partial outputs, if they were not requested with attention."""
    if layer_state[IS_SENT]:
        return DONE
    return COMPUTE if layer_state[OWN_FFN] else _send(layer_state, request_state, buffers, facts)


@njit(nogil=True, cache=True)
def _add(layer_state, buffers, facts):
    """hidden = ffn_residual + the FFN's output, which some models norm and scale."""
    layer, num_tokens = layer_state[AT_LAYER], layer_state[TOKENS]
    first = layer_state[UNWANTED]
    services, weight = requested_services(layer_state, facts), facts.output_norm[layer]
    if layer_state[IS_SENT]:
        _count_ffn(layer_state, buffers, facts)
    if facts.sums.shape[0] and layer_state[REQUESTED] != ATTENTION:  # that alone has the sum
        add_sums(buffers.partials, buffers.more_partials, facts.sums, first, num_tokens)
        while services[services.shape[0] - 1] != facts.sums[0, 0]:
            services = services[: services.shape[0] - 1]  # all of theirs are in the first one's
    if facts.pairs[layer] != ALONE:
        merge_pair(
            buffers.ffn_residual, buffers.partials, services, first, num_tokens, facts.norm_kind,
            weight, facts.pair_norm[layer], facts.pairs[layer] == SECOND, facts.norm_epsilon,
            buffers.hidden,
        )  # fmt: skip
    elif weight.shape[0] == 0 and facts.residual_scale == 1:
        merge_partials(
            buffers.ffn_residual, buffers.partials, services, first, num_tokens, buffers.hidden
        )
    else:
        merge_normed(
            buffers.ffn_residual, buffers.partials, services, first, num_tokens, facts.norm_kind,
            weight, facts.norm_epsilon, facts.residual_scale, buffers.hidden,
        )  # fmt: skip
    # Before the next request: a NaN gate does not fire, which would hide it.
    if not finite_pair(buffers.ffn_input[first:], buffers.hidden[first:], num_tokens - first):
        return NOT_FINITE
    is_weighed = buffers.requests[services[0], WEIGHS_BLOCKS]
    if is_weighed and layer_state[WEIGHTS] == TARGET and facts.block_counts.shape[1]:
        count_blocks(buffers.block_weights[first:], num_tokens - first, facts.block_counts[layer])
    layer_state[AT_LAYER] = layer + 1
    return DONE


@njit(nogil=True, cache=True)
def _head(layer_state, request_state, buffers, facts):
    """Request the logits, if there are to be any."""
    num_logits, num_tokens = layer_state[NUM_LOGITS], layer_state[TOKENS]
    if num_logits == 0:
        return DONE
    if layer_state[AT_PHASE] == _ATTEND:
        layer_state[AT_PHASE], layer_state[REQUESTED] = _ADD, HEAD
        request = buffers.requests[facts.head[0]]
        request[OPERATION], request[NUM_TOKENS] = HEAD, num_tokens
        request[FIRST_LOGIT] = num_tokens - num_logits
        request[mailbox.WEIGHTS] = layer_state[WEIGHTS]
        reason = _send(layer_state, request_state, buffers, facts)
        if reason != DONE:
            return reason
    layer_state[HEAD_BUSY_NS] = buffers.replies[facts.head[0], BUSY_NS]
    layer_state[HEAD_WAITED_NS] = layer_state[REQUEST_WAITED_NS]
    return DONE if finite_rows(buffers.logits, num_logits) else NOT_FINITE


@njit(nogil=True, cache=True)
def count_blocks(block_weights, num_tokens, counts):
    """Add to counts (B, 2) int64 how many of the tokens, and whether any, chose each block."""
    for block in range(counts.shape[0]):
        num_chosen = 0
        for t in range(num_tokens):
            num_chosen += block_weights[t, block] != 0
        _count_block(num_chosen, counts[block])


@njit(nogil=True, cache=True, inline="always")
def _count_block(num_chosen, counts):
    counts[CHOSEN] += num_chosen
    counts[READ] += num_chosen > 0


@njit(nogil=True, cache=True)
def _write_requests(layer_state, buffers, facts, selector):
    """Write the words of what is REQUESTED; of an FFN's the selector writes the others."""
    layer, operation = layer_state[AT_LAYER], layer_state[REQUESTED]
    for service in requested_services(layer_state, facts):
        request = buffers.requests[service]
        request[OPERATION] = LAYERS if operation == SHARED else operation
        request[LAYER] = layer
        request[NUM_TOKENS] = layer_state[TOKENS]
        request[mailbox.WEIGHTS] = layer_state[WEIGHTS]
        request[mailbox.NUM_UNWANTED] = layer_state[UNWANTED]
        request[THEN] = 0
        request[GATE_THRESHOLD] = selector.thresholds[layer, 0]
        request[PRODUCT_THRESHOLD] = selector.thresholds[layer, 1]


@njit(nogil=True, cache=True)
def _send(layer_state, request_state, buffers, facts):
    layer_state[IS_SENT], layer_state[REQUEST_WAITED_NS] = 1, 0
    if request_state.shape[0] == 0:
        return SEND_REQUESTS
    started_ns = now_ns()
    services = requested_services(layer_state, facts)
    is_done = send_requests(
        request_state, buffers.cells, buffers.requests, buffers.replies, services
    )
    layer_state[REQUEST_WAITED_NS] = now_ns() - started_ns
    return DONE if is_done else RESUME


@njit(nogil=True, cache=True)
def _longest_busy(layer_state, buffers, facts):
    longest_ns = 0
    for service in requested_services(layer_state, facts):
        longest_ns = max(longest_ns, buffers.replies[service, BUSY_NS])
    return longest_ns


@njit(nogil=True, cache=True)
def _count_ffn(layer_state, buffers, facts):
    """Add the replies of the FFN to the loop's sums."""
    layer_state[IS_SENT] = 0
    layer_state[FFN_BUSY_NS] += _longest_busy(layer_state, buffers, facts)
    layer_state[FFN_WAITED_NS] += layer_state[REQUEST_WAITED_NS]
    for service in requested_services(layer_state, facts):
        layer_state[SUM_COMPUTED] += buffers.replies[service, NUM_COMPUTED]
        layer_state[SUM_UPS] += buffers.replies[service, NUM_UP]
        sizes = facts.num_neurons[layer_state[AT_LAYER], service]
        layer_state[SUM_GATES] += _num_gates(buffers, service, sizes)


@njit(nogil=True, cache=True)
def _num_gates(buffers, service, sizes):
    """How many gates the service was asked for, of `sizes` (B,) neurons in each block."""
    request = buffers.requests[service]
    if request[NUM_IDS] == LISTED:
        return buffers.replies[service, NUM_LISTED]
    if request[NUM_IDS] != ALL_NEURONS:
        return request[NUM_IDS]
    num_gates = np.int64(0)
    for block in range(sizes.shape[0]):
        is_chosen = not request[WEIGHS_BLOCKS]
        for t in range(request[mailbox.NUM_UNWANTED], 0 if is_chosen else request[NUM_TOKENS]):
            is_chosen = is_chosen or buffers.block_weights[t, block] != 0
        num_gates += sizes[block] if is_chosen else 0
    return num_gates
