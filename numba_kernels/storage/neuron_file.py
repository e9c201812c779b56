"""Bundles of a bundle file: spans of it are read, checked, and copied to their rows in memory.

A bundle is one neuron, or K neurons of an expert: a part with gate rows, then a part with up rows
and down rows. Where down is a row an output, the first part has up rows too, and the second some of
the expert's down rows. Each part is padded with zeros to a multiple of PART_UNIT bytes and has a
checksum.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.storage import READ_BYTES
from hotcold.numba_kernels.storage.direct_file import read_bytes
from hotcold.numba_kernels.storage.output_rows import OutputRows, copy_gates, copy_outputs

PART_UNIT = 512  # bytes: the block of direct reads of most file systems
GATE, UP_DOWN = 1, 2  # parts of a bundle, as bits
DAMAGED = -2  # beside an errno and SHORT
_ODD = np.uint64(0x9E3779B97F4A7C15)

# words of `NeuronFile.facts`
DESCRIPTOR, UNIT, KEEPS_PAGES = range(3)
NUM_FACTS = 3


class NeuronFile(NamedTuple):
    """An open bundle file, and where in it a service's N bundles of all layers are.

    facts (3,) int64, the words above
    sizes (R, 2) int64: bytes of both parts of bundles of each kind, with their padding; begins (R,)
    int64: where a layer would begin if all of its bundles were like those of that kind
    kinds, places (N,) int32: a bundle's kind, one of its block, and its index within its layer
    parts (N,) uint8: what is read of it; checksums (N, 2) uint32: of both parts
    """

    facts: np.ndarray
    begins: np.ndarray
    sizes: np.ndarray
    kinds: np.ndarray
    places: np.ndarray
    parts: np.ndarray
    checksums: np.ndarray


class RowBytes(NamedTuple):
    """Rows in memory as bytes, and where each bundle's are.

    gate, up, down (rows, row bytes) uint8; in a two-matrix FFN `up` has rows of no bytes
    units (N,) int32: the unit that a bundle is of; (0,) where each is its own
    gate_rows, up_down_rows (E,) int32: `Slots.row_of`, from which rows of a unit are counted
    offsets (patterns, K) int32: which row from there each of a bundle's neurons has, -1 for none;
    patterns (N,) int32: which of these a bundle has
    outputs: matrices of blocks whose down rows are an output each; gate, up and down then have none
    """

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    units: np.ndarray
    gate_rows: np.ndarray
    up_down_rows: np.ndarray
    offsets: np.ndarray
    patterns: np.ndarray
    outputs: OutputRows


class NeuronReads(NamedTuple):
    """Bundles to read: rows (M,) int32 in the file's order, and their parts (M,) uint8."""

    rows: np.ndarray
    parts: np.ndarray


@njit(nogil=True, cache=True)
def part_checksum(part):
    """A 32-bit checksum of a part, which is whole 64-bit words.

    sum of mix(word i) * odd constant * (2 i + 1) modulo 2^64, folded to 32 bits: it detects any
    change of one word, and other changes but for one in 2^32.
    """
    words, total = part.view(np.uint64), np.uint64(0)
    for i in range(words.shape[0]):
        word = words[i]
        total += (word ^ (word >> np.uint64(29))) * (_ODD * np.uint64(2 * i + 1))
    return np.uint32(total ^ (total >> np.uint64(32)))


@njit(nogil=True, cache=True)
def _bundle_checksums(bundles, gate_bytes, checksums):
    for n in range(bundles.shape[0]):
        checksums[n, 0] = part_checksum(bundles[n, :gate_bytes])
        checksums[n, 1] = part_checksum(bundles[n, gate_bytes:])


def bundle_checksums(bundles: np.ndarray, gate_bytes: int, checksums: np.ndarray) -> None:
    """sums[n] = `part_checksum` of both parts of bundle n.

    Shapes:  bundles (N, bundle bytes) uint8, sums (N, 2) uint32
    Errors:  ValueError where parts are no whole 64-bit words
    """
    if gate_bytes % 8 or bundles.shape[1] % 8:
        raise ValueError(f"parts of {gate_bytes} and {bundles.shape[1] - gate_bytes} bytes")
    _bundle_checksums(bundles, gate_bytes, checksums)


@njit(nogil=True, cache=True)
def part_span(file, row, parts):
    """First and last (exclusive) byte of a bundle's parts in the file."""
    kind = file.kinds[row]
    gate, up_down = file.sizes[kind, 0], file.sizes[kind, 1]
    begin = file.begins[kind] + file.places[row] * (gate + up_down)
    first = begin if parts & GATE else begin + gate
    return first, begin + gate + (up_down if parts & UP_DOWN else 0)


@njit(nogil=True, cache=True)
def cut_spans(file, reads, count, max_gap, firsts):
    """Cut `count` reads into spans, each one read of the file; returns the number of spans.

    firsts[k] = the first neuron of span k; firsts (M + 1,) int32 ends with `count`. Neighbours with
    at most `max_gap` bytes between them share a span of up to READ_BYTES; a single neuron may take
    more. Neurons out of the file's order are spans of their own.
    """
    num_spans, begin, end = 0, np.int64(0), np.int64(0)
    for i in range(count):
        first, last = part_span(file, reads.rows[i], reads.parts[i])
        is_near = end <= first <= end + max_gap
        if i == 0 or not is_near or last - begin > READ_BYTES:
            firsts[num_spans] = i
            num_spans, begin = num_spans + 1, first
        end = last
    firsts[num_spans] = count
    return num_spans


@njit(nogil=True, cache=True)
def staging_bytes(bundle_bytes, unit):
    """Bytes of a buffer for spans of `cut_spans`."""
    return (max(READ_BYTES, bundle_bytes) + unit - 1) // unit * unit + 2 * unit


@njit(nogil=True, cache=True)
def copy_row(source, target, row):
    """target[row] = the first bytes of `source`, a row's length."""
    own = target[row]
    for i in range(own.shape[0]):
        own[i] = source[i]


@njit(nogil=True, cache=True)
def _copy_rows(part, at, target, first, offsets):
    """target[first + offsets[i]] = the i-th row of part[at:]; returns where they end."""
    size = target.shape[1]
    for i in range(offsets.shape[0]):
        if offsets[i] >= 0:
            copy_row(part[at + i * size :], target, first + np.int64(offsets[i]))
    return at + offsets.shape[0] * size


@njit(nogil=True, cache=True)
def copy_span(file, reads, first, last, begin, staging, target):
    """Copy rows from `staging`, the file from `begin` on; the index of a damaged one, or -1."""
    has_outputs = target.outputs.turns.shape[0] > 0
    for i in range(first, last):
        row, parts = reads.rows[i], reads.parts[i]
        gate, up_down = file.sizes[file.kinds[row], 0], file.sizes[file.kinds[row], 1]
        offsets = target.offsets[target.patterns[row]]
        unit = np.int64(target.units[row] if target.units.shape[0] else row)
        at = part_span(file, row, parts)[0] - begin
        if parts & GATE:
            part = staging[at : at + gate]
            if part_checksum(part) != file.checksums[row, 0]:
                return i
            if has_outputs:
                copy_gates(part, unit, offsets, target.outputs)
            else:
                own = np.int64(target.gate_rows[unit])
                _copy_rows(part, np.int64(0), target.gate, own, offsets)
            at += gate
        if parts & UP_DOWN:
            part = staging[at : at + up_down]
            if part_checksum(part) != file.checksums[row, 1]:
                return i
            if has_outputs:
                copy_outputs(part, unit, target.outputs.turns[row], target.outputs)
                continue
            own, down_at = np.int64(target.up_down_rows[unit]), np.int64(0)
            if target.up.shape[0]:
                down_at = _copy_rows(part, down_at, target.up, own, offsets)
            _copy_rows(part, down_at, target.down, own, offsets)
    return -1


@njit(nogil=True, cache=True)
def span_bytes(file, reads, first, last):
    """First byte and size of the read for neurons first..last-1, in whole units."""
    unit = file.facts[UNIT]
    begin = part_span(file, reads.rows[first], reads.parts[first])[0] // unit * unit
    end = part_span(file, reads.rows[last - 1], reads.parts[last - 1])[1]
    return begin, (end - begin + unit - 1) // unit * unit


@njit(nogil=True, cache=True)
def read_span(file, reads, first, last, staging, target, failure):
    """Read neurons first..last-1, a span of `cut_spans`, into their rows of `target`.

    `staging` uint8, aligned to the file's unit. Returns the bytes read, or 0 and `failure` (2,)
    int64: an errno, SHORT or DAMAGED, and the neuron's row. A part whose checksum differs is read
    once more. Checks nothing.
    """
    begin, size = span_bytes(file, reads, first, last)
    for attempt in range(2):
        status = read_bytes(
            file.facts[DESCRIPTOR], begin, size, file.facts[UNIT], file.facts[KEEPS_PAGES], staging
        )
        if status != 0:
            failure[1], failure[0] = reads.rows[first], status
            return np.int64(0)
        damaged = copy_span(file, reads, first, last, begin, staging, target)
        if damaged < 0:
            return size
        if attempt == 1:
            failure[1], failure[0] = reads.rows[damaged], DAMAGED
    return np.int64(0)
