"""Doorbells: 32-bit words in shared memory; waiters spin, then yield the core, then use a futex.

A cell is one cache line of an int32 array; its first word is the doorbell. The yielding polls are
skipped for a while after another program took the core: unlike a futex wake, a ring does not get
the core back, which made steps fifty times as long. All functions run without the GIL, so a waiting
thread stops no other thread of its process. The futexes are not private: words may be shared by
processes.

Source: futex(2); "Futexes Are Tricky", U. Drepper, 2011.
"""

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.ir.vec import call_by_name

INTS_A_CELL = 16
# Words of a cell.
WAITED_US = 1  # of a barrier's count cell: time that threads waited
RUNG_US, CROWDED_US = 2, 3  # when it was last rung, and when a waiter last noticed too late
SLEEPERS = 4  # threads asleep on the futex, and those that were killed asleep
CLOCK_US = 0x7FFFFFFF  # mask of clocks in one word, which wrap around after half an hour
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL = np.int64(2**31 - 1)  # waiters
_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98, "arm64": 98}.get(platform.machine(), 202)
_CLOCK_MONOTONIC = 1
_YIELDS = 100  # polls that yield the core, about 30 µs, before the futex
_PAUSES, _LONG_YIELDS, _REST_NS = 200, 20_000, 100_000  # some 10 µs, 6 ms, then 100 µs each
_LATE_US = 500  # longer than an idle machine's scheduling delay, shorter than a time slice
_CROWDED_US = 250_000  # for this long yielding polls are skipped
_i32, _i64 = ir.IntType(32), ir.IntType(64)
_byte_pointer = ir.IntType(8).as_pointer()


def _word(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    struct = context.make_array(array_type)(context, builder, value=array)
    base = builder.bitcast(struct.data, _byte_pointer)
    return builder.bitcast(
        builder.gep(base, [builder.mul(index, _i64(4))], source_etype=ir.IntType(8)),
        _i32.as_pointer(),
    )


@intrinsic
def atomic_load(typingctx, cells, index):
    """cells[index], sequentially consistent.

    Acquire alone would not do: some code stores one word and then loads another.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, cells, *args)
        return builder.load_atomic(pointer, "seq_cst", 4, typ=_i32)

    return types.int32(cells, types.int64), codegen


@intrinsic
def atomic_store(typingctx, cells, index, value):
    """cells[index] = value, sequentially consistent."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _word(context, builder, cells, *args[:2]), "seq_cst", 4)
        return context.get_dummy_value()

    return types.void(cells, types.int64, types.int32), codegen


@intrinsic
def atomic_add(typingctx, cells, index, value):
    """cells[index] += value; returns the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, cells, *args[:2])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int32(cells, types.int64, types.int32), codegen


@intrinsic
def atomic_replace(typingctx, cells, index, expected, value):
    """Compare and swap: cells[index] = value if it is `expected`; whether it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, cells, *args[:2])
        found = builder.cmpxchg(pointer, args[2], args[3], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(cells, types.int64, types.int32, types.int32), codegen


def _timespec(builder: Any, nanoseconds: Any) -> Any:
    kind = ir.ArrayType(_i64, 2)
    cell = cgutils.alloca_once(builder, kind)
    base = builder.bitcast(cell, _i64.as_pointer())
    builder.store(builder.sdiv(nanoseconds, _i64(10**9)), base)
    second = builder.gep(base, [_i64(1)], source_etype=_i64)
    builder.store(builder.srem(nanoseconds, _i64(10**9)), second)
    return base


def _system_call(builder: Any, values: list[Any]) -> Any:
    return call_by_name(builder, "syscall", _i64, values + [_i64(0)] * (7 - len(values)))


@intrinsic
def _futex_wait(typingctx, cells, index, seen, nanoseconds):
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.ptrtoint(_word(context, builder, cells, *args[:2]), _i64)
        timeout = builder.ptrtoint(_timespec(builder, args[3]), _i64)
        seen_value = builder.sext(args[2], _i64)
        return _system_call(
            builder, [_i64(_FUTEX_NUMBER), pointer, _i64(_FUTEX_WAIT), seen_value, timeout]
        )

    return types.int64(cells, types.int64, types.int32, types.int64), codegen


@intrinsic
def _futex_wake(typingctx, cells, index, count):
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.ptrtoint(_word(context, builder, cells, *args[:2]), _i64)
        return _system_call(builder, [_i64(_FUTEX_NUMBER), pointer, _i64(_FUTEX_WAKE), args[2]])

    return types.int64(cells, types.int64, types.int64), codegen


@intrinsic
def _pause(typingctx):
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() == "x86_64":
            call_by_name(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif platform.machine() in ("aarch64", "arm64"):
            call_by_name(builder, "llvm.aarch64.hint", ir.VoidType(), [_i32(1)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _yield_core(typingctx):
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_by_name(builder, "sched_yield", _i32, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def now_ns(typingctx):
    """CLOCK_MONOTONIC in nanoseconds, the same in every process of the host."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base = _timespec(builder, _i64(0))
        call_by_name(builder, "clock_gettime", _i32, [_i32(_CLOCK_MONOTONIC), base])
        second = builder.gep(base, [_i64(1)], source_etype=_i64)
        whole = builder.mul(builder.load(base, typ=_i64), _i64(10**9))
        return builder.add(whole, builder.load(second, typ=_i64))

    return types.int64(), codegen


@njit(nogil=True, cache=True)
def wake(cells, cell):
    """Wake all threads asleep on the cell's doorbell, which an atomic operation has changed."""
    wake_some(cells, cell, _ALL)


@njit(nogil=True, cache=True)
def wake_some(cells, cell, count):
    """`wake` of at most `count` threads."""
    index = cell * INTS_A_CELL
    # A thread that is not counted yet will see the change and not sleep: both are seq_cst.
    if atomic_load(cells, index + SLEEPERS):
        _futex_wake(cells, index, np.int64(count))


@njit(nogil=True, cache=True)
def ring(cells, cell, value):
    """Store `value` in the cell's doorbell and wake its waiters."""
    index = cell * INTS_A_CELL
    cells[index + RUNG_US] = _clock_us(now_ns())
    atomic_store(cells, index, value)
    wake(cells, cell)


@njit(nogil=True, cache=True)
def _clock_us(time_ns):
    return np.int32(time_ns // 1000 & CLOCK_US)


@njit(nogil=True, cache=True)
def _is_within(cells, index, microseconds, now_us):
    """Whether the time cells[index] is at most `microseconds` ago."""
    return (now_us - cells[index]) & CLOCK_US <= microseconds


@njit(nogil=True, cache=True)
def _sleep(cells, index, seen, nanoseconds):
    """Sleep while the word is `seen`, at most `nanoseconds`."""
    atomic_add(cells, index + SLEEPERS, np.int32(1))
    _futex_wait(cells, index, seen, nanoseconds)
    atomic_add(cells, index + SLEEPERS, np.int32(-1))


@njit(nogil=True, cache=True)
def wait_change(cells, cell, seen, spins, timeout_ns):
    """Wait until the doorbell differs from `seen`; returns its value, or `seen` at the timeout.

    spins: polls that keep the core; 0 for waits across processes, since with fewer cores than
    waiters they would keep it from the worker. The polls after them yield the core but keep it from
    going idle, from which it wakes slowly (docs/decisions.md).
    """
    index = cell * INTS_A_CELL
    started = polled = now_ns()
    deadline = started + timeout_ns
    for _ in range(spins):
        value = atomic_load(cells, index)
        if value != seen:
            return value
        _pause()
    is_crowded = _is_within(cells, index + CROWDED_US, _CROWDED_US, _clock_us(started))
    for _ in range(0 if is_crowded else _YIELDS):
        value = atomic_load(cells, index)
        now = now_ns()
        if value != seen:
            us = _clock_us(now)
            was_away = now - polled > 1000 * _LATE_US
            if was_away and not _is_within(cells, index + RUNG_US, _LATE_US, us):
                cells[index + CROWDED_US] = us
            return value
        polled = now
        _yield_core()
    while True:
        value = atomic_load(cells, index)
        if value != seen:
            return value
        left = deadline - now_ns()
        if left <= 0:
            return value
        _sleep(cells, index, seen, left)


@njit(nogil=True, cache=True)
def rest(cells, index, seen, polls):
    """What a thread does between polls of words that another device writes, which wakes nobody.

    `polls` so far; cells[index]: any word, whose value is `seen`.
    """
    if polls < _PAUSES:
        _pause()
    elif polls < _PAUSES + _LONG_YIELDS:
        _yield_core()
    else:
        _futex_wait(cells, index, seen, np.int64(_REST_NS))


@njit(nogil=True, cache=True)
def sleep_change(cells, cell, seen, timeout_ns):
    """`wait_change` without polls, for threads that leave their core to others."""
    index = cell * INTS_A_CELL
    deadline = now_ns() + timeout_ns
    while True:
        value = atomic_load(cells, index)
        left = deadline - now_ns()
        if value != seen or left <= 0:
            return value
        _sleep(cells, index, seen, left)


@njit(nogil=True, cache=True)
def barrier(cells, count_cell, generation_cell, num_threads):
    """Wait until all `num_threads` threads have arrived; the cells are then ready for reuse.

    Adds the threads' waiting time to word WAITED_US of the count cell.
    """
    if num_threads == 1:
        return
    generation = atomic_load(cells, generation_cell * INTS_A_CELL)
    if atomic_add(cells, count_cell * INTS_A_CELL, 1) == num_threads - 1:
        atomic_store(cells, count_cell * INTS_A_CELL, 0)
        ring(cells, generation_cell, np.int32(generation + 1))
        return
    started = now_ns()
    while wait_change(cells, generation_cell, generation, 2000, 100_000_000) == generation:
        pass
    atomic_add(cells, count_cell * INTS_A_CELL + WAITED_US, np.int32((now_ns() - started) // 1000))


@njit(cache=True)
def clock_ns():
    """`now_ns` for Python."""
    return now_ns()
