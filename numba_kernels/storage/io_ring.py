"""io_uring: many reads in flight, submitted and awaited by one system call.

A read takes half of the CPU time of one in its own thread, and a deeper queue keeps the disk busy.
Old kernels have no io_uring and containers may refuse it: then threads read.
Source: io_uring(7), io_uring_setup(2), io_uring_enter(2), linux/io_uring.h
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.ir.vec import call_by_name
from hotcold.numba_kernels.loops.doorbell import atomic_load, atomic_store

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # the same on all architectures
# One thread submits, and completions are processed when it calls (Linux 6.1).
_SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 12, 1 << 13
# Features: both rings in one mapping (Linux 5.4), and one that came with reads (5.6).
_SINGLE_MMAP, _CURRENT_PLACE = 1, 1 << 3
_ENTRIES_PLACE = 0x10000000  # offset at which submissions are mapped
_GET_EVENTS = 1
_READ, _READ_FIXED = 22, 4  # operations; the second reads into memory of `register_buffers`
_REGISTER_BUFFERS = 0
_ENTRY_BYTES, _COMPLETION_BYTES = 64, 16
_INTERRUPTED, _AGAIN, _BUSY = 4, 11, 16  # errno
MAX_WAIT_READS = 8  # completions awaited by one call
_FIXED = 10  # words of `io_uring_params` before its two tables of offsets

# words of `IoRing.facts`
DESCRIPTOR, SQ_HEAD, SQ_TAIL, SQ_MASK, CQ_HEAD, CQ_TAIL, CQ_MASK, OPERATION = range(8)


class IoRing(NamedTuple):
    """The rings shared with the kernel.

    facts (8,) int64: the descriptor, indices of heads and tails in `words`, masks, read operation
    words int32: both rings; entries (E, 8) int64: submissions; completions (C, 2) int64: a read's
    number and its result
    """

    facts: np.ndarray
    words: np.ndarray
    entries: np.ndarray
    completions: np.ndarray


def new_ring(num_entries: int) -> IoRing | None:
    """A ring of `num_entries` reads for the calling thread; None where there is no io_uring."""
    params = np.zeros(30, np.uint32)
    libc = ctypes.CDLL(None, use_errno=True)
    for flags in (_SINGLE_ISSUER | _DEFER_TASKRUN, 0):
        params[:] = 0
        params[2] = flags
        arguments = _SETUP, num_entries, ctypes.c_void_p(params.ctypes.data)
        descriptor = libc.syscall(*arguments)
        if descriptor >= 0:
            break
    else:
        return None
    if not (params[5] & _SINGLE_MMAP and params[5] & _CURRENT_PLACE):
        os.close(descriptor)
        return None
    return _mapped(descriptor, params)


def has_rings() -> bool:
    """Whether the kernel and the container allow io_uring."""
    ring = new_ring(1)
    if ring is None:
        return False
    close_ring(ring)
    return True


def _mapped(descriptor: int, params: np.ndarray) -> IoRing | None:
    """Map the rings of a descriptor at the offsets in `io_uring_params`."""
    num_submissions, num_completions = int(params[0]), int(params[1])
    sent, done = params[_FIXED : _FIXED + 10], params[_FIXED + 10 : _FIXED + 20]
    array, completions = int(sent[6]), int(done[5])
    num_bytes = max(array + 4 * num_submissions, completions + _COMPLETION_BYTES * num_completions)
    try:
        rings = mmap.mmap(descriptor, num_bytes)
        entries = mmap.mmap(descriptor, _ENTRY_BYTES * num_submissions, offset=_ENTRIES_PLACE)
    except OSError:
        os.close(descriptor)
        return None
    words = np.frombuffer(rings, np.int32)
    words[array // 4 : array // 4 + num_submissions] = np.arange(num_submissions)
    masks = int(words[sent[2] // 4]), int(words[done[2] // 4])
    places = [int(each[i]) // 4 for each in (sent, done) for i in range(2)]
    facts = [descriptor, *places[:2], masks[0], *places[2:], masks[1]]
    found = np.frombuffer(rings, np.int64, 2 * num_completions, completions).reshape(-1, 2)
    submissions = np.frombuffer(entries, np.int64).reshape(num_submissions, -1)
    return IoRing(np.array([*facts, _READ], np.int64), words, submissions, found)


def register_buffers(ring: IoRing, buffers: np.ndarray) -> None:
    """Register the memory that all later reads go to, so that its pages stay mapped.

    Without effect where the limit of locked memory is too low. No read may be in flight.
    """
    whole = np.array([buffers.ctypes.data, buffers.nbytes], np.uint64)  # struct iovec
    iovec = ctypes.c_void_p(whole.ctypes.data)
    arguments = int(ring.facts[DESCRIPTOR]), _REGISTER_BUFFERS, iovec, 1
    if ctypes.CDLL(None, use_errno=True).syscall(_REGISTER, *arguments) == 0:
        ring.facts[OPERATION] = _READ_FIXED


def close_ring(ring: IoRing) -> None:
    """Close a ring that has no read in flight."""
    os.close(int(ring.facts[DESCRIPTOR]))


def leak_buffers(buffers: np.ndarray) -> None:
    """Never free the buffers of a ring that failed with reads in flight.

    The kernel may write there later, and no call says when it no longer does.
    """
    _written_by_kernel.append(buffers)


_written_by_kernel: list[np.ndarray] = []


@intrinsic
def _enter(typingctx, descriptor, num_new, min_complete):
    """The number of submissions taken, or minus errno."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i64 = ir.IntType(64)
        values = [i64(_ENTER), *args, i64(_GET_EVENTS), i64(0), i64(0)]
        found = call_by_name(builder, "syscall", i64, values)
        where = call_by_name(builder, "__errno_location", ir.IntType(32).as_pointer(), [])
        number = builder.sext(builder.load(where, typ=ir.IntType(32)), i64)
        return builder.select(builder.icmp_signed("<", found, i64(0)), builder.neg(number), found)

    return types.int64(types.int64, types.int64, types.int64), codegen


@njit(nogil=True, cache=True)
def add_read(ring, number, descriptor, place, address, size):
    """Queue a read for the next `submit`; fewer reads are in flight than there are entries.

    After `register_buffers` the target lies within the registered buffers.
    """
    facts = ring.facts
    tail = atomic_load(ring.words, facts[SQ_TAIL])
    entry = ring.entries[np.int64(tail) & facts[SQ_MASK]]
    entry[0] = facts[OPERATION] | descriptor << np.int64(32)
    entry[1], entry[2], entry[3], entry[4] = place, address, size, number
    entry[5:] = 0
    atomic_store(ring.words, facts[SQ_TAIL], np.int32(tail + 1))


@njit(nogil=True, cache=True)
def submit(ring, min_complete):
    """Submit queued reads and wait for `min_complete` > 0 completions; 0, or an errno."""
    facts, words = ring.facts, ring.words
    while True:
        tail, head = atomic_load(words, facts[SQ_TAIL]), atomic_load(words, facts[SQ_HEAD])
        taken = _enter(facts[DESCRIPTOR], np.int64(np.int32(tail - head)), min_complete)
        if taken >= 0 or taken == -_BUSY:  # busy: completions must be consumed first
            return np.int64(0)
        if taken != -_INTERRUPTED and taken != -_AGAIN:
            return -taken


@njit(nogil=True, cache=True)
def next_completion(ring):
    """A completed read's number, and its bytes or minus errno; number -1 where none is done."""
    facts = ring.facts
    head = atomic_load(ring.words, facts[CQ_HEAD])
    if head == atomic_load(ring.words, facts[CQ_TAIL]):
        return np.int64(-1), np.int64(0)
    completion = ring.completions[np.int64(head) & facts[CQ_MASK]]
    number, result = completion[0], np.int64(np.int32(completion[1]))
    atomic_store(ring.words, facts[CQ_HEAD], np.int32(head + 1))
    return number, result
