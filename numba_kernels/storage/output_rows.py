"""Matrices of experts in slots, where down is a row an output: from bundles into memory.

A slot is bytes for a block's matrices, each in its block's format: gate, up, and down's lanes. A
bundle has some rows of each. Those of down have all columns: a service that has some of the block's
neurons cuts theirs out of each row, lane by lane, as a row's layout depends on its width.
"""

from typing import NamedTuple

import numpy as np

from hotcold.numba_kernels.block_rows import (
    ALIGNED_ITEMS,
    BEGIN,
    END,
    NUM_PLACE_NUMBERS,
    ROW_ITEMS,
)
from hotcold.numba_kernels.compiler import njit
from hotcold.numba_kernels.formats import (
    CHUNK_GROUPS,
    E4M3S,
    EXPONENTS,
    HALVES,
    INT8S,
    MINIMA,
    QUANT_GROUP,
    ROW_FORMATS,
    SCALES,
    SIX_BITS,
)

# Numbers of a cut: rows of each bundle and of the matrix, bytes of a row in the file; how its codes
# and factors lie; groups of such a row, and which of them the unit has.
ROWS, HEIGHT, ROW_BYTES, BITS, FACTORS, GROUPS, FIRST_GROUP, NUM_GROUPS = range(8)
NUM_CUT_NUMBERS = 8
_FACTORS = SCALES, MINIMA, EXPONENTS, INT8S, HALVES, E4M3S, SIX_BITS
_INT8S, _HALVES, _E4M3S, _SIX_BITS = map(_FACTORS.index, (INT8S, HALVES, E4M3S, SIX_BITS))
# Of factors that lie side by side for all groups of a row: how many of each group, and their bytes.
_NUM_FACTORS, _FACTOR_BYTES = np.array([1, 2, 1]), np.array([2, 2, 1])
_CODE_BYTES = QUANT_GROUP // 8  # of a group, a bit each: a step of its chunk, read as one number


class OutputRows(NamedTuple):
    """Matrices of E units in S slots, from N bundles; of none where down is a row a neuron.

    rows (M,) uint8: all matrices in memory; gates, ups (E, 4), places (E, n, 4) int64: of
    `BlockRows`, in `rows` as items of the format, of each of n lanes of down; ups of a two-matrix
    FFN (0, 4); item_bytes (E,) int64: of gates and ups
    begins (S,) int64: where each slot's matrices begin
    cuts (E, n, 8) int64: the words above, of each unit's lanes
    turns (N,) int32: which of its block's bundles each is
    """

    rows: np.ndarray
    gates: np.ndarray
    ups: np.ndarray
    item_bytes: np.ndarray
    places: np.ndarray
    begins: np.ndarray
    cuts: np.ndarray
    turns: np.ndarray


def no_outputs() -> OutputRows:
    """Those of rows that are a neuron each."""
    none, nothing = np.zeros(0, np.int32), np.zeros(0, np.int64)
    gates = np.zeros((0, NUM_PLACE_NUMBERS), np.int64)
    places, cuts = gates[:, None], np.zeros((0, 0, NUM_CUT_NUMBERS), np.int64)
    rows = np.zeros(0, np.uint8)
    return OutputRows(rows, gates, gates, nothing, places, nothing, cuts, none)


def new_cut(
    dtype: np.dtype, width: int, first: int, count: int, rows: int, height: int
) -> tuple[int, ...]:
    """The numbers of columns first..first+count-1 of rows of `width` weights, as `cuts` has them.

    `first` begins a block of the format, and the columns are whole blocks.
    """
    kind = ROW_FORMATS[dtype]
    groups, own, begin = (number // QUANT_GROUP for number in (width, count, first))
    row_bytes = width // kind.block_weights * kind.block_bytes
    return rows, height, row_bytes, kind.bits, _FACTORS.index(kind.factors), groups, begin, own


@njit(nogil=True, cache=True)
def place_unit(outputs, unit, begin):
    """Let a unit's matrices, whose sizes stay, be in memory from byte `begin` on."""
    item_bytes = outputs.item_bytes[unit]
    begin = _move(outputs.gates[unit], begin, item_bytes)
    if outputs.ups.shape[0]:
        begin = _move(outputs.ups[unit], begin, item_bytes)
    for lane in range(outputs.places.shape[1]):
        begin = _move(outputs.places[unit, lane], begin, np.int64(1))


@njit(nogil=True, cache=True)
def _move(place, begin, item_bytes):
    """Let a matrix be in memory from byte `begin` on; returns where the next one is."""
    num_items = place[END] - place[BEGIN]
    place[BEGIN] = begin // item_bytes
    place[END] = place[BEGIN] + num_items
    return aligned_bytes(begin + num_items * item_bytes)


@njit(nogil=True, cache=True)
def aligned_bytes(num_bytes):
    """What a matrix of so many bytes takes."""
    return (num_bytes + ALIGNED_ITEMS - 1) // ALIGNED_ITEMS * ALIGNED_ITEMS


@njit(nogil=True, cache=True)
def _copy(source, target, count):
    for i in range(count):
        target[i] = source[i]


@njit(nogil=True, cache=True)
def _lane(group, num_groups):
    """Of a group of a row: groups before its chunk, groups of its chunk, and its place there."""
    before = group // CHUNK_GROUPS * CHUNK_GROUPS
    return before, min(np.int64(CHUNK_GROUPS), num_groups - before), group - before


@njit(nogil=True, cache=True)
def _cut_codes(source, bits, groups, first, count, target):
    codes = source[: _CODE_BYTES * bits * groups].view(np.uint32)
    own = target[: _CODE_BYTES * bits * count].view(np.uint32)
    group = np.int64(0)
    while group < count:  # neighbours in both chunks
        before, lanes, lane = _lane(first + group, groups)
        own_before, own_lanes, own_lane = _lane(group, count)
        run = min(lanes - lane, own_lanes - own_lane)
        for step in range(bits):
            at, to = bits * before + step * lanes + lane, bits * own_before + step * own_lanes
            _copy(codes[at:], own[to + own_lane :], run)
        group += run


@njit(nogil=True, cache=True)
def _cut_halves(source, groups, first, count, target):
    for group in range(count):
        before, lanes, lane = _lane(first + group, groups)
        own_before, own_lanes, own_lane = _lane(np.int64(group), count)
        for half in range(2):
            found = source[2 * before + half * lanes + lane]
            target[2 * own_before + half * own_lanes + own_lane] = found


@njit(nogil=True, cache=True)
def _cut_six_bits(source, groups, first, count, target):
    for group in range(count):
        before, lanes, lane = _lane(first + group, groups)
        own_before, own_lanes, own_lane = _lane(np.int64(group), count)
        at, to = before // 2 * 3, own_before // 2 * 3
        target[to + own_lane] = source[at + lane]
        upper = source[at + lanes + lane % (lanes // 2)] >> (4 if 2 * lane >= lanes else 0) & 15
        place = to + own_lanes + own_lane % (own_lanes // 2)
        if 2 * own_lane < own_lanes:
            target[place] = upper
        else:
            target[place] |= np.uint8(upper << 4)
    _copy(source[groups // 2 * 3 + first // 2 :], target[count // 2 * 3 :], count // 2)


@njit(nogil=True, cache=True)
def cut_row(source, cut, target):
    """target = the groups of a row that `cut` names, as a row of their own; checks nothing."""
    bits, kind, groups = cut[BITS], cut[FACTORS], cut[GROUPS]
    first, count = cut[FIRST_GROUP], cut[NUM_GROUPS]
    _cut_codes(source, bits, groups, first, count, target)
    factors, own = source[_CODE_BYTES * bits * groups :], target[_CODE_BYTES * bits * count :]
    if kind == _HALVES:
        _cut_halves(factors, groups, first, count, own)
        _copy(factors[2 * groups + first // 4 :], own[2 * count :], count // 4)
    elif kind == _E4M3S:
        _cut_halves(factors, groups, first, count, own)
        _copy(factors[2 * (groups + first) :], own[2 * count :], 2 * count)
    elif kind == _INT8S:
        _copy(factors[first:], own, count)
        _copy(factors[groups + first // 4 :], own[count:], count // 4)
    elif kind == _SIX_BITS:
        _cut_six_bits(factors, groups, first, count, own)
    else:
        size = _FACTOR_BYTES[kind]
        for number in range(_NUM_FACTORS[kind]):
            found = factors[(number * groups + first) * size :]
            _copy(found, own[number * count * size :], count * size)


@njit(nogil=True, cache=True)
def copy_gates(part, unit, offsets, outputs):
    """Copy the gate and up rows of a unit's bundle, which are `part`, into the unit's matrices.

    offsets (K,): which of its neurons' each of them is, -1 for none
    """
    item_bytes, at = outputs.item_bytes[unit], np.int64(0)
    for places in (outputs.gates, outputs.ups):
        if places.shape[0] == 0:
            break
        place = places[unit]
        size, begin = place[ROW_ITEMS] * item_bytes, place[BEGIN] * item_bytes
        for i in range(offsets.shape[0]):
            if offsets[i] >= 0:
                _copy(part[at:], outputs.rows[begin + np.int64(offsets[i]) * size :], size)
            at += size


@njit(nogil=True, cache=True)
def copy_outputs(part, unit, turn, outputs):
    """Copy the rows of a unit's bundle, which are `part`, into the unit's matrices."""
    for lane in range(outputs.cuts.shape[1]):
        cut, place = outputs.cuts[unit, lane], outputs.places[unit, lane]
        if cut[NUM_GROUPS] == 0:
            continue
        row_bytes, items = cut[ROW_BYTES], place[ROW_ITEMS]
        first = np.int64(turn) * cut[ROWS]
        count = min(cut[ROWS], cut[HEIGHT] - first)
        begin = place[BEGIN] + first * items
        if cut[NUM_GROUPS] == cut[GROUPS]:
            _copy(part, outputs.rows[begin:], count * row_bytes)
            return
        for row in range(count):
            own = outputs.rows[begin + row * items : begin + (row + 1) * items]
            cut_row(part[row * row_bytes : (row + 1) * row_bytes], cut, own)
