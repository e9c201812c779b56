"""The cache of neurons and experts against a plain model of its rule; checksums of bundles."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.numba_kernels.storage.neuron_file import bundle_checksums
from hotcold.numba_kernels.storage.read_queue import FAILED, LOADED, NOT_LOADED
from hotcold.numba_kernels.storage.slots import (
    EPOCH,
    HAND,
    Slots,
    begin_epoch,
    claim,
    expert_slots,
    give_slot,
    keep,
    list_missing,
    load_state,
    look_up,
    neuron_slots,
    use,
)


class PlainSlots:
    """The same rule, written down with lists."""

    def __init__(self, slots: Slots) -> None:
        self.units: list[int | None] = [None] * slots.unit_of.size
        self.rates, self.hand = slots.weights.tolist(), 0
        self.decay, self.candidates = slots.decay, slots.candidates

    def begin(self, share: float) -> None:
        """All layers together decay the rates once."""
        self.rates = [rate * (1 - self.decay) ** share for rate in self.rates]

    def give(self, unit: int, now: set[int]) -> int:
        """The slot of `unit`; `now` are the units that this request has used before."""
        if unit in self.units:
            return self.units.index(unit)
        seen: list[int] = []
        most = min(self.candidates, len(self.units))
        while len(seen) < most or all(self.units[slot] in now for slot in seen):
            slot = self.hand
            self.hand = (self.hand + 1) % len(self.units)
            seen.append(slot)
            if self.units[slot] is None:
                break
        if self.units[seen[-1]] is not None:
            candidates = [slot for slot in seen if self.units[slot] not in now]
            slot = min(candidates, key=lambda slot: self.rates[self.units[slot] or 0])
        self.units[slot] = unit
        return slot

    def compare(self, slots: Slots) -> None:
        assert [-1 if unit is None else unit for unit in self.units] == slots.unit_of.tolist()
        np.testing.assert_allclose(slots.weights / slots.weight[0], self.rates, atol=1e-4)
        assert slots.state[HAND] == self.hand
        assert {*np.flatnonzero(slots.slot_of >= 0)} == {*self.units} - {None}


@pytest.mark.parametrize("seed", range(3))
def test_the_least_frequently_used_neuron_of_the_next_slots_is_evicted(seed: int) -> None:
    draw = np.random.default_rng(seed)
    layers, neurons, most = 5, 30, 12
    rates = draw.random(layers * neurons).astype(np.float32)
    slots = neuron_slots(rates, most + int(draw.integers(0, 40)))
    plain = PlainSlots(slots)
    for turn in range(200):
        first = turn % layers * neurons
        begin_epoch(slots, neurons)
        plain.begin(1 / layers)
        ids = draw.choice(neurons, draw.integers(0, most), False).astype(np.int32)
        places, missing = np.full(ids.size, -1, np.int32), np.full(ids.size, -1, np.int32)
        num_missing = look_up(slots, first, ids, ids.size, places, missing)
        for unit in (first + ids).tolist():
            plain.rates[unit] += plain.decay
        known = [i for i, unit in enumerate(first + ids) if unit in plain.units]
        assert sorted({*range(ids.size)} - {*known}) == missing[:num_missing].tolist()
        now = {int(first + ids[i]) for i in known}
        assert all(plain.units[places[i]] == first + ids[i] for i in known)
        for unit in (first + ids[missing[:num_missing]]).tolist():
            assert claim(slots, unit) == (plain.give(unit, now), True)
            slots.loaded[unit] = LOADED
            now.add(unit)
        plain.compare(slots)


@pytest.mark.parametrize("seed", range(2))
def test_of_experts_the_one_of_all_slots_that_is_used_least_is_evicted(seed: int) -> None:
    """Each has several bundles; the last one stays, and takes no slot."""
    draw = np.random.default_rng(seed)
    layers, experts, most = 4, 8, 3
    count = layers * experts
    firsts = np.concatenate([[0], np.cumsum(draw.integers(1, 4, count))])
    stays = np.arange(count) == count - 1
    slots = expert_slots(firsts, draw.random(count).astype(np.float32), stays, 11)
    plain = PlainSlots(slots)
    for turn in range(100):
        first, now = turn % layers * experts, set()
        begin_epoch(slots, experts)
        plain.begin(1 / layers)
        for unit in (first + draw.choice(experts, most, False)).tolist():
            is_known = unit in plain.units
            plain.rates[unit] += plain.decay
            assert use(slots, unit) == is_known or stays[unit]
            if is_known:
                now.add(unit)
        for unit in (first + draw.choice(experts, most, False)).tolist():
            if stays[unit]:
                continue
            assert give_slot(slots, unit) == plain.give(unit, now)
            bundles = np.zeros(8, np.int32)
            number = list_missing(slots, unit, bundles, 0)
            assert set(bundles[:number]) <= {*range(firsts[unit], firsts[unit + 1])}
            assert load_state(slots, unit) == (number == 0)
            slots.loaded[firsts[unit] : firsts[unit + 1]] = LOADED
            now.add(unit)
        plain.compare(slots)


def test_a_neuron_with_a_pending_read_is_not_evicted() -> None:
    """The reading thread writes to that slot, in whatever request, so it is not reused."""
    slots = neuron_slots(np.linspace(0, 1, 60, dtype=np.float32), 20)  # unit 0 is used least
    slots.state[EPOCH] += 1
    for unit in range(20):
        slot, is_missing = claim(slots, unit)
        assert is_missing and claim(slots, unit) == (slot, False)
    slots.loaded[2:20] = LOADED
    slots.loaded[2] = FAILED  # its read is not pending any more
    for unit, leaves in ((30, 2), (31, 3), (32, 4)):
        slots.state[EPOCH] += 1
        slot = slots.slot_of[leaves]
        assert claim(slots, unit) == (slot, True) and slots.slot_of[leaves] == -1
        assert slots.loaded[leaves] == NOT_LOADED
        slots.loaded[unit] = LOADED
    slots.loaded[[0, 1]] = LOADED
    slots.state[EPOCH] += 1
    coldest = slots.slot_of[0]
    assert claim(slots, 33) == (coldest, True)  # once it is loaded, it is evicted as any other
    slots.loaded[33] = FAILED
    assert claim(slots, 33) == (coldest, True) and slots.loaded[33] == NOT_LOADED
    for unit in range(60):
        keep(slots, unit)
    assert give_slot(slots, 50) == -1  # all are in use


def test_weights_that_grow_for_long_keep_their_order() -> None:
    """So many requests that weights are rescaled several times."""
    slots = neuron_slots(np.array([0.9, 0.5, 0.1, 0.0], np.float32), 3)
    for unit in range(3):
        claim(slots, unit)
    slots.loaded[:3] = LOADED
    places, missing = np.zeros(2, np.int32), np.zeros(2, np.int32)
    for turn in range(20_000):
        begin_epoch(slots, 4)
        look_up(slots, 0, places[:0], 1 + turn % 2, places, missing)
    rates = slots.weights / slots.weight[0]
    assert np.isfinite(slots.weights).all()
    np.testing.assert_allclose(rates, [1, 0.5, 0, 0], atol=0.01)
    np.testing.assert_allclose(slots.slot_weights, slots.weights[slots.unit_of], rtol=1e-6)


def test_checksums_detect_any_changed_word() -> None:
    bundles = np.random.default_rng(1).integers(0, 256, (1, 96), np.uint8)
    sums, found = np.empty((1, 2), np.uint32), np.empty((1, 2), np.uint32)
    bundle_checksums(bundles, 32, sums)
    parts = bundles[0, :32], bundles[0, 32:]
    assert sums[0].tolist() == [plain_checksum(part.tobytes()) for part in parts]
    for byte in range(96):
        changed = bundles.copy()
        changed[0, byte] ^= 1 << (byte % 8)
        bundle_checksums(changed, 32, found)
        assert (found != sums).tolist() == [[byte < 32, byte >= 32]]


def plain_checksum(content: bytes) -> int:
    """With Python's integers."""
    total = 0
    for i in range(len(content) // 8):
        word = int.from_bytes(content[8 * i : 8 * i + 8], "little")
        total += (word ^ (word >> 29)) * (0x9E3779B97F4A7C15 * (2 * i + 1) % 2**64)
    total %= 2**64
    return (total ^ (total >> 32)) % 2**32
