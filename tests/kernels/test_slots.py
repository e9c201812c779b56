"""The cache of neurons and experts against a plain model of its rule; checksums of bundles."""

from __future__ import annotations

import numpy as np

from hotcold.numba_kernels.storage.neuron_file import bundle_checksums
from hotcold.numba_kernels.storage.read_queue import FAILED, LOADED, NOT_LOADED
from hotcold.numba_kernels.storage.slots import (
    EPOCH,
    Slots,
    begin_epoch,
    give_slot,
    keep,
    look_up,
    neuron_slots,
    request,
)


def claim(slots: Slots, unit: int) -> tuple[int, bool]:
    """The slot of a neuron, and whether it has to be read."""
    return give_slot(slots, unit), request(slots, unit)


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
