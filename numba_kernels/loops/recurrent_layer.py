"""What stands in attention's place in recurrent layers, for each thread of an attention service."""

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.loops.mailbox import RECURRENT, barrier_wait
from hotcold.numba_kernels.loops.work_stealing import work_stealing_rows
from hotcold.numba_kernels.recurrent.convolution import gated_convolution, prepare_recurrence
from hotcold.numba_kernels.recurrent.recurrence import norm_groups, recur
from hotcold.numba_kernels.recurrent_arrays import CONV, MAMBA


@njit(nogil=True, cache=True)
def share_gates(counters, thread, num_threads, layer, arrays, recurrent, normed, scratch):
    """This thread's share of the gates of a recurrent layer: some rows.

    In a model without such layers `recurrent` is None: nothing is compiled then, here and below.
    """
    if recurrent is None or recurrent.gates.shape[1] == 0:
        return
    rows = recurrent.gates[arrays.recurrent_numbers[layer].place]
    work_stealing_rows(
        counters, thread, num_threads, rows, arrays.final_norm_weight[:0], normed, normed[:0],
        scratch.state_gates[: normed.shape[0]], 0,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def recurrent_heads(
    thread, num_threads, service, layer, buffers, arrays, recurrent, qkv, gates, unwanted, scratch,
    heads,
):  # fmt: skip
    """A recurrent layer's part of attention: its share of what the output projection reads.

    Shapes:  qkv (T, rows), changed; gates (T, 2 Hv); scratch: of this thread (`recur`); heads (T -
             unwanted, heads_size)
    """
    if recurrent is None:
        return
    numbers, tables = arrays.recurrent_numbers[layer], buffers.page_tables[RECURRENT]
    pages = arrays.recurrent_pages[numbers.place]
    if numbers.kind == CONV:
        gated_convolution(
            thread, num_threads, numbers, recurrent, pages, tables, buffers.positions,
            buffers.slots, qkv, unwanted, heads,
        )  # fmt: skip
        return
    prepare_recurrence(
        thread, num_threads, numbers, recurrent, pages, tables, buffers.positions, buffers.slots,
        qkv,
    )  # fmt: skip
    barrier_wait(buffers.cells, service, num_threads)
    recur(
        thread, num_threads, numbers, arrays.numbers[layer].norm_eps, recurrent, pages, tables,
        buffers.positions, buffers.slots, qkv, gates, unwanted, scratch, heads,
    )  # fmt: skip
    if numbers.kind == MAMBA:
        barrier_wait(buffers.cells, service, num_threads)
        norm_groups(thread, num_threads, numbers, arrays.numbers[layer].norm_eps, recurrent, heads)
