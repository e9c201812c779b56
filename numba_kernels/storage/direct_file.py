"""Reads of a file into memory from compiled code, without the GIL.

With O_DIRECT addresses, lengths and file offsets are multiples of the file system's block.
Source: pread(2), posix_fadvise(2), open(2)
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.ir.vec import call_by_name

_i32, _i64 = ir.IntType(32), ir.IntType(64)
_INTERRUPTED, _AGAIN = 4, 11  # errno
_DONTNEED = 4  # posix_fadvise
_TRIES = 3  # of a read that fails
SHORT = -1  # instead of an errno: the file ends early


@intrinsic
def _pread(typingctx, descriptor, address, size, place):
    """Bytes read, or minus errno."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = call_by_name(builder, "pread", _i64, [builder.trunc(args[0], _i32), *args[1:]])
        where = call_by_name(builder, "__errno_location", _i32.as_pointer(), [])
        number = builder.sext(builder.load(where, typ=_i32), _i64)
        failed = builder.icmp_signed("<", found, _i64(0))
        return builder.select(failed, builder.neg(number), found)

    int64 = types.int64
    return int64(int64, int64, int64, int64), codegen


@intrinsic
def _fadvise(typingctx, descriptor, place, size, advice):
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        descriptor, advice = (builder.trunc(args[i], _i32) for i in (0, 3))
        found = call_by_name(builder, "posix_fadvise", _i32, [descriptor, args[1], args[2], advice])
        return builder.sext(found, _i64)

    int64 = types.int64
    return int64(int64, int64, int64, int64), codegen


@njit(nogil=True, cache=True)
def read_bytes(descriptor, place, size, unit, keeps_pages, into):
    """into[:size] = the file's bytes from offset `place` on; returns 0, an errno, or SHORT.

    `into` uint8; `place`, `size` and the address of `into` are multiples of `unit`, the block of
    direct reads. Short reads are continued, failed ones retried. Without `keeps_pages` the bytes
    are dropped from the page cache. Checks nothing.
    """
    address, done, num_failed = np.int64(into.ctypes.data), np.int64(0), 0
    while done < size:
        count = _pread(descriptor, address + done, size - done, place + done)
        if count == -_INTERRUPTED or count == -_AGAIN:
            continue
        if count >= unit:
            done += count // unit * unit
            continue
        num_failed += 1
        if num_failed == _TRIES:
            return np.int64(SHORT) if count >= 0 else -count
    if not keeps_pages:
        _fadvise(descriptor, place, size, np.int64(_DONTNEED))
    return np.int64(0)
