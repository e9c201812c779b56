"""A file of pages by key, least recently used given up first; nothing torn is ever returned.

The file is a head of BLOCK bytes, then segments: a table of SLOTS_A_TABLE entries, then as many
slots of equal size. An entry holds a page's key, the checksum of the file's identity, key and
content, a number that grows with every use, the content's length, and a checksum of all that. It is
zeroed before its slot is written, and written after. So a writer may be killed at any moment, and
what the disk lost with the power is noticed by the checksums, which every read compares.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

VERSION = 1
BLOCK = 4096
SLOTS_A_TABLE = 64
_MAGIC = b"hotcold pages\n"
_HEAD = struct.Struct("<16sIQ32s")  # magic, version, bytes of a page, digest of the identity
_ENTRY = struct.Struct("<16s16sQQ16s")  # key, checksum, use, length, checksum of those
_EMPTY = bytes(_ENTRY.size)
_SUM_BYTES = 16
_MOST_PIECES = 512  # of one call of preadv; Linux takes 1024

_READ_BYTES = 1 << 20  # at once

Pieces = Sequence[memoryview]
Fill = Callable[[memoryview, memoryview], bool]  # copies the second into the first


class LockedFileError(OSError):
    """Another process has the file open."""


class _Place(NamedTuple):
    slot: int
    checksum: bytes


def _sum(*parts: bytes | memoryview) -> bytes:
    """16 bytes of SHA-256, which CPUs have instructions for."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()[:_SUM_BYTES]


class PageFile:
    """An open file, locked against other processes. Reads and writes may run side by side.

    note: what was wrong with the file that was found, a line; "" where nothing was
    """

    def __init__(
        self,
        path: Path,
        identity: bytes,
        page_bytes: int,
        may_grow: Callable[[int], bool],
        folder: int | None = None,
    ) -> None:
        """Open the file of `identity` at `path`, or make it, for this user alone.

        A file that is damaged, or of another identity, page size or version, is begun anew.
        may_grow: whether the file may become so many bytes long
        folder: its folder's descriptor; None to follow the path
        Errors:  LockedFileError; OSError
        """
        self.path, self.page_bytes = path, page_bytes
        self._identity = hashlib.sha256(identity).digest()
        self._may_grow = may_grow
        unit = BLOCK if page_bytes >= BLOCK else 512
        self.slot_bytes = -(-page_bytes // unit) * unit
        self._places: OrderedDict[bytes, _Place] = OrderedDict()  # the least recently used first
        self._free: list[int] = []  # the next one stands last
        self._num_slots, self._use = 0, 0
        self._lock = threading.Lock()
        self.note = ""
        self._descriptor = open_locked(path, folder)
        try:
            self._open()
        except BaseException:
            os.close(self._descriptor)
            raise

    def close(self) -> None:
        """Close and unlock it."""
        os.close(self._descriptor)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._end(self._num_slots)

    @property
    def least_bytes(self) -> int:
        """Size with one page."""
        return self._end(1)

    def keys(self) -> set[bytes]:
        """Return the keys of all pages."""
        with self._lock:
            return set(self._places)

    def clear(self) -> None:
        """Give up all pages. Errors: OSError."""
        with self._lock:
            os.ftruncate(self._descriptor, BLOCK)
            self._places.clear()
            self._free.clear()
            self._num_slots = 0

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count these pages as used, the first one last: without it the others are of no use.

        Errors:  OSError
        """
        for key in reversed(keys):
            with self._lock:
                place = self._places.get(key)
                if place is not None:
                    self._write_entry(key, place)

    def write(
        self, key: bytes, pieces: Pieces, is_page: Callable[[], bool] = lambda: True
    ) -> list[bytes]:
        """Write a page, `page_bytes` in all; return the keys that were given up for it.

        One thread writes at a time. A key that is there is only counted as used.
        is_page: whether `pieces` still are the page, once its checksum is known; else it is not
        written
        Errors:  OSError: the page is not in the file
        """
        checksum = _sum(self._identity, key, *pieces)
        if not is_page():
            return []
        with self._lock:
            found = self._places.get(key)
            if found is not None:
                self._write_entry(key, found)
                return []
            slot, given_up = self._take_slot()
        try:
            _transfer(os.pwritev, self._descriptor, pieces, self._start(slot))
            with self._lock:
                self._write_entry(key, _Place(slot, checksum))
        except BaseException:
            with self._lock:
                self._free.append(slot)
            raise
        return given_up

    def read(self, key: bytes, pieces: Pieces, fill: Fill | None = None) -> bool:
        """Read a page into `pieces`; False, and it is forgotten, where it is not there or damaged.

        `pieces` are overwritten in either case, by `fill` where it is given. Where that returns
        False, no more is read, and nothing forgotten.
        """
        with self._lock:
            place = self._places.get(key)
        if place is None:
            return False
        with suppress(OSError):
            found = self._read(key, pieces, self._start(place.slot), fill or _copy)
            if found is None or found == place.checksum:
                return found is not None
        with self._lock, suppress(OSError):
            if self._places.get(key) == place:
                self._forget(key)
        return False

    def _read(self, key: bytes, pieces: Pieces, start: int, fill: Fill) -> bytes | None:
        """Fill `pieces`, by and by; their checksum, None where `fill` wants no more."""
        digest = hashlib.sha256(self._identity + key)
        read = memoryview(bytearray(min(self.page_bytes, _READ_BYTES)))
        left = [
            piece[first : first + len(read)]
            for piece in pieces
            for first in range(0, len(piece), len(read))
        ]
        while left:
            ends = list(accumulate(map(len, left)))
            count = bisect_right(ends, len(read))
            now, left = left[:count], left[count:]
            _transfer(os.preadv, self._descriptor, [read[: ends[count - 1]]], start)
            start += ends[count - 1]
            for piece, end in zip(now, ends, strict=False):
                content = read[end - len(piece) : end]
                digest.update(content)
                if not fill(piece, content):
                    return None
        return digest.digest()[:_SUM_BYTES]

    def flush(self) -> None:
        """Return once all writes are on the disk. Errors: OSError."""
        os.fdatasync(self._descriptor)

    def drop_cache(self) -> None:
        """Let the system forget the pages that it has cached of the file."""
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _open(self) -> None:
        head = _HEAD.pack(_MAGIC.ljust(16, b"\0"), VERSION, self.page_bytes, self._identity)
        head = (head + _sum(head)).ljust(BLOCK, b"\0")
        size = os.fstat(self._descriptor).st_size
        if os.pread(self._descriptor, BLOCK, 0) != head:
            if size:
                self.note = f"{self.path}: is damaged or of another version; it is begun anew"
            os.ftruncate(self._descriptor, 0)
            _write_all(self._descriptor, head, 0)
            return
        entries = list(self._entries(size))
        self._num_slots = len(entries)
        used = {key: (use, _Place(slot, check)) for slot, key, check, use in entries if key}
        for key, (use, place) in sorted(used.items(), key=lambda one: one[1][0]):
            self._places[key], self._use = place, use
        taken = {place.slot for place in self._places.values()}
        self._free = [slot for slot in reversed(range(self._num_slots)) if slot not in taken]
        os.ftruncate(self._descriptor, self._end(self._num_slots))
        self._shrink()

    def _entries(self, size: int) -> Iterator[tuple[int, bytes, bytes, int]]:
        """Slot, key (empty: none), checksum and use of each slot that is whole in the file."""
        slot, damaged = 0, 0
        while self._end(slot + 1) <= size:
            table = os.pread(self._descriptor, BLOCK, self._table(slot)).ljust(BLOCK, b"\0")
            for place in range(0, BLOCK, _ENTRY.size):
                if self._end(slot + 1) > size:
                    break
                entry = table[place : place + _ENTRY.size]
                key, checksum, use, length, own = _ENTRY.unpack(entry)
                is_good = own == self._entry_sum(slot, entry) and length == self.page_bytes
                damaged += entry != _EMPTY and not is_good
                yield slot, key if is_good else b"", checksum, use
                slot += 1
        is_cut = size not in (self._end(slot), BLOCK)
        if damaged or is_cut:
            what = f"{damaged} of its pages are damaged" if damaged else "its end is missing"
            self.note = f"{self.path}: {what}; they are not used"

    def _entry_sum(self, slot: int, entry: bytes) -> bytes:
        return _sum(self._identity, struct.pack("<Q", slot), entry[: _ENTRY.size - _SUM_BYTES])

    def _shrink(self) -> None:
        """Give up pages until the file is as small as it must be; those used last are kept."""
        num_slots = self._num_slots
        while num_slots and not self._may_grow(self._end(num_slots)):
            num_slots -= 1
        if num_slots == self._num_slots:
            return
        self._num_slots = num_slots
        kept = list(self._places.items())[max(0, len(self._places) - num_slots) :]
        below = {place.slot for _, place in kept if place.slot < num_slots}
        free = [slot for slot in reversed(range(num_slots)) if slot not in below]
        self._places = OrderedDict(kept)
        for key, place in kept:
            if place.slot >= num_slots:
                slot = free.pop()
                self._write_bytes(slot, _EMPTY)
                content = bytearray(self.page_bytes)
                where = self._start(place.slot)
                _transfer(os.preadv, self._descriptor, [memoryview(content)], where)
                _write_all(self._descriptor, content, self._start(slot))
                self._places[key] = _Place(slot, place.checksum)
        for slot in free:
            self._write_bytes(slot, _EMPTY)
        for key, place in list(self._places.items()):
            self._write_entry(key, place)
        self._free = free
        os.ftruncate(self._descriptor, self._end(num_slots))

    def _take_slot(self) -> tuple[int, list[bytes]]:
        """A slot whose entry is empty, and the keys that were given up for it. Errors: OSError."""
        if not self._free and self._may_grow(self._end(self._num_slots + 1)):
            slot = self._num_slots
            start, end = os.fstat(self._descriptor).st_size, self._end(slot + 1)
            try:
                os.posix_fallocate(self._descriptor, start, end - start)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._end(slot))
                if not self._places:
                    raise
                self._may_grow = lambda num_bytes: False
            else:
                self._num_slots += 1
                self._free.append(slot)
        given_up: list[bytes] = []
        if not self._free:
            if not self._places:
                raise OSError(errno.ENOSPC, "there is no room for a page")
            key = next(iter(self._places))
            self._forget(key)
            given_up.append(key)
        slot = self._free.pop()
        self._write_bytes(slot, _EMPTY)
        return slot, given_up

    def _forget(self, key: bytes) -> None:
        slot = self._places.pop(key).slot
        self._free.append(slot)
        self._write_bytes(slot, _EMPTY)

    def _write_entry(self, key: bytes, place: _Place) -> None:
        self._use += 1
        entry = _ENTRY.pack(key, place.checksum, self._use, self.page_bytes, bytes(_SUM_BYTES))
        own = self._entry_sum(place.slot, entry)
        self._write_bytes(place.slot, entry[: -len(own)] + own)
        self._places[key] = place
        self._places.move_to_end(key)

    def _write_bytes(self, slot: int, entry: bytes) -> None:
        where = self._table(slot) + slot % SLOTS_A_TABLE * _ENTRY.size
        _write_all(self._descriptor, entry, where)

    def _table(self, slot: int) -> int:
        segment_bytes = BLOCK + SLOTS_A_TABLE * self.slot_bytes
        return BLOCK + slot // SLOTS_A_TABLE * segment_bytes

    def _start(self, slot: int) -> int:
        return self._table(slot) + BLOCK + slot % SLOTS_A_TABLE * self.slot_bytes

    def _end(self, num_slots: int) -> int:
        return BLOCK if num_slots == 0 else self._start(num_slots - 1) + self.slot_bytes


def open_locked(path: Path, folder: int | None = None) -> int:
    """Open a file of this user for reading and writing, made where there is none, and lock it.

    folder: its folder's descriptor; None to follow the path
    Errors:  LockedFileError where another process has it; OSError, also for another user's file
    """
    name = path if folder is None else path.name
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(descriptor)
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(errno.EPERM, "is another user's, or open to others")
            # Another process may have removed it before it was locked.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.stat(name, dir_fd=folder), found):
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise LockedFileError(errno.EAGAIN, "another process uses it") from None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _copy(piece: memoryview, content: memoryview) -> bool:
    piece[:] = content
    return True


def _write_all(descriptor: int, content: bytes | bytearray, place: int) -> None:
    _transfer(os.pwritev, descriptor, [memoryview(content)], place)


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    descriptor: int,
    pieces: Pieces,
    place: int,
) -> None:
    """Call preadv or pwritev until all pieces are done. Errors: OSError, also at the file's end."""
    left = [piece for piece in pieces if piece.nbytes]
    while left:
        count = call(descriptor, left[:_MOST_PIECES], place)
        if count <= 0:
            raise OSError(errno.EIO, "the file ends too soon")
        place += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]
