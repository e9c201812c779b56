"""A shard of whole experts in a bundle file, some of them in memory: lookups, reads, waits."""

from typing import Any, NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.candidates import BLOCK
from hotcold.numba_kernels.decode.vectors import copy_numbers
from hotcold.numba_kernels.storage import MAX_GAP
from hotcold.numba_kernels.storage.neuron_file import NeuronFile
from hotcold.numba_kernels.storage.output_rows import OutputRows, place_unit
from hotcold.numba_kernels.storage.read_queue import (
    NOW,
    NUM_BATCHES,
    ReadQueue,
    await_batch,
    cancel_reads,
    drain,
    drop_reads,
    free_batch,
    num_pending,
    submit_reads,
)
from hotcold.numba_kernels.storage.slots import (
    NO_SLOT,
    STAYS,
    Slots,
    await_unit,
    begin_epoch,
    bundles_of,
    give_slot,
    keep,
    list_missing,
    load_state,
    use,
)

# words of `OffloadedExperts.ahead_counts`: chosen experts where there was a guess, those of them
# that were guessed, experts read ahead, those of them that were chosen
NUM_CHOSEN, NUM_GUESSED, NUM_AHEAD, NUM_USEFUL = range(4)


class OffloadedExperts(NamedTuple):
    """A shard of experts in a bundle file; L layers of B blocks, unit l * B + b is block b's.

    arrays: `FfnArrays` or `TransposedArrays` with `starts` and down biases of all neurons, but
    matrices, other biases and norms by rows in memory; own: the biases and norms of all neurons, in
    their order; outputs: down of `TransposedArrays`
    bundle_parts (N,) uint8: what is read of each bundle
    row_of (E,) int64: a unit's first row in memory, or what was the last; bundle_rows (N,) int32:
    the same of each bundle's unit, as `RowBytes` has it; slot_rows (S,) int64: a slot's first row
    misses (E,) uint32: of each unit so far; may be in shared memory
    order (B,) int32: a request's chosen blocks, those in memory first, as indices of its spans;
    num_loaded (1,) int64: how many were in memory
    counters (B, 2, threads * 16) int32: blocks of work taken, of each pending expert's gates and
    ups; places (M,) int32: rows of what fired, those of a thread together as in `FfnScratch`;
    listed (M,) int32: rows of a request's listed neurons
    lock: of `routed_ahead`, for slots and queue
    guessed (G, B) float32: of `SharedBuffers`, G is 0 where nothing is read ahead; was_guessed (B,)
    bool: those of the last guess
    ahead (B,) int64: blocks read ahead last, ahead_state (2,) int64: for which layer, and how many;
    most_ahead (L,) int64: how many to read of a layer; ahead_counts (4,) int64: the words below
    waited_ns, failed (threads,) int64: each thread's wait for reads so far, and whether a read that
    it needed in this request failed
    """

    arrays: Any
    own: Any
    outputs: OutputRows
    bundle_parts: np.ndarray
    row_of: np.ndarray
    bundle_rows: np.ndarray
    slot_rows: np.ndarray
    misses: np.ndarray
    file: NeuronFile
    slots: Slots
    queue: ReadQueue
    order: np.ndarray
    num_loaded: np.ndarray
    counters: np.ndarray
    places: np.ndarray
    listed: np.ndarray
    lock: np.ndarray
    guessed: np.ndarray
    was_guessed: np.ndarray
    ahead: np.ndarray
    ahead_state: np.ndarray
    most_ahead: np.ndarray
    ahead_counts: np.ndarray
    waited_ns: np.ndarray
    failed: np.ndarray


@njit(nogil=True, cache=True)
def _copy_part(source, target, first, row, count):
    if source.shape[0]:
        copy_numbers(source[first : first + count], target[row : row + count])


@njit(nogil=True, cache=True)
def place_block(shard, layer, block):
    """Let a block have the rows of its slot, if it has one; copy its biases and norms to its rows.

    Nothing is read.
    """
    starts, own, arrays = shard.arrays.starts[layer], shard.own, shard.arrays
    unit = layer * (starts.shape[0] - 1) + block
    slot = shard.slots.slot_of[unit]
    if slot >= 0:
        shard.row_of[unit] = shard.slot_rows[slot]
        for bundle in bundles_of(shard.slots, unit):
            shard.bundle_rows[bundle] = shard.slot_rows[slot]
        if shard.outputs.places.shape[0]:
            place_unit(shard.outputs, unit, shard.outputs.begins[slot])
    first, count, row = starts[block], starts[block + 1] - starts[block], shard.row_of[unit]
    _copy_part(own.gate_bias, arrays.gate_bias, first, row, count)
    _copy_part(own.up_bias, arrays.up_bias, first, row, count)
    _copy_part(own.down_norms, arrays.down_norms, first, row, count)


@njit(nogil=True, cache=True)
def _give_rows(shard, layer, block):
    """Give a block rows in memory, which this request does not evict; False where none are free."""
    slots, unit = shard.slots, layer * (shard.arrays.starts.shape[1] - 1) + block
    had = slots.slot_of[unit]
    if had != STAYS and give_slot(slots, unit) < 0:
        return False
    if had == NO_SLOT:
        place_block(shard, layer, block)
    return True


@njit(nogil=True, cache=True)
def _submit(shard, batch, count):
    """Submit reads of the batch's first `count` bundles."""
    queue = shard.queue
    for i in range(count):
        queue.parts[batch, i] = shard.bundle_parts[queue.rows[batch, i]]
    submit_reads(queue, shard.file, batch, count, MAX_GAP)


@njit(nogil=True, cache=True)
def begin_experts(shard):
    """Start a request of a layer; reads that no thread has begun are cancelled."""
    slots = shard.slots
    begin_epoch(slots, shard.arrays.starts.shape[1] - 1)
    cancel_reads(shard.queue, slots.requested, slots.requested)
    if shard.queue.failure[0]:
        drop_reads(shard.queue, slots.requested, slots.requested)


@njit(nogil=True, cache=True)
def request_experts(shard, layer, blocks):
    """Look up `blocks` (ascending) of a layer after `begin_experts`, and submit missing reads.

    Fills `order` and `num_loaded` with indices of `blocks`. There are as many slots as a layer has
    experts.
    """
    slots, queue, order = shard.slots, shard.queue, shard.order
    first = layer * (shard.arrays.starts.shape[1] - 1)
    num_loaded, num_blocks = 0, blocks.shape[0]
    num_pending = 0
    for i in range(num_blocks):
        if use(slots, first + blocks[i]):
            order[num_loaded] = i
            num_loaded += 1
        else:
            shard.misses[first + blocks[i]] += np.uint32(1)
            num_pending += 1
            order[num_blocks - num_pending] = i
    shard.num_loaded[0] = num_loaded
    pending = order[num_loaded:num_blocks]
    for i in range(num_pending // 2):
        pending[i], pending[num_pending - 1 - i] = pending[num_pending - 1 - i], pending[i]
    if num_pending == 0:
        return
    await_batch(queue, NOW)
    for i in pending:
        while not _give_rows(shard, layer, np.int64(blocks[i])):
            drain(queue, slots.requested, slots.requested)  # reads ahead held the other slots
    count = 0
    for i in pending:
        count = list_missing(slots, first + np.int64(blocks[i]), queue.rows[NOW], count)
    _submit(shard, NOW, count)


@njit(nogil=True, cache=True)
def _guessed_weight(guessed, num_tokens, block):
    """The largest weight that the block was guessed to have for a token."""
    weight = np.float32(0)
    for t in range(num_tokens):
        weight = max(weight, guessed[t, block])
    return weight


@njit(nogil=True, cache=True)
def note_guesses(shard, layer, blocks):
    """Compare what was guessed for the layer with `blocks`, and adapt how many are read ahead.

    `guessed` is already that of the layer after it.
    """
    state, counts = shard.ahead_state, shard.ahead_counts
    if state[0] != layer:
        return
    state[0], num_read, num_useful = -1, state[1], 0
    first = layer * (shard.arrays.starts.shape[1] - 1)
    for block in blocks:
        if shard.slots.slot_of[first + block] != STAYS:
            counts[NUM_CHOSEN] += 1
            counts[NUM_GUESSED] += shard.was_guessed[block]
        for i in range(num_read):
            num_useful += shard.ahead[i] == block
    counts[NUM_AHEAD] += num_read
    counts[NUM_USEFUL] += num_useful
    most = shard.most_ahead
    if num_read and 2 * num_useful >= num_read:
        most[layer] = min(shard.ahead.shape[0], max(most[layer], num_read + 1))
    elif num_read:
        most[layer] = max(1, most[layer] - 1)


@njit(nogil=True, cache=True, _nrt=True)
def read_guessed(shard, layer, num_tokens):
    """Submit reads of experts that the layer will probably choose, the likeliest of them."""
    guessed, state, ahead = shard.guessed, shard.ahead_state, shard.ahead
    state[0] = -1
    if num_tokens > guessed.shape[0] or layer == shard.arrays.starts.shape[0]:
        return
    first = layer * guessed.shape[1]
    weights, count = np.empty(guessed.shape[1], np.float32), 0
    for block in range(guessed.shape[1]):
        weight = _guessed_weight(guessed, num_tokens, block)
        shard.was_guessed[block] = weight > 0
        if weight > 0:
            keep(shard.slots, first + block)
        if weight > 0 and load_state(shard.slots, first + block) <= 0:
            ahead[count], weights[count] = block, weight
            count += 1
    most = shard.most_ahead[layer]
    if count > most:
        kept = np.sort(np.argsort(-weights[:count])[:most])
        ahead[:most] = ahead[:count][kept].copy()
        count = most
    state[0], state[1] = layer, count
    if count:
        request_ahead(shard, layer, ahead[:count])


@njit(nogil=True, cache=True, _nrt=True)
def request_routed(shard, layer, block_weights):
    """Submit reads of experts that tokens have chosen, instead of guessed ones not begun yet.

    Nothing is done where the layer's request came first, or where the disk lags behind.
    """
    if num_pending(shard.queue, NOW) or free_batch(shard.queue) == NUM_BATCHES:
        return
    slots, blocks, count = shard.slots, np.empty(block_weights.shape[1], np.int64), 0
    first = layer * blocks.shape[0]
    for block in range(blocks.shape[0]):
        weight = _guessed_weight(block_weights, block_weights.shape[0], block)
        if weight > 0:
            keep(slots, first + block)
        if weight > 0 and load_state(slots, first + block) <= 0:
            blocks[count] = block
            count += 1
    if count:
        cancel_reads(shard.queue, slots.requested, slots.requested)
        request_ahead(shard, layer, blocks[:count])


@njit(nogil=True, cache=True)
def request_ahead(shard, layer, blocks):
    """Submit reads of `blocks` of a layer behind all others, as far as there are slots.

    Those of `blocks` that are in memory stay there.
    """
    slots, queue = shard.slots, shard.queue
    batch = free_batch(queue)
    if batch == NUM_BATCHES:
        return
    first = layer * (shard.arrays.starts.shape[1] - 1)
    count = 0
    for block in blocks:
        keep(slots, first + np.int64(block))
    for block in blocks:
        if not _give_rows(shard, layer, np.int64(block)):
            break
        count = list_missing(slots, first + np.int64(block), queue.rows[batch], count)
    _submit(shard, batch, count)


@njit(nogil=True, cache=True)
def await_blocks(shard, layer, blocks):
    """`await_unit` of all these blocks of a layer, by the first thread."""
    first = layer * (shard.arrays.starts.shape[1] - 1)
    for block in blocks:
        if not await_unit(shard.slots, shard.queue, first + block, shard.waited_ns, 0):
            return False
    return True


@njit(nogil=True, cache=True, _nrt=True)
def blocks_of(spans, blocks):
    """The chosen blocks of spans, written to `blocks`; returns those."""
    for k in range(spans.shape[0]):
        blocks[k] = spans[k, BLOCK]
    return blocks[: spans.shape[0]]
