"""Gated delta nets against float64; no step's size changes a token's bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hotcold.model.config.layer_spec import RecurrentSpec
from hotcold.numba_kernels.recurrent.convolution import prepare_recurrence
from hotcold.numba_kernels.recurrent.pages import recurrent_scratch
from hotcold.numba_kernels.recurrent.recurrence import recur
from hotcold.numba_kernels.recurrent_arrays import (
    DELTA,
    NO_PAGE,
    RECURRENT_NUMBERS,
    STATE_POSITIONS,
    RecurrentVectors,
    page_items,
    window_size,
)
from tests.reference_recurrent import convolve, delta_net

EPSILON = np.float32(1e-6)
SIZES = [(1, 1, 8, 16), (2, 4, 16, 16), (2, 6, 32, 20), (3, 3, 7, 5), (1, 4, 128, 128)]


@dataclass
class Layer:
    """A layer with random weights, and pages for it that hold NaN where nothing is written."""

    sizes: tuple[int, int, int, int]
    numbers: Any
    vectors: RecurrentVectors
    pages: np.ndarray
    rng: np.random.Generator

    def rows(self, length: int) -> np.ndarray:
        """What a sequence's tokens are projected to; the last columns are gates."""
        num_keys, num_values, key_dim, value_dim = self.sizes
        width = 2 * num_keys * key_dim + 2 * num_values * (value_dim + 1)
        return self.rng.normal(0, 1.5, (length, width)).astype(np.float32)

    def reference(self, rows: np.ndarray) -> np.ndarray:
        """By `tests.reference_recurrent`, in float64."""
        num_keys, num_values, key_dim, value_dim = self.sizes
        spec = RecurrentSpec(
            kind="delta",
            num_key_heads=num_keys,
            num_value_heads=num_values,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_size=4,
            has_tiled_heads=bool(self.numbers.has_tiled_heads),
        )
        vectors = (torch.tensor(each[0]).double() for each in self.vectors)
        _, kernel, _, rate, bias, norm, _ = vectors
        parts = [spec.num_channels, spec.values_size, *[spec.num_value_heads] * 2]
        mixed, z, b, a = torch.tensor(rows).double().split(parts, 1)
        mixed = convolve(mixed, kernel.T[:, None])
        return delta_net(spec, mixed, z, b, a, rate, bias, norm, float(EPSILON)).numpy()


def a_layer(
    sizes: tuple[int, int, int, int],
    num_pages: int = 16,
    seed: int = 0,
    taps: int = 4,
    is_tiled: bool = False,
    decay: float = 2.0,
) -> Layer:
    rng = np.random.default_rng(seed)
    num_keys, num_values, key_dim, value_dim = sizes
    numbers = np.zeros(1, RECURRENT_NUMBERS)
    numbers[0] = (DELTA, 0, num_keys, num_values, key_dim, value_dim, taps, is_tiled)
    channels = 2 * num_keys * key_dim + num_values * value_dim

    def numbers_of(*shape: int) -> np.ndarray:
        return rng.normal(0, 1, (1, *shape)).astype(np.float32)

    vectors = RecurrentVectors(
        gates=numbers_of(0, 0),
        conv_weight=numbers_of(taps, channels),
        decay_rate=-np.exp(rng.uniform(-4, decay, (1, num_values))).astype(np.float32),
        step_bias=numbers_of(num_values),
        norm_weight=numbers_of(value_dim),
        conv_bias=numbers_of(0),
        skip=numbers_of(0),
    )
    pages = np.full((num_pages, page_items(numbers[0])), np.nan, np.float32)
    return Layer(sizes, numbers[0], vectors, pages, rng)


def compute(
    layer: Layer,
    rows: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    tables: np.ndarray,
    unwanted: int = 0,
    num_threads: int = 1,
) -> np.ndarray:
    """What a step computes of its tokens; `rows` stay."""
    _, num_values, _, value_dim = layer.sizes
    rows, gates = (each.copy() for each in np.split(rows, [-2 * num_values], axis=1))
    heads = np.empty((len(rows) - unwanted, num_values * value_dim), np.float32)
    scratch = recurrent_scratch(num_threads, layer.numbers[None])
    where = layer.pages, tables, positions.astype(np.int32), slots.astype(np.int32)
    for part in range(num_threads):
        prepare_recurrence(part, num_threads, layer.numbers, layer.vectors, *where, rows)
    for part in reversed(range(num_threads)):
        recur(
            part, num_threads, layer.numbers, EPSILON, layer.vectors, *where, rows, gates,
            unwanted, scratch[part], heads,
        )  # fmt: skip
    return heads


def whole(layer: Layer, rows: np.ndarray, table: np.ndarray | None = None) -> np.ndarray:
    """A sequence at once, with these pages or none."""
    positions = np.arange(len(rows))
    if table is None:
        table = np.full(-(-len(rows) // STATE_POSITIONS), NO_PAGE, np.int32)
    return compute(layer, rows, positions, np.zeros(len(rows)), table[None])


def a_table(layer: Layer, length: int) -> np.ndarray:
    count = -(-length // STATE_POSITIONS)
    return layer.rng.permutation(len(layer.pages))[:count].astype(np.int32)


@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_sequences(sizes: tuple[int, int, int, int], is_tiled: bool) -> None:
    """Where states are forgotten at once, too: later decays are exact."""
    cases = [(1, 4, 2.0), (15, 2, 2.0), (16, 4, 2.0), (17, 3, 2.0), (200, 4, 2.0), (150, 4, 6.0)]
    for seed, (length, taps, decay) in enumerate(cases):
        layer = a_layer(sizes, seed=seed, taps=taps, is_tiled=is_tiled, decay=decay)
        rows = layer.rows(length)
        found = whole(layer, rows)
        np.testing.assert_allclose(found, layer.reference(rows), atol=2e-4, rtol=1e-3)


def test_chunks_drafts_replays_and_batches_change_no_bit() -> None:
    """Sequences in random steps together; drafts that are refused, steps that are repeated.

    Where no token is refused, what is within a step alone may have no pages.
    """
    for seed in range(6):
        rng = np.random.default_rng(seed)
        layer = a_layer(SIZES[seed % 3], num_pages=63, seed=seed)
        lengths = rng.integers(1, 330, 3)
        texts = [layer.rows(length) for length in lengths]
        free = list(rng.permutation(63))
        tables = np.full((3, 21), NO_PAGE, np.int32)
        for slot, length in enumerate(lengths):
            for index in range(-(-length // STATE_POSITIONS)):
                tables[slot, index] = free.pop()
        expected = [whole(layer, rows) for rows in texts]
        done = np.zeros(3, int)
        while (done < lengths).any():
            parts, wanted, shown = [], [], tables.copy()
            for slot in rng.permutation(3):
                left = int(lengths[slot] - done[slot])
                size = min(left, int(rng.choice([0, 1, 1, 1, 5, 17, 64, 100])))
                if not size:
                    continue
                right = int(rng.integers(1, size + 1)) if rng.random() < 0.5 else size
                own = texts[slot][done[slot] : done[slot] + size].copy()
                own[right:] = layer.rows(size - right)  # a draft's tokens, refused
                parts.append((own, done[slot] + np.arange(size), np.full(size, slot)))
                wanted.append((slot, int(done[slot]), right, size))
                if right == size and rng.random() < 0.5:
                    seen = (done[slot] + size + 1 - window_size(4)) // STATE_POSITIONS
                    shown[slot, -(-done[slot] // STATE_POSITIONS) : max(0, seen)] = NO_PAGE
            if not parts:
                continue
            rows, positions, slots = (np.concatenate(each) for each in zip(*parts, strict=True))
            threads = int(rng.integers(1, 4))
            for _ in range(int(rng.integers(1, 3))):  # a repeated step finds the same
                found = compute(layer, rows, positions, slots, shown, num_threads=threads)
            first = 0
            for slot, start, right, size in wanted:
                own = expected[slot][start : start + right]
                np.testing.assert_array_equal(found[first : first + right], own)
                done[slot] += right
                first += size


def test_only_the_window_is_read() -> None:
    """Pages before it may be another sequence's by now."""
    layer = a_layer((1, 2, 16, 16))
    rows, table = layer.rows(200), a_table(layer, 200)
    expected = whole(layer, rows, table)
    kept = layer.pages.copy()
    for first in (64, 65, 67, 79, 80, 82, 83):
        layer.pages[:] = kept
        seen = max(0, first + 1 - window_size(4)) // STATE_POSITIONS
        layer.pages[table[:seen]] = np.nan
        own = np.arange(first, 200)
        found = compute(layer, rows[own], own, np.zeros(len(own)), table[None], unwanted=3)
        np.testing.assert_array_equal(found, expected[first + 3 :])
