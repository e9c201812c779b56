"""What a token reads of neurons and experts on storage, and what of them stays in memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.setup.account import account
from hotcold.actors.setup.storage import storage_within
from hotcold.actors.setup.storage_shares import token_reads
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.errors import MemoryBudgetError
from hotcold.placement.profile import ActivationProfile
from hotcold.placement.storage import (
    Disk,
    Reads,
    Resident,
    expected_reads,
    gates_first,
    least_in_memory,
    listed_rates,
    missed_experts,
    token_seconds,
    whole_bundles,
)
from tests.placement_cases import mixture_config


def test_a_predictor_lists_all_that_fire_and_others() -> None:
    fired = np.array([1.0, 0.1, 0.0])
    listed = listed_rates(fired, 0.6)
    assert (listed >= fired).all() and listed.mean() == pytest.approx(0.6)
    np.testing.assert_array_equal(listed_rates(fired, 0.2), fired)


def test_more_gates_than_other_rows_in_memory() -> None:
    """Of four neurons the first is in memory, the gate alone of the next two."""
    fired = np.array([0.8, 0.4, 0.2, 0.1])
    listed = listed_rates(fired, 2 * fired.mean())
    geometry: Any = SimpleNamespace(gate_bytes=10, up_down_bytes=100)
    kept = Resident(geometry, 3, 1)
    first, whole = gates_first(fired, kept), whole_bundles(fired, kept)
    assert first.number == pytest.approx(listed[3] + 0.7)
    assert first.num_bytes == pytest.approx(10 * listed[3] + 70)
    assert whole.number == pytest.approx(listed[3] + 0.6)  # the last is read at once
    assert whole.num_bytes == pytest.approx(110 * listed[3] + 60)
    assert gates_first(fired, Resident(geometry, 4, 1)).number == pytest.approx(0.7)


def test_a_disk_of_two_rates() -> None:
    disk = Disk(30e-6, 1e9)
    sizes = 16384, 65536
    rates = [size / (30e-6 + size / 1e9) for size in sizes]
    found = Disk.of_rates((sizes[0], rates[0]), (sizes[1], rates[1]))
    assert found.read_s == pytest.approx(disk.read_s)
    assert found.bytes_per_s == pytest.approx(disk.bytes_per_s)
    reads = expected_reads(np.full(1000, 0.5), 0, 16384)
    assert found.seconds(reads) == pytest.approx(500 * sizes[0] / rates[0])


@pytest.mark.parametrize(
    ("disk_ms", "number", "token_ms"),
    [
        (172, 9_300, 227),  # 10.5 GiB, all gates; 259 in another run
        (438, 29_000, 495),  # 9 GiB, three quarters of the gates; 424 and 508 in others
        (890, 50_000, 895),  # 7 GiB
    ],
)
def test_a_token_takes_what_was_measured(disk_ms: float, number: float, token_ms: int) -> None:
    """32 layers of the llama-7b shape in f16, two threads, within a quarter."""
    disk = Disk(disk_ms / 1e3 / number)
    seconds = token_seconds(0.137, disk, Reads(number, 0), 2)
    assert 0.75 < token_ms / (1e3 * seconds) < 1.25


def test_in_the_long_run_a_disk_gives_what_it_gives() -> None:
    """Bursts are read as fast as without a limit, and all tokens together no faster than it."""
    reads, memory_s = Reads(0, 20_000_000), 0.03
    free = token_seconds(memory_s, Disk(0.0, 2e9), reads, 2)
    assert token_seconds(memory_s, Disk(0.0, 2e9, 1e9), reads, 2) == free
    assert token_seconds(memory_s, Disk(0.0, 2e9, 1e8), reads, 2) == pytest.approx(0.2)
    assert Disk(0.0, 2e9, 1e8).least_seconds(reads) == pytest.approx(0.2)
    assert Disk(0.0, 2e9, 1e9).least_seconds(reads) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("memory_ms", "rate", "read_mb", "token_ms"),
    [
        (21.7, 2.25e9, 91.1, 69.8),  # 8 of 128 experts in 12 layers, a quarter in memory
        (21.7, 2.66e9, 47.0, 45.6),  # half
        (21.7, 2.22e9, 14.3, 32.2),  # three quarters
        (22.5, 1.71e9, 50.0, 53.6),  # 6 of 64 experts, half
    ],
)
def test_a_token_of_experts_takes_what_was_measured(
    memory_ms: float, rate: float, read_mb: float, token_ms: float
) -> None:
    """Qwen3-30B-A3B's and SmallThinker-21B's shapes in Q4_0, two threads."""
    reads = Reads(read_mb * 4, read_mb * 1e6, hidden=0.0)
    found = token_seconds(memory_ms / 1e3, Disk(0.0, rate), reads, 2, 0.007)
    assert found == pytest.approx(token_ms / 1e3, rel=0.1)


def test_recently_used_experts_are_missed_as_rarely_as_others_measured() -> None:
    """Qwen3-30B-A3B, 8 of 128: LRU finds 90 to 95% with 40% of the experts in memory."""
    missed = [missed_experts(share * 128, 128, 8) / 8 for share in (1 / 16, 0.25, 0.4, 0.75, 1.0)]
    assert 0.05 < missed[2] < 0.11
    assert missed[0] == 1 and missed[-1] == 0
    assert missed == sorted(missed, reverse=True)


LAYERS, EXPERTS, SIZE, HIDDEN = 6, 64, 512, 1024
GIB = 1 << 30


# One dense layer, five of experts; no weights are needed.
CONFIG = mixture_config(
    num_experts=EXPERTS,
    num_chosen=8,
    size=SIZE,
    dense_layers=(0,),
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    intermediate_size=4096,
    hidden_act="silu",
)
SYSTEM = SystemConfig("no model")


def test_the_least_is_what_stays_and_one_layer() -> None:
    least = least_in_memory(CONFIG)
    assert least == 4096 + EXPERTS * SIZE
    with pytest.raises(MemoryBudgetError, match="use --cpu-memory"):
        storage_within(None, SYSTEM, CONFIG, GIB // 8)
    whole = account(SYSTEM, CONFIG).total_bytes
    sizes = whole - GIB // 4, whole
    found = [storage_within(None, SYSTEM, CONFIG, size) for size in sizes]
    kept = [each.num_up_downs for each in found]
    assert least < kept[0] < kept[1] <= CONFIG.num_neurons
    for each, size in zip(found, sizes, strict=True):
        assert 0 <= each.num_up_downs - each.num_gates <= 2  # whole neurons
        assert account(replace(SYSTEM, storage=each), CONFIG).total_bytes <= size


def test_what_a_token_reads_falls_to_nothing() -> None:
    counts = [4096 + share * EXPERTS * SIZE * (LAYERS - 1) // 4 for share in range(1, 5)]
    reads = [token_reads(None, SYSTEM, CONFIG, NeuronStorage("", count, count)) for count in counts]
    assert [each.num_bytes for each in reads] == sorted(
        (each.num_bytes for each in reads), reverse=True
    )
    all_chosen = (LAYERS - 1) * 8 * SIZE * 3 * 2 * HIDDEN
    assert 0.05 * all_chosen < reads[1].num_bytes < 0.25 * all_chosen
    assert reads[-1].num_bytes == 0


def test_a_profile_says_what_a_token_reads() -> None:
    """Of each ten choices five are of the expert used last, three of one just in memory."""
    distances = np.zeros(5 * EXPERTS, np.int64)
    distances[[0, 99, 100, 5 * EXPERTS - 1]] = 50, 30, 15, 5
    counts = np.ones((LAYERS, max(CONFIG.ffn_sizes)), np.int64)
    chosen = np.ones((LAYERS, EXPERTS), np.int64)
    known = ActivationProfile(counts, 1, "t", "t", chosen, distances)
    count = 100 * SIZE
    kept = NeuronStorage("", 4096 + count, 4096 + count)
    bundle_bytes = BundleGeometry.of(CONFIG).bundle_bytes
    of_expert = -(-SIZE // BundleGeometry.of(CONFIG).bundle_neurons)
    reads = token_reads(known, SYSTEM, CONFIG, kept)
    assert reads.number == pytest.approx(1.1 * 0.2 * 5 * 8 * of_expert)  # some in vain
    assert reads.num_bytes == pytest.approx(reads.number * bundle_bytes)
    # A GPU has the dense layer, and one expert.
    fitted = replace(SYSTEM, device="cuda", num_hot_neurons=4096 + SIZE)
    beside = NeuronStorage("", count, count)
    assert token_reads(known, fitted, CONFIG, beside).number == pytest.approx(5 / 20 * reads.number)
    unknown = token_reads(None, SYSTEM, CONFIG, kept)
    for none in (None, np.zeros(5 * EXPERTS, np.int64)):
        assert token_reads(replace(known, distances=none), SYSTEM, CONFIG, kept) == unknown


def test_misses_of_many_experts_follow_the_sum() -> None:
    """Token by token, as far as that can be summed; and beyond."""
    for num_chosen in (1, 8):
        for kept in (1, 1.5, 2, 7.3, 36, 37, 60, 300):
            used, new, tokens = 1.0, 1.0, 0
            while used < kept:
                tokens += 1
                new = 0.55 / tokens**0.49
                used += new
            found = missed_experts(kept * num_chosen, 1 << 16, num_chosen) / num_chosen
            assert found == pytest.approx(new, rel=1e-3)
    assert 0 < missed_experts(60_000, 1 << 16, 1) < 1e-4
