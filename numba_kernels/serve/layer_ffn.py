"""A layer's sparse feed-forward network, by all threads of a service.

A neuron that does not fire costs its gate row. A gate's dot product does not depend on the thread
that computes it, so gates are shared by work stealing. Sums depend on their order: each thread sums
its own neurons, and the threads' sums are added in order.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.checks import (
    float_array,
    optional_floats,
    read_only,
    require,
    row_ids,
    weight_rows,
)
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.decode.activations import ALL_FIRE, Thresholds, activation, not_zero
from hotcold.numba_kernels.decode.batch_ffn import (
    TokenLists,
    block_size,
    empty_lists,
    gate_up_products_kernel,
    keep_some_kernel,
    thread_lists,
)
from hotcold.numba_kernels.decode.ffn import (
    NO_IDS,
    NO_MASKS,
    by_neuron,
    gate_values_kernel,
    keep_fired_kernel,
    up_down_kernel,
)
from hotcold.numba_kernels.decode.rows import add_in_order, split_range
from hotcold.numba_kernels.decode.vectors import (
    QuantizedVectors,
    empty_vectors,
    quantize_activations,
)
from hotcold.numba_kernels.formats import CHUNK, ROW_FORMATS, row_width, whole_chunks
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL
from hotcold.numba_kernels.serve.mailbox import CELLS_A_SERVICE, barrier_wait
from hotcold.numba_kernels.serve.work_stealing import block_rows, new_block_counters, next_block

MAX_TOKENS = 32  # of a request: bits of a mask
NO_NORMS = np.empty(0, np.float32)


class FfnArrays(NamedTuple):
    """A shard of cold neurons, all layers stacked: layer l has rows offsets[l]:offsets[l + 1].

    offsets (L + 1,) int64; gate, up, down (N, d) weights, up (0, d) in a two-matrix FFN;
    gate_bias, up_bias (N,) or (0,), down_bias (L, d) or (L, 0) float32;
    down_norms (N,) or (0,) float32: norms of the down rows, for product thresholds
    """

    offsets: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    gate_bias: np.ndarray
    up_bias: np.ndarray
    down_bias: np.ndarray
    down_norms: np.ndarray = NO_NORMS


class FfnScratch(NamedTuple):
    """Work space for requests of up to T tokens and N candidates.

    sums (threads, T, d in whole chunks), gates (threads, T * N), values (T * N,) float32;
    fired_ids (threads, N) int32, fired_masks the same, uint32; counts, up_counts (threads,) int64:
    neurons that fired, and up rows read; lists: each token's neurons; inputs: quantized
    activations; counters of blocks taken
    """

    sums: np.ndarray
    fired_ids: np.ndarray
    fired_masks: np.ndarray
    gates: np.ndarray
    values: np.ndarray
    counts: np.ndarray
    up_counts: np.ndarray
    lists: TokenLists
    inputs: QuantizedVectors
    counters: np.ndarray


def new_scratch(num_threads: int, num_tokens: int, num_candidates: int, width: int) -> FfnScratch:
    """Work space for requests of up to `num_tokens` tokens and `num_candidates` neurons."""
    return FfnScratch(
        sums=np.zeros((num_threads, num_tokens, whole_chunks(width)), np.float32),
        fired_ids=np.zeros((num_threads, num_candidates), np.int32),
        fired_masks=np.zeros((num_threads, num_candidates), np.uint32),
        gates=np.zeros((num_threads, num_tokens * num_candidates), np.float32),
        values=np.zeros(num_tokens * num_candidates, np.float32),
        counts=np.zeros(num_threads, np.int64),
        up_counts=np.zeros(num_threads, np.int64),
        lists=empty_lists(num_threads, num_tokens),
        inputs=empty_vectors(num_threads, num_tokens, width),
        counters=new_block_counters(1, num_threads)[0],
    )


@njit(nogil=True, cache=True)
def part_of(bias, first, last):
    """bias[first:last], or the empty bias."""
    return bias[first:last] if bias.shape[0] else bias


@njit(nogil=True, cache=True)
def _first_from(ids, row):
    """Index of the first of ascending `ids` that is at least `row`: a binary search."""
    low, high = 0, ids.shape[0]
    while low < high:
        middle = (low + high) // 2
        if ids[middle] < row:
            low = middle + 1
        else:
            high = middle
    return low


@njit(nogil=True, cache=True)
def own_candidates(thread, num_threads, num_neurons, is_listed, ids):
    """First and last candidate of a thread, those in its part of the layer's rows.

    Cut by row, not by the length of the list: so a token's sums do not depend on its batch-mates.
    """
    first, last = split_range(num_neurons, thread, num_threads, 4)
    if not is_listed:
        return first, last
    return _first_from(ids, first), _first_from(ids, last)


@njit(nogil=True, cache=True)
def work_stealing_gates(
    thread, num_threads, num_neurons, gate, bias, is_listed, ids, places, token_masks, x, function,
    num_tokens, lists, scratch,
):  # fmt: skip
    """scratch.values of the candidates in the blocks that this thread takes.

    One token's fn(gate . x + bias); several tokens' gate . x, (N, T). Candidate i's gate is row
    places[i], or row i where `places` is empty.
    """
    counters, values = scratch.counters, scratch.values
    products = by_neuron(values, num_tokens)
    size = block_rows(gate) if num_tokens == 1 else block_size(gate, num_tokens)
    for turn in range(num_threads):
        part = (thread + turn) % num_threads
        first, last = own_candidates(part, num_threads, num_neurons, is_listed, ids)
        begin = first + next_block(counters, part) * size
        while begin < last:
            end = min(begin + size, last)
            if num_tokens == 1:
                gate_values_kernel(
                    gate, bias, places, x, function, begin, end, last, values[begin:end]
                )
            else:
                gate_up_products_kernel(
                    gate, places, token_masks, x, begin, end, products[begin:end], lists
                )
            begin = first + next_block(counters, part) * size


@njit(nogil=True, cache=True)
def layer_ffn(
    thread, num_threads, cells, service, layer, is_listed, ids, token_masks, thresholds, x, arrays,
    scratch, function, out,
):  # fmt: skip
    """out = the layer's FFN of x (T, d): this thread's part; checks nothing.

    Over the neurons in `ids`, ascending, if `is_listed`, else over all. Where there are token_masks
    neuron ids[i] is silent for each token t whose bit token_masks[i] lacks. `thresholds` decide
    which neurons fire; those of thread t are in scratch.fired_ids[t, : scratch.counts[t]].

    All of a service's threads call it. They share the gates by work stealing. After a barrier each
    adds its own candidates that fired to its own sums; after another each adds up one range of
    columns in thread order, so that the result does not depend on timing. `out` is complete when
    all have returned; until then none may start another request.
    """
    first, last = arrays.offsets[layer], arrays.offsets[layer + 1]
    gate, down = arrays.gate[first:last], arrays.down[first:last]
    up = arrays.up[first:last] if arrays.up.shape[0] else arrays.up
    num_tokens = x.shape[0]
    begin, end = own_candidates(thread, num_threads, last - first, is_listed, ids)
    sums = scratch.sums[thread, :num_tokens]
    sums[:] = 0
    gates = scratch.gates[thread]
    fired_ids, fired_masks = scratch.fired_ids[thread], scratch.fired_masks[thread]
    lists = thread_lists(scratch.lists, thread, num_tokens)
    vectors = quantize_activations(gate, x, scratch.inputs, thread)
    gate_bias = part_of(arrays.gate_bias, first, last)
    work_stealing_gates(
        thread, num_threads, last - first, gate, gate_bias, is_listed, ids, ids, token_masks,
        vectors, function, num_tokens, lists, scratch,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    if thread == 0:
        scratch.counters[:] = 0  # for the next request
    if num_tokens == 1:
        values = scratch.values[begin:end]
        num_fired = keep_fired_kernel(
            ids, token_masks, thresholds.gate, begin, end, values, fired_ids, fired_masks, gates
        )
    else:
        products = by_neuron(scratch.values, num_tokens)[begin:]
        num_fired = keep_some_kernel(
            gate_bias, ids, token_masks, function, thresholds.gate, begin, end, products,
            fired_ids, fired_masks, by_neuron(gates, num_tokens),
        )  # fmt: skip
    up_bias = part_of(arrays.up_bias, first, last)
    down_norms = part_of(arrays.down_norms, first, last)
    scratch.up_counts[thread] = num_fired
    scratch.counts[thread] = up_down_kernel(
        up, up_bias, down, down_norms, fired_ids, fired_masks, num_fired, gates, vectors, function,
        thresholds.product, sums, lists,
    )  # fmt: skip
    barrier_wait(cells, service, num_threads)
    add_up(thread, num_threads, down, out, scratch.sums, arrays.down_bias[layer])


@njit(nogil=True, cache=True)
def add_up(thread, num_threads, down, out, sums, down_bias):
    """out = all threads' sums and the bias, in this thread's range of columns."""
    begin, end = split_range(out.shape[1], thread, num_threads, CHUNK)
    for t in range(out.shape[0]):
        out[t, begin:end] = 0
        if down_bias.shape[0]:
            out[t, begin:end] = down_bias[begin:end]
        total = sums[0, t, begin : begin + (end - begin + CHUNK - 1) // CHUNK * CHUNK]
        for other in range(1, num_threads):
            part = sums[other, t, begin : begin + total.shape[0]]
            for i in range(total.shape[0]):
                total[i] += part[i]
        add_in_order(down, sums[0, t], out[t], begin, end)


def sparse_ffn(
    gate: np.ndarray,
    up: np.ndarray | None,
    down: np.ndarray,
    x: np.ndarray,
    ids: np.ndarray | None = None,
    token_masks: np.ndarray | None = None,
    *,
    gate_bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    activation_fn: str = "relu",
    threshold: float = 0.0,
    skip_silent: bool = True,
    thresholds: Thresholds | None = None,
    down_norms: np.ndarray | None = None,
    num_threads: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """The FFN's output over all neurons, or over those in `ids`, and the ids that fired.

    With `token_masks`, neuron ids[i] is silent for each token t whose bit token_masks[i] lacks.
    `thresholds` decide which neurons fire; without them those that are not zero, or with
    `skip_silent` False all.

    out[t] = sum over n of fn(gate[n] . x[t] + gate_bias[n]) * (up[n] . x[t] + up_bias[n]) * down[n]
    drelu: relu of both factors; `threshold` is fatrelu's
    Shapes:  gate, up, down (N, d) or (N, row bytes), down neuron-major; x (T, d), T <= 32;
             ids (A,); out (T, d)
    Dtypes:  weights float32, uint16 (float16 bits), int16 (bfloat16 bits), of ROW_FORMATS,
             gate and up alike, down `is_summed`; ids int32, unique, ascending for more than one
             thread; token_masks (A,) uint32; biases, x, out float32; strided weights are copied
    Units:   reads d weights for each candidate, 2 d more (one matrix up, one down) if it fired
    Errors:  ValueError on any mismatch
    Source:  PowerInfer section 5.4; the early stop at a silent gate: PowerInfer-2 section 4.4
    """
    gate = weight_rows("gate", gate)
    num_neurons, width = gate.shape[0], row_width(gate.dtype, gate.shape[1])
    up = gate[:0] if up is None else weight_rows("up", up, width)
    down = weight_rows("down", down, width)
    require(up.shape[0] in (0, num_neurons), f"up must have {num_neurons} rows")
    require(down.shape[0] == num_neurons, f"down must have {num_neurons} rows")
    require(gate.dtype == up.dtype, "gate and up must have one dtype")
    summed = down.dtype not in ROW_FORMATS or ROW_FORMATS[down.dtype].is_summed
    require(summed, f"down rows are added up, which kernels cannot do for {down.dtype}")
    gate, up, down = (np.ascontiguousarray(each) for each in (gate, up, down))
    x = float_array("x", x, (x.shape[0] if x.ndim else 0, width))
    require(
        x.shape[0] <= MAX_TOKENS,
        f"x has {x.shape[0]} rows; at most {MAX_TOKENS} tokens are computed at once",
    )
    arrays = FfnArrays(
        offsets=np.array([0, num_neurons]),
        gate=gate,
        up=up,
        down=down,
        gate_bias=optional_floats("gate_bias", gate_bias, num_neurons),
        up_bias=optional_floats("up_bias", up_bias, num_neurons if up.shape[0] else 0),
        down_bias=np.empty((1, 0), np.float32),
        down_norms=optional_floats("down_norms", down_norms, num_neurons),
    )
    function = activation(activation_fn, threshold)
    if thresholds is None:
        thresholds = not_zero(activation_fn) if skip_silent else ALL_FIRE
    out = np.zeros((x.shape[0], width), np.float32)
    candidates = NO_IDS if ids is None else row_ids("ids", ids, num_neurons)
    masks = NO_MASKS if token_masks is None else np.ascontiguousarray(token_masks)
    require(masks.dtype == np.uint32, f"token_masks must be uint32, not {masks.dtype}")
    if token_masks is not None:
        require(ids is not None and masks.shape == candidates.shape, "token_masks go with ids")
    if x.shape[0] == 0:
        return out, NO_IDS
    # Read-only as in services, so that the same specialisations are compiled.
    candidates, masks = read_only(candidates), read_only(masks)
    scratch = new_scratch(num_threads, x.shape[0], max(num_neurons, candidates.size), width)
    cells = np.zeros(CELLS_A_SERVICE * INTS_A_CELL, np.int32)

    def run(thread: int) -> None:
        layer_ffn(
            thread, num_threads, cells, 0, 0, ids is not None, candidates, masks, thresholds, x,
            arrays, scratch, function, out,
        )  # fmt: skip

    if num_threads == 1:
        run(0)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(run, range(num_threads)))
    fired = [scratch.fired_ids[t, : scratch.counts[t]] for t in range(num_threads)]
    return out, np.concatenate(fired)
