"""Requests and replies between the driver and services through shared memory.

Each service has nine doorbell cells, a row of request words and a row of reply words. The driver
writes the request words and rings REQUEST with the next sequence number. Every thread of the
service does its part; the last one writes the reply and rings DONE with that number. Before that it
rings REQUEST of others where the word THEN says so, whose requests follow its own and have its
number: the driver need not wake in between. A request changes nothing that it reads, so it can be
sent again.

Services may share layers: one request, LAYERS, is sent to a GPU and to CPU services. The GPU writes
each layer's FFN input and then its INPUT; each CPU service writes its partial outputs and then its
OUTPUT, for which the GPU waits before it adds them. Both are a `layer_mark`, of the request's
number and the layer. Whoever finds that another one is lost writes the request's number to STOPPED:
all end their parts of it, and the driver asks for the layers in another way.

A service's last threads may be left out while other programs want its cores: TEAM says how many.
They sleep there, and no request waits for them. It changes between two requests alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.numba_kernels.decode.selection import NO_IDS, NO_MASKS, NO_WEIGHTS, Selection
from hotcold.numba_kernels.loops.doorbell import (
    CLOCK_US,
    INTS_A_CELL,
    RUNG_US,
    WAITED_US,
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_store,
    barrier,
    now_ns,
    rest,
    ring,
    sleep_change,
    wait_change,
)

REQUEST, DONE, ARRIVED, BARRIER_COUNT, BARRIER_GENERATION = range(5)
# Rung with a request's number where the router reads the layer's input, once experts are chosen: so
# others may read them while attention is computed.
ROUTED = 5
# How many of a service's threads are left out; ENDED once it has stopped.
TEAM = 6
INPUT, OUTPUT = 7, 8  # a layer's FFN input, of a GPU, and its partial outputs, are there
CELLS_A_SERVICE = 9
# Words of TEAM's cell: how many are to be left out from the next request on; the last request
# before threads came back, which is not theirs, or 0.
WANTED, CAME_BACK = 5, 6
ENDED = -1
STOPPED = 5  # word of INPUT's cell: the last request that was given up
LENGTH = 5  # word of OUTPUT's cell: of the list of a shared layer's neurons
# Words of ARRIVED's cell: the shared layer that a service's threads came to, plus 1, times 2, and 1
# more if they end there; how many have done their part of it.
TURN, HAVE_DONE = 5, 6
AWAITED_US = 7  # what one thread of a request has waited for other services' layers
MOST_SHARED = 1000  # layers
_MARK_BITS = 10
_MAX_DELAYED_US = 10_000  # of one request; longer delays have other causes, such as suspension

# request words
OPERATION, LAYER, NUM_TOKENS, NUM_IDS, FIRST_LOGIT, WATCHED, ROUND = range(7)
GATE_THRESHOLD, PRODUCT_THRESHOLD = 7, 8  # `Thresholds`, as the bits of float64 numbers
NEXT_LAYER = 9  # of a prompt: the layer of the next request, plus 1; 0: unknown
WEIGHS_BLOCKS = 10  # whether `block_weights` chooses blocks of neurons
WEIGHTS = 11  # TARGET or DRAFT: a service may hold its part of the model in both
THEN = 12  # of ATTENTION: a bit for each service whose REQUEST is rung when it is done
# Of a prompt: of so many of its first tokens nothing is wanted but keys and values in the cache.
NUM_UNWANTED = 13
END_LAYER = 14  # of LAYERS: they are LAYER to END_LAYER - 1
GIVER = 15  # of shared LAYERS: the service with their attention
MOST_RUNG = 62  # services beyond have no bit
NUM_REQUEST_WORDS = 16  # whole cache lines
ALL_NEURONS = -1  # as NUM_IDS: all neurons of the service's shard
LISTED = -2  # as NUM_IDS of shared LAYERS: the GPU lists them, and LENGTH says how many
TARGET, DRAFT = range(2)  # the model's own weights, or the same in fewer bits
ANY_WEIGHTS = -1  # of a loop that serves all requests with the only weights that it has

# groups of layers with pages of their own in the KV cache: those without and with a window, and
# those that keep a state in them
FULL, WINDOWED, RECURRENT = range(3)
NUM_GROUPS = 3

# operations
STOP, PING, ATTENTION, HEAD, FFN, COUNT_FFN = range(6)  # the last: FFN that counts what fired
SEND, STREAM = 6, 7  # copy a CPU service's neurons to the arena; compute them from there on a GPU
# Attention and FFN of several layers, hidden → ffn_residual, and logits of tokens from FIRST_LOGIT
# on: of all, or with NUM_TOKENS there of none. Of a CPU service its neurons of the layers.
LAYERS = 8

# reply words
STATUS, BUSY_NS, NUM_COMPUTED = range(3)
DELAYED_US, TAKEN_US, NUM_ANSWERED = 3, 4, 5  # of all requests so far: see `finish_request`
NUM_UP = 6  # neurons whose up row was read; NUM_COMPUTED: whose down row was
GAVE_UP = -1  # as NUM_COMPUTED of LAYERS: they were stopped
# Of offloaded neurons, so far: bytes, waiting time, cache lookups and misses of neurons' parts; of
# whole experts that were chosen those of layers that were guessed, and those that were in the
# guess; parts that were read ahead, and those of them that were of use.
BYTES_READ, READ_WAIT_NS, PARTS_LOOKED_UP, PARTS_MISSED = range(7, 11)
PARTS_GUESSABLE, PARTS_GUESSED, PARTS_AHEAD, PARTS_USEFUL = range(11, 15)
NUM_LISTED = 15  # of shared LAYERS: neurons in their lists
NUM_REPLY_WORDS = 16  # whole cache lines
OK, FAILED = 0, 1

# With WATCHED set, FFN requests count computed neurons in buckets of neighbours in the checkpoint:
# up and down rows, or gates; in the last step, or in all watched steps.
NUM_BUCKETS = 64  # of a model without experts; with them each expert is a bucket
LAST_FIRED, LAST_GATES, ALL_FIRED, ALL_GATES = range(4)
NUM_COUNTS = 4

NUM_ORDER = 256  # words of `sum_order`

# words of `new_request_state`, which the exchange owns
NEXT_NUMBER, NUMBER, NUM_DONE, TIMEOUT_NS = range(4)
NUM_REQUEST_STATE_WORDS = 8  # a cache line
# Sequence numbers are 32-bit and wrap around to the first. A new service's first request has a
# number of its own, so that its reply cannot be confused with another service's.
OWN_NUMBER, FIRST_NUMBER, LAST_NUMBER = 1, 2, 2**31 - 1
NO_NUMBER = -1  # as the last number seen: the loop looks at the mailbox at once, and
NO_PROMPTS = 2**62  # as the most tokens of a step: no request is a prompt's, whatever stands there
NO_DOORBELLS = np.zeros(0, np.int64)  # instead of `new_request_state`, where there are none

NO_COUNTERS = np.zeros((0, 0), np.int32)  # read-only within compiled code: an argument from Python
SPINS = 0  # the other side may need this core, so it is yielded from the first poll on
POLL_NS = 100_000_000  # interval of health polls while the driver waits
IDLE_NS = 3_600_000_000_000  # timeout of an idle service's wait, which then waits again


class SharedBuffers(NamedTuple):
    """The shared arrays of a system; S services, at most T tokens a step, width d.

    cells (S * 9 * 16,) int32; requests, replies (S, 16) int64
    positions, slots (T,) int32: each token's position in its sequence, and the sequence's slot
    page_tables (NUM_GROUPS, slots, pages a sequence) int32: entry p is the page with a sequence's
    positions from p * 64 on, in layers of a group; of RECURRENT from p * 16 on, or NO_PAGE
    hidden, ffn_residual, ffn_input (T, d): before attention, after it, and normed for the FFN
    embedded (T, d): hidden before the first layer, divided by sqrt(d), and layer_embeddings
    (T, L * P): where layers have embeddings of P numbers of their own; else (T, 0)
    active_ids (S, N) int32: rows of each service's shard; active_masks (S, N) uint32: bit t is
    set where that row is active for token t (only used for more than one token)
    block_weights (T, B): as in `Selection`, of the current layer; B is 0 in a dense model
    block_tokens (L, B) int32: of the layers that were LAYERS, of how many of the step's tokens each
    block was computed
    guessed_weights (G, B): for up to G tokens, what the next layer's router says of this layer's
    state; G is 0 where nobody reads experts ahead
    partials (S, T, d), logits (R, vocab); float32 where nothing else is said
    more_partials (S, M, T, d): more sums of a service, where it has some of the stripes of neurons
    (`decode.stripes`)
    neuron_counts (S, L, buckets, 4), counted_steps (S, L) uint32: see WATCHED; sums wrap around
    block_misses (S, L, B) uint32: how often a service with experts on storage had to read each
    sum_order (NUM_ORDER,) int32: how partial outputs are added up (`sum_order` of
    actors.protocol.stripes), where a GPU does it; the last word changes with cold_ids
    cold_ids (L, N), cold_bounds (L, S) int32: the CPU services' neurons of each layer, where a GPU
    lists them, one service after the other, and where each service's end; else (0, 0)
    predictor_bits (words,) uint64: the driver's sign predictors, where services use them to read
    ahead (`predictors.stacked`)
    """

    cells: np.ndarray
    requests: np.ndarray
    replies: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    page_tables: np.ndarray
    hidden: np.ndarray
    embedded: np.ndarray
    layer_embeddings: np.ndarray
    ffn_residual: np.ndarray
    ffn_input: np.ndarray
    active_ids: np.ndarray
    active_masks: np.ndarray
    block_weights: np.ndarray
    block_tokens: np.ndarray
    guessed_weights: np.ndarray
    partials: np.ndarray
    more_partials: np.ndarray
    logits: np.ndarray
    neuron_counts: np.ndarray
    counted_steps: np.ndarray
    block_misses: np.ndarray
    sum_order: np.ndarray
    cold_ids: np.ndarray
    cold_bounds: np.ndarray
    predictor_bits: np.ndarray


def threshold_words(thresholds: Sequence[Thresholds]) -> np.ndarray:
    """The words GATE_THRESHOLD and PRODUCT_THRESHOLD of several, (N, 2) int64."""
    pairs = np.array([(each.gate, each.product) for each in thresholds], np.float64)
    return pairs.reshape(-1, 2).view(np.int64)


@njit(nogil=True, cache=True)
def decode_thresholds(request):
    """The thresholds in a request's words (16,) int64."""
    words = request.view(np.float64)
    return Thresholds(np.float32(words[GATE_THRESHOLD]), np.float32(words[PRODUCT_THRESHOLD]))


@njit(nogil=True, cache=True)
def read_selection(buffers, service, has_rows=True):
    """The `Selection` of the FFN request in a service's request words.

    has_rows: whether the service has neurons of the layer, else nobody lists any
    """
    request = buffers.requests[service]
    num_tokens, num_ids = request[NUM_TOKENS], request[NUM_IDS]
    if num_ids == LISTED:
        length = buffers.cells[cell(service, OUTPUT) * INTS_A_CELL + LENGTH]
        num_ids = np.int64(length if has_rows else 0)
    ids = buffers.active_ids[service, :num_ids] if num_ids > 0 else NO_IDS
    masks, weights = NO_MASKS, NO_WEIGHTS
    if num_ids > 0 and num_tokens > 1:
        masks = buffers.active_masks[service, :num_ids]
    if request[WEIGHS_BLOCKS]:
        weights = buffers.block_weights[:num_tokens]
    return Selection(num_ids >= 0, ids, masks, weights)


@njit(nogil=True, cache=True)
def is_for_others(request, weights):
    """Whether a request is for other weights than a loop has: TARGET, DRAFT or ANY_WEIGHTS."""
    return weights != ANY_WEIGHTS and request[WEIGHTS] != weights


def cell_index(service: int, kind: int) -> int:
    """Index of a service's doorbell cell; Python need not wait for a compiler to know it."""
    return service * CELLS_A_SERVICE + kind


cell = njit(nogil=True, cache=True)(cell_index)


@njit(nogil=True, cache=True)
def post(cells, service, number):
    """Ring a service's REQUEST with sequence number `number`."""
    ring(cells, cell(service, REQUEST), np.int32(number))


@njit(nogil=True, cache=True)
def await_done(cells, service, number, timeout_ns):
    """Wait for a service's reply to request `number`; False at the timeout."""
    seen = np.int32(number - 1)
    deadline = now_ns() + timeout_ns
    while True:
        left = deadline - now_ns()
        value = wait_change(cells, cell(service, DONE), seen, SPINS, max(left, 0))
        if value == number:
            return True
        if left <= 0:
            return False
        seen = value


@njit(nogil=True, cache=True)
def next_request(cells, service, seen):
    """Wait for a service's next request after number `seen`; returns its number."""
    while True:
        number = wait_change(cells, cell(service, REQUEST), seen, SPINS, IDLE_NS)
        if number != seen:
            return number


@njit(nogil=True, cache=True)
def next_share(cells, service, thread, num_threads, seen):
    """Wait for the next request after `seen` that a thread shares: its number, and their number.

    0 and 0: the service has ended, and the thread was left out.
    """
    team = cell(service, TEAM) * INTS_A_CELL
    while True:
        number = np.int32(seen)
        if thread + atomic_load(cells, team) < num_threads:
            number = next_request(cells, service, seen)
        left_out = atomic_load(cells, team)
        if left_out == ENDED:
            return np.int32(0), np.int64(0)
        if thread + left_out >= num_threads:
            sleep_change(cells, cell(service, TEAM), left_out, IDLE_NS)
            continue
        # Read again: it may have been rung while this thread was left out.
        number = atomic_load(cells, cell(service, REQUEST) * INTS_A_CELL)
        if seen != NO_NUMBER and number == atomic_load(cells, team + CAME_BACK):
            seen = number
        elif number != seen:
            return number, np.int64(num_threads - left_out)


@njit(nogil=True, cache=True)
def _change_team(cells, service, number, operation):
    """What the last thread of a request does: leave out as many threads as are WANTED."""
    team = cell(service, TEAM) * INTS_A_CELL
    left_out, wanted = cells[team], atomic_load(cells, team + WANTED)
    if operation == STOP:
        wanted = np.int32(ENDED)
    if cells[team + CAME_BACK]:
        cells[team + CAME_BACK] = 0
    if wanted != left_out:
        if wanted < left_out:
            atomic_store(cells, team + CAME_BACK, np.int32(number))
        ring(cells, cell(service, TEAM), wanted)


@njit(nogil=True, cache=True)
def barrier_wait(cells, service, num_threads):
    """Wait until all threads of a service have arrived here."""
    barrier(cells, cell(service, BARRIER_COUNT), cell(service, BARRIER_GENERATION), num_threads)


def layer_mark(number: int, layer: int) -> int:
    """What INPUT and OUTPUT are once a layer's are there; int64, never negative."""
    return (number << _MARK_BITS | layer + 1) & 0x7FFFFFFF


_mark = njit(nogil=True, cache=True)(layer_mark)


@njit(nogil=True, cache=True)
def await_input(cells, service, giver, number, layer, thread):
    """Wait for a shared layer's FFN input from service `giver`; False where they were stopped.

    That of a later one says that the giver has all neurons of this one. The first of a service's
    threads that knows decides for all.
    """
    turn, started_ns = cell(service, ARRIVED) * INTS_A_CELL + TURN, now_ns()
    given = cell(giver, INPUT) * INTS_A_CELL
    wanted, polls = np.int32(_mark(np.int64(number), layer)), 0
    while True:
        decided = atomic_load(cells, turn)
        if decided >> 1 == layer + 1:
            if thread == 0:
                waited_us = np.int32((now_ns() - started_ns) // 1000)
                cells[turn - TURN + AWAITED_US] += waited_us
            return decided & 1 == 0
        mark, decision = atomic_load(cells, given), np.int32(layer + 1 << 1)
        if mark >= wanted and mark >> _MARK_BITS == wanted >> _MARK_BITS:
            atomic_replace(cells, turn, decided, decision)
        elif atomic_load(cells, given + STOPPED) == number or is_stopped(cells, service, number):
            atomic_replace(cells, turn, decided, decision | np.int32(1))
        else:
            rest(cells, turn, decided, polls)
            polls += 1


@njit(nogil=True, cache=True)
def give_output(cells, service, number, layer, num_threads):
    """A thread has done its part of a shared layer; the last one says that all of it is there."""
    arrived = cell(service, ARRIVED) * INTS_A_CELL
    if atomic_add(cells, arrived + HAVE_DONE, np.int32(1)) == num_threads - 1:
        atomic_store(cells, arrived + HAVE_DONE, np.int32(0))
        output = cell(service, OUTPUT) * INTS_A_CELL
        atomic_store(cells, output, np.int32(_mark(np.int64(number), layer)))


@njit(nogil=True, cache=True)
def stop_layers(cells, services, number):
    """End shared layers, if request `number` was for such, in all `services`."""
    for service in services:
        stopped = cell(service, INPUT) * INTS_A_CELL + STOPPED
        atomic_store(cells, stopped, np.int32(number))


@njit(nogil=True, cache=True)
def is_stopped(cells, service, number):
    """Whether `stop_layers` was told a service's request."""
    return atomic_load(cells, cell(service, INPUT) * INTS_A_CELL + STOPPED) == number


@njit(nogil=True, cache=True)
def following(request):
    """A bit for each service whose request follows this one (16,); 0: none does."""
    return request[THEN] if request[OPERATION] == ATTENTION else np.int64(0)


@njit(nogil=True, cache=True)
def ring_following(cells, request, number):
    """Ring REQUEST of the services whose requests follow this one; again changes nothing."""
    services, service = following(request), 0
    while services >> service:
        if services >> service & 1:
            post(cells, service, number)
        service += 1


@njit(nogil=True, cache=True)
def finish_request(
    cells, requests, replies, counters, service, number, num_threads, started_ns
):  # fmt: skip
    """End a thread's part of a request; the last thread writes the reply and rings.

    It rings REQUEST of services whose requests follow (THEN), and DONE last: then the driver may
    write the next request's words, or reset the bell of a service that was lost meanwhile.

    The reply also sums how long requests took since REQUEST was rung, and how much of that was lost
    to late threads: this thread's late start, and the others' waits at barriers. `counters` of
    `numba_kernels.loops.work_stealing`, or an empty array, are zeroed for the next request.
    """
    if atomic_add(cells, cell(service, ARRIVED) * INTS_A_CELL, np.int32(1)) == num_threads - 1:
        atomic_store(cells, cell(service, ARRIVED) * INTS_A_CELL, np.int32(0))
        arrived = cell(service, ARRIVED) * INTS_A_CELL
        atomic_store(cells, arrived + TURN, np.int32(0))
        atomic_store(cells, arrived + HAVE_DONE, np.int32(0))
        awaited_us, cells[arrived + AWAITED_US] = cells[arrived + AWAITED_US], 0
        ended_ns = now_ns()
        posted_us = cells[cell(service, REQUEST) * INTS_A_CELL + RUNG_US]
        waited = cell(service, BARRIER_COUNT) * INTS_A_CELL + WAITED_US
        late_us = (started_ns // 1000 - posted_us) & CLOCK_US
        waited_us = cells[waited] // max(1, num_threads - 1)
        cells[waited] = 0
        counters[:] = 0
        _change_team(cells, service, number, requests[service, OPERATION])
        reply = replies[service]
        request, most_us = requests[service], _MAX_DELAYED_US
        if request[OPERATION] == LAYERS:
            most_us *= request[END_LAYER] - request[LAYER]
        reply[DELAYED_US] += min(late_us, _MAX_DELAYED_US) + min(waited_us, most_us)
        reply[TAKEN_US] += ((ended_ns // 1000 - posted_us) & CLOCK_US) - awaited_us
        reply[NUM_ANSWERED] += 1
        reply[BUSY_NS] = ended_ns - started_ns
        ring_following(cells, requests[service], number)
        ring(cells, cell(service, DONE), number)


@njit(nogil=True, cache=True)
def post_and_await(cells, services, number, timeout_ns):
    """`post` request `number` to all `services`, then `await_all`."""
    for service in services:
        post(cells, service, number)
    return await_all(cells, services, 0, number, timeout_ns)


@njit(nogil=True, cache=True)
def await_all(cells, services, first, number, timeout_ns):
    """`await_done` of services[first:] in order; the index of one that timed out, or the end."""
    for i in range(first, services.shape[0]):
        if not await_done(cells, services[i], number, timeout_ns):
            return i
    return services.shape[0]


def new_request_state(first_number: int, timeout_ns: int) -> np.ndarray:
    """The state of requests, for `send_requests`; nothing was sent yet.

    NEXT_NUMBER and NUMBER: sequence numbers of the next and the last request; NUM_DONE: how many of
    its services, in order, have replied; TIMEOUT_NS: how long one is awaited before a health poll
    """
    request_state = np.zeros(NUM_REQUEST_STATE_WORDS, np.int64)
    request_state[NEXT_NUMBER], request_state[TIMEOUT_NS] = first_number, timeout_ns
    return request_state


@njit(nogil=True, cache=True)
def send_requests(request_state, cells, requests, replies, services):
    """Send all `services` the requests in their request words; whether all have replied OK.

    Those whose requests follow another one's are rung by that service. If not all have, one has
    FAILED, or one timed out and `await_all` may go on waiting from NUM_DONE.
    """
    number = request_state[NEXT_NUMBER]
    request_state[NUMBER] = number
    request_state[NEXT_NUMBER] = number + 1 if number < LAST_NUMBER else FIRST_NUMBER
    later = np.int64(0)
    for service in services:
        replies[service, STATUS] = OK
        later |= following(requests[service])
    for service in services:
        if service > MOST_RUNG or not later >> service & 1:
            post(cells, service, number)
    request_state[NUM_DONE] = await_all(cells, services, 0, number, request_state[TIMEOUT_NS])
    is_well = request_state[NUM_DONE] == services.shape[0]
    for service in services:
        is_well = is_well and replies[service, STATUS] == OK
    return is_well
