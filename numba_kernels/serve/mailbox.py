"""What the driver and a service say to each other through shared memory, word by word.

Each service has five doorbell cells and one row of request words and one of reply words. To ask:
write the request words, then ring REQUEST with the next number. To answer: every thread of the
service does its part; the last to arrive writes the reply and rings DONE with that number. A
request changes nothing that it reads, so asking again gives the same answer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import Thresholds
from hotcold.numba_kernels.serve.doorbell import (
    CLOCK_US,
    INTS_A_CELL,
    RUNG_US,
    WAITED_US,
    atomic_add,
    atomic_store,
    barrier,
    now_ns,
    ring,
    wait_change,
)

REQUEST, DONE, ARRIVED, BARRIER_COUNT, BARRIER_GENERATION = range(5)
CELLS_A_SERVICE = 5
_MAX_DELAYED_US = 10_000  # of one request; more has other causes, such as a suspended machine

# request words
OPERATION, LAYER, NUM_TOKENS, NUM_IDS, FIRST_LOGIT, WATCHED, ROUND = range(7)
# Which neurons fire (`Thresholds`), as the bits of float64 numbers: see `read_thresholds`.
GATE_THRESHOLD, PRODUCT_THRESHOLD = 7, 8
NEXT_LAYER = 9  # of a prompt: the layer that will be asked for next, plus 1; 0: none is known
NUM_REQUEST_WORDS = 16  # whole cache lines
ALL_NEURONS = -1  # as NUM_IDS: every neuron of the service's shard

# operations
STOP, PING, ATTENTION, HEAD, FFN, COUNT_FFN = range(6)  # the last: FFN, and who fired
SEND, STREAM = 6, 7  # a CPU service's neurons into the arena, and from there through a GPU

# reply words
STATUS, BUSY_NS, NUM_COMPUTED = range(3)
DELAYED_US, TAKEN_US, NUM_ANSWERED = 3, 4, 5  # of all requests so far: see `finish_request`
# Of stored neurons, all so far: bytes, what threads waited for them, parts wanted and not in memory
BYTES_READ, READ_WAIT_NS, PARTS_WANTED, PARTS_MISSED = range(6, 10)
NUM_UP = 10  # of neurons whose up row was read; NUM_COMPUTED: whose down row was
NUM_REPLY_WORDS = 16  # whole cache lines
OK, FAILED = 0, 1

# Where WATCHED is set, FFN requests count who was computed, in buckets of neighbours in the
# checkpoint: up and down, or the gate; in the last step, or in all watched steps.
NUM_BUCKETS = 64
LAST_FIRED, LAST_GATES, ALL_FIRED, ALL_GATES = range(4)
NUM_COUNTS = 4

# How far a request is, words of `new_request_state`. Its one owner is the exchange.
NEXT_NUMBER, NUMBER, NUM_DONE, TIMEOUT_NS = range(4)
NUM_ASKING_WORDS = 8  # a cache line
# The doorbells are 32-bit words. A fresh service is tried out with a number that it alone uses, so
# that its answer is not taken for another's, nor another's for its own.
OWN_NUMBER, FIRST_NUMBER, LAST_NUMBER = 1, 2, 2**31 - 1  # after the last comes the first
NO_DOORBELLS = np.zeros(0, np.int64)  # instead of `new_request_state`, where none can be rung

NO_COUNTERS = np.zeros((0, 0), np.int32)  # read-only within compiled code: an argument from Python
SPINS = 0  # who is awaited may be about to run on this core, so it is yielded from the first look
POLL_NS = 100_000_000  # a waiting driver looks at liveness this often
IDLE_NS = 3_600_000_000_000  # a service that waits wakes up by itself once an hour


class SharedBuffers(NamedTuple):
    """The shared arrays of one system; S services, at most T tokens a step, width d.

    cells (S * 5 * 16,) int32; requests, replies (S, 16) int64
    positions, slots (T,) int32: where each token of the step stands, and in which sequence
    page_tables (slots, pages a sequence) int32: page p holds a sequence's positions from p * 64 on
    hidden, mixed, ffn_input (T, d): before attention, after it, and normed for the FFN
    active_ids (S, N) int32: rows of each service's shard; active_masks (S, N) uint32: bit t is
    set where that row is wanted for token t (read for more than one token only)
    partials (S, T, d), logits (R, vocab); float32 where nothing else is said
    neuron_counts (S, L, buckets, 4), counted_steps (S, L) uint32: see WATCHED; sums wrap around
    predictor_bits (words,) uint64: of the driver's sign predictors, where services read ahead by
    them too (`predictors.sign_team.stacked`)
    """

    cells: np.ndarray
    requests: np.ndarray
    replies: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    page_tables: np.ndarray
    hidden: np.ndarray
    mixed: np.ndarray
    ffn_input: np.ndarray
    active_ids: np.ndarray
    active_masks: np.ndarray
    partials: np.ndarray
    logits: np.ndarray
    neuron_counts: np.ndarray
    counted_steps: np.ndarray
    predictor_bits: np.ndarray


def threshold_words(thresholds: Sequence[Thresholds]) -> np.ndarray:
    """The words GATE_THRESHOLD and PRODUCT_THRESHOLD of each: (len(thresholds), 2) int64."""
    pairs = np.array([(each.gate, each.product) for each in thresholds], np.float64)
    return pairs.reshape(-1, 2).view(np.int64)


def decode_thresholds(request: np.ndarray) -> Thresholds:
    """Which neurons a request (words,) int64 says that fire."""
    words = request.view(np.float64)
    return Thresholds(np.float32(words[GATE_THRESHOLD]), np.float32(words[PRODUCT_THRESHOLD]))


@njit(nogil=True, cache=True)
def read_thresholds(request):
    """As `decode_thresholds`, within compiled code."""
    words = request.view(np.float64)
    return Thresholds(np.float32(words[GATE_THRESHOLD]), np.float32(words[PRODUCT_THRESHOLD]))


@njit(nogil=True, cache=True)
def cell(service, kind):
    """Index of a service's doorbell cell."""
    return service * CELLS_A_SERVICE + kind


@njit(nogil=True, cache=True)
def post(cells, service, number):
    """Ring a service for request `number`."""
    ring(cells, cell(service, REQUEST), np.int32(number))


@njit(nogil=True, cache=True)
def await_done(cells, service, number, timeout_ns):
    """True when the service has answered request `number`, False at the timeout."""
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
    """Wait for a service's request after number `seen`; returns its number."""
    while True:
        number = wait_change(cells, cell(service, REQUEST), seen, SPINS, IDLE_NS)
        if number != seen:
            return number


@njit(nogil=True, cache=True)
def barrier_wait(cells, service, num_threads):
    """Return when all threads of a service have come here."""
    barrier(cells, cell(service, BARRIER_COUNT), cell(service, BARRIER_GENERATION), num_threads)


@njit(nogil=True, cache=True)
def finish_request(cells, replies, counters, service, number, num_threads, started_ns):
    """A service's thread has done its part; the last one rings the driver.

    It also adds up how long requests took since they were rung, and how much of that the threads
    lost to one that was late: its own late start, and what the others waited at barriers.
    `counters` of `numba_kernels.serve.work_stealing`, or an empty array, are zeroed for the next
    request.
    """
    if atomic_add(cells, cell(service, ARRIVED) * INTS_A_CELL, np.int32(1)) == num_threads - 1:
        atomic_store(cells, cell(service, ARRIVED) * INTS_A_CELL, np.int32(0))
        ended_ns = now_ns()
        asked_us = cells[cell(service, REQUEST) * INTS_A_CELL + RUNG_US]
        waited = cell(service, BARRIER_COUNT) * INTS_A_CELL + WAITED_US
        late_us = (started_ns // 1000 - asked_us) & CLOCK_US
        waited_us = cells[waited] // max(1, num_threads - 1)
        cells[waited] = 0
        counters[:] = 0
        reply = replies[service]
        reply[DELAYED_US] += min(late_us, _MAX_DELAYED_US) + min(waited_us, _MAX_DELAYED_US)
        reply[TAKEN_US] += (ended_ns // 1000 - asked_us) & CLOCK_US
        reply[NUM_ANSWERED] += 1
        reply[BUSY_NS] = ended_ns - started_ns
        ring(cells, cell(service, DONE), number)


@njit(nogil=True, cache=True)
def ask_all(cells, services, number, timeout_ns):
    """Ring all `services` for request `number`, then `await_all` of them."""
    for service in services:
        post(cells, service, number)
    return await_all(cells, services, 0, number, timeout_ns)


@njit(nogil=True, cache=True)
def await_all(cells, services, first, number, timeout_ns):
    """Wait for services[first:] in order; the index of one that timed out, or their number."""
    for i in range(first, services.shape[0]):
        if not await_done(cells, services[i], number, timeout_ns):
            return i
    return services.shape[0]


def new_request_state(first_number: int, timeout_ns: int) -> np.ndarray:
    """What has been asked of services that have seen nothing: see `send_requests`.

    NEXT_NUMBER, of the next question; NUMBER, of the last; NUM_DONE, how many of its services, in
    order, have answered; PATIENCE_NS, after which a silent one is looked after.
    """
    request_state = np.zeros(NUM_ASKING_WORDS, np.int64)
    request_state[NEXT_NUMBER], request_state[TIMEOUT_NS] = first_number, timeout_ns
    return request_state


@njit(nogil=True, cache=True)
def send_requests(request_state, cells, replies, services):
    """Ask all `services` what is in their request words; returns whether that has gone well.

    If not, one of them is silent, and `await_all` may be called again; or one has FAILED.
    """
    number = request_state[NEXT_NUMBER]
    request_state[NUMBER] = number
    request_state[NEXT_NUMBER] = number + 1 if number < LAST_NUMBER else FIRST_NUMBER
    for service in services:
        replies[service, STATUS] = OK
    request_state[NUM_DONE] = ask_all(cells, services, number, request_state[TIMEOUT_NS])
    is_well = request_state[NUM_DONE] == services.shape[0]
    for service in services:
        is_well = is_well and replies[service, STATUS] == OK
    return is_well
