"""What a token reads of neurons on storage, against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.placement.storage import (
    Disk,
    Kept,
    Reads,
    expected_reads,
    gates_first,
    listed_rates,
    missed_experts,
    token_seconds,
    whole_bundles,
)


def test_the_neurons_that_are_wanted_most_are_not_read() -> None:
    wanted = np.array([[0.9, 0.1], [0.5, 0.3]])
    reads = expected_reads(wanted, 2, 100)
    assert reads.number == pytest.approx(0.4) and reads.num_bytes == pytest.approx(40)
    assert expected_reads(wanted, 4, 100).number == 0
    assert expected_reads(wanted, 9, 100).number == 0
    whole = expected_reads(np.ones(1024), 0, 4096, in_sequence=True)
    assert whole.number == 16 and whole.num_bytes == 1 << 22


def test_a_predictor_lists_all_that_fire_and_others() -> None:
    fired = np.array([1.0, 0.1, 0.0])
    listed = listed_rates(fired, 0.6)
    assert (listed >= fired).all() and listed.mean() == pytest.approx(0.6)
    np.testing.assert_array_equal(listed_rates(fired, 0.2), fired)


def test_more_gates_than_other_rows_in_memory() -> None:
    """Of four neurons the first is in memory, the gate alone of the next two."""
    fired = np.array([0.8, 0.4, 0.2, 0.1])
    listed = listed_rates(fired, 2 * fired.mean())
    kept = Kept(3, 1, 10, 100)
    first, whole = gates_first(fired, kept), whole_bundles(fired, kept)
    assert first.number == pytest.approx(listed[3] + 0.7)
    assert first.num_bytes == pytest.approx(10 * listed[3] + 70)
    assert whole.number == pytest.approx(listed[3] + 0.6)  # the last is read at once
    assert whole.num_bytes == pytest.approx(110 * listed[3] + 60)
    assert gates_first(fired, Kept(4, 1, 10, 100)).number == pytest.approx(0.7)


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
