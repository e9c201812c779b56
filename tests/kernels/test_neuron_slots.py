"""The cache of neurons against a plain model of its eviction rule; checksums of bundles."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.numba_kernels.storage.neuron_file import bundle_checksums
from hotcold.numba_kernels.storage.neuron_slots import (
    DECAY,
    EPOCH,
    EVICTION_CANDIDATES,
    HAND,
    NeuronSlots,
    begin_request,
    claim,
    look_up,
    new_slots,
)
from hotcold.numba_kernels.storage.read_queue import FAILED, LOADED, NOT_LOADED


class PlainSlots:
    """The same rule, written down with lists."""

    def __init__(self, num_slots: int, rates: list[float]) -> None:
        self.rows: list[int | None] = [None] * num_slots
        self.rates, self.hand = rates, 0

    def claim(self, row: int, now: set[int]) -> int:
        """The slot of `row`; `now` are the neurons that this request has used before."""
        if row in self.rows:
            return self.rows.index(row)
        seen: list[int] = []
        while len(seen) < EVICTION_CANDIDATES or all(self.rows[slot] in now for slot in seen):
            slot = self.hand
            self.hand = (self.hand + 1) % len(self.rows)
            seen.append(slot)
            if self.rows[slot] is None:
                break
        if self.rows[seen[-1]] is not None:
            candidates = [slot for slot in seen if self.rows[slot] not in now]
            slot = min(candidates, key=lambda slot: self.rates[self.rows[slot] or 0])
        self.rows[slot] = row
        return slot


def load(slots: NeuronSlots, ids: np.ndarray) -> int:
    """Look neurons up and load those that are missing; returns their number."""
    places, missing = np.zeros(ids.size, np.int32), np.zeros(ids.size, np.int32)
    num_missing = int(look_up(slots, 0, ids, ids.size, places, missing))
    for row in ids[missing[:num_missing]].tolist():
        claim(slots, row)
    slots.loaded[ids] = LOADED
    return num_missing


@pytest.mark.parametrize("seed", range(4))
def test_the_least_frequently_used_neuron_of_the_next_slots_is_evicted(seed: int) -> None:
    draw = np.random.default_rng(seed)
    layers, neurons, most = 5, 30, 12
    rates = draw.random(layers * neurons).astype(np.float32)
    num_slots = most + int(draw.integers(0, 40))
    slots = new_slots(rates, num_slots)
    plain = PlainSlots(num_slots, rates.tolist())
    for request in range(200):
        first = request % layers * neurons
        begin_request(slots, neurons)
        plain.rates = [rate * (1 - DECAY) ** (1 / layers) for rate in plain.rates]
        now: set[int] = set()
        ids = draw.choice(neurons, draw.integers(0, most), False).astype(np.int32)
        places, missing = np.full(ids.size, -1, np.int32), np.full(ids.size, -1, np.int32)
        num_missing = look_up(slots, first, ids, ids.size, places, missing)
        plain.rates = [
            rate + DECAY * (row - first in ids.tolist()) for row, rate in enumerate(plain.rates)
        ]
        known = [i for i, row in enumerate(first + ids) if row in plain.rows]
        assert sorted({*range(ids.size)} - {*known}) == missing[:num_missing].tolist()
        now = {int(first + ids[i]) for i in known}
        assert all(plain.rows[places[i]] == first + ids[i] for i in known)
        for row in (first + ids[missing[:num_missing]]).tolist():
            assert claim(slots, row) == (plain.claim(row, now), True)
            slots.loaded[row] = LOADED
            now.add(row)
        assert [-1 if row is None else row for row in plain.rows] == slots.row_of.tolist()
        np.testing.assert_allclose(slots.weights / slots.weight[0], plain.rates, atol=1e-4)
        assert slots.state[HAND] == plain.hand
        loaded = np.flatnonzero(slots.slot_of >= 0)
        assert set(loaded) == {row for row in plain.rows if row is not None}


def test_frequently_used_neurons_survive_a_scan() -> None:
    """Half of a request's neurons are always the same, the other half changes."""
    slots = new_slots(np.zeros(400, np.float32), 60)
    draw, num_found = np.random.default_rng(2), 0
    for request in range(100):
        begin_request(slots, 400)
        num_found += (slots.slot_of[:30] >= 0).sum() if request >= 20 else 0
        ids = np.array([*range(30), *(30 + draw.choice(370, 25, False))], np.int32)
        load(slots, ids)
    assert num_found >= 0.95 * 80 * 30


def test_a_neuron_with_a_pending_read_is_not_evicted() -> None:
    """The reading thread writes to that slot, in whatever request, so it is not reused."""
    slots = new_slots(np.linspace(0, 1, 60, dtype=np.float32), 20)  # row 0 is used least
    slots.state[EPOCH] += 1
    for row in range(20):
        slot, is_missing = claim(slots, row)
        assert is_missing and claim(slots, row) == (slot, False)
    slots.loaded[2:20] = LOADED
    slots.loaded[2] = FAILED  # its read is not pending any more
    for row, leaves in ((30, 2), (31, 3), (32, 4)):
        slots.state[EPOCH] += 1
        slot = slots.slot_of[leaves]
        assert claim(slots, row) == (slot, True) and slots.slot_of[leaves] == -1
        assert slots.loaded[leaves] == NOT_LOADED
        slots.loaded[row] = LOADED
    slots.loaded[[0, 1]] = LOADED
    slots.state[EPOCH] += 1
    coldest = slots.slot_of[0]
    assert claim(slots, 33) == (coldest, True)  # once it is loaded, it is evicted as any other


def test_a_failed_read_is_requested_again() -> None:
    slots = new_slots(np.zeros(4, np.float32), 2)
    slot, _ = claim(slots, 1)
    slots.loaded[1] = FAILED
    assert claim(slots, 1) == (slot, True) and slots.loaded[1] == NOT_LOADED
    slots.loaded[1] = FAILED
    assert load(slots, np.array([1], np.int32)) == 1 and slots.loaded[1] == LOADED


def test_weights_that_grow_for_long_keep_their_order() -> None:
    """So many requests that weights are rescaled several times."""
    slots = new_slots(np.array([0.9, 0.5, 0.1, 0.0], np.float32), 3)
    for row in range(3):
        claim(slots, row)
    for request in range(20_000):
        begin_request(slots, 4)
        load(slots, np.arange(1 + request % 2, dtype=np.int32))
    rates = slots.weights / slots.weight[0]
    assert np.isfinite(slots.weights).all()
    np.testing.assert_allclose(rates, [1, 0.5, 0, 0], atol=0.01)
    np.testing.assert_allclose(slots.slot_weights, slots.weights[slots.row_of], rtol=1e-6)


def test_checksums_detect_any_changed_word() -> None:
    draw = np.random.default_rng(1)
    bundles = draw.integers(0, 256, (3, 96), np.uint8)
    sums = np.empty((3, 2), np.uint32)
    bundle_checksums(bundles, 32, sums)
    for n, part in ((n, part) for n in range(3) for part in range(2)):
        words = bundles[n, :32] if part == 0 else bundles[n, 32:]
        assert sums[n, part] == plain_checksum(words.tobytes())
    for byte in range(96):
        changed = bundles.copy()
        changed[1, byte] ^= 1 << (byte % 8)
        found = np.empty_like(sums)
        bundle_checksums(changed, 32, found)
        assert np.argwhere(found != sums).tolist() == [[1, int(byte >= 32)]]
    with pytest.raises(ValueError, match="parts of 4"):
        bundle_checksums(bundles, 4, sums)


def plain_checksum(content: bytes) -> int:
    """With Python's integers."""
    total = 0
    for i in range(len(content) // 8):
        word = int.from_bytes(content[8 * i : 8 * i + 8], "little")
        total += (word ^ (word >> 29)) * (0x9E3779B97F4A7C15 * (2 * i + 1) % 2**64)
    total %= 2**64
    return (total ^ (total >> 32)) % 2**32
