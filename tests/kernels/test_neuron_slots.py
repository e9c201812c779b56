"""Slots of neurons against a plain model of the same clock; sums of parts; spans."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.storage.bundle_sums import bundle_sums
from numba_kernels.storage.neuron_slots import EPOCH, HAND, new_slots, slot_for


class PlainClock:
    """The same rule, written down with lists."""

    def __init__(self, num_slots: int, pinned: list[int]) -> None:
        self.rows: list[int | None] = [*pinned, *[None] * (num_slots - len(pinned))]
        self.first = self.hand = len(pinned)
        self.credit = [0] * num_slots

    def want(self, row: int, now: set[int]) -> int:
        """The slot of `row`; `now` are the neurons that this layer has asked for before."""
        if row in self.rows:
            slot = self.rows.index(row)
            self.credit[slot] = min(3, self.credit[slot] + (row not in now))
            return slot
        while True:
            slot = self.hand
            self.hand = self.first if slot + 1 == len(self.rows) else slot + 1
            if self.rows[slot] in now:
                continue
            if self.rows[slot] is None or self.credit[slot] == 0:
                self.rows[slot], self.credit[slot] = row, 0
                return slot
            self.credit[slot] -= 1


@pytest.mark.parametrize("seed", range(4))
def test_the_clock(seed: int) -> None:
    draw = np.random.default_rng(seed)
    layers, neurons, most = 5, 30, 12
    pinned = draw.choice(layers * neurons, 7 * (seed % 2), replace=False).astype(np.int32)
    num_slots = pinned.size + most + int(draw.integers(0, 40))
    slots = new_slots(layers * neurons, num_slots, pinned)
    plain = PlainClock(num_slots, pinned.tolist())
    for request in range(200):
        slots.state[EPOCH] += 1
        first = request % layers * neurons
        now: set[int] = set()
        for row in (first + draw.choice(neurons, draw.integers(0, most), False)).tolist():
            assert slot_for(slots, row) == plain.want(row, now)
            now.add(row)
        for row in now:  # a second look at the same rows, as for up and down
            slot = slot_for(slots, row)
            assert slots.row_of[slot] == row and slot == plain.want(row, now)
        assert [-1 if row is None else row for row in plain.rows] == slots.row_of.tolist()
        assert slots.credit[pinned.size :].tolist() == plain.credit[pinned.size :]
        assert slots.state[HAND] == plain.hand
        held = np.flatnonzero(slots.slot_of >= 0)
        assert set(held) == {row for row in plain.rows if row is not None}
        assert set(pinned.tolist()) <= set(held.tolist())


def test_sums_tell_any_changed_word() -> None:
    draw = np.random.default_rng(1)
    bundles = draw.integers(0, 256, (3, 96), np.uint8)
    sums = np.empty((3, 2), np.uint32)
    bundle_sums(bundles, 32, sums)
    for n, part in ((n, part) for n in range(3) for part in range(2)):
        words = bundles[n, :32] if part == 0 else bundles[n, 32:]
        assert sums[n, part] == plain_sum(words.tobytes())
    for byte in range(96):
        changed = bundles.copy()
        changed[1, byte] ^= 1 << (byte % 8)
        found = np.empty_like(sums)
        bundle_sums(changed, 32, found)
        assert np.argwhere(found != sums).tolist() == [[1, int(byte >= 32)]]
    with pytest.raises(ValueError, match="parts of 4"):
        bundle_sums(bundles, 4, sums)


def plain_sum(content: bytes) -> int:
    """By Python's own integers."""
    total = 0
    for i in range(len(content) // 8):
        word = int.from_bytes(content[8 * i : 8 * i + 8], "little")
        total += (word ^ (word >> 29)) * (0x9E3779B97F4A7C15 * (2 * i + 1) % 2**64)
    total %= 2**64
    return (total ^ (total >> 32)) % 2**32
