"""What is expected to miss a cache of experts, beside a cache that is played token by token."""

from __future__ import annotations

import numpy as np
import pytest

from hotcold.placement.expert_reuse import StackDistances, missed_share

LAYERS, EXPERTS, CHOSEN, TOKENS = 4, 16, 2, 500
SETTLED = 64  # tokens that are not counted


def drawn_routes(kept: float, skew: float, seed: int = 0) -> np.ndarray:
    """(T, L, E) bool: a share is kept from token to token; popularity changes twice."""
    rng = np.random.default_rng(seed)
    found = np.zeros((TOKENS, LAYERS, EXPERTS), bool)
    for token in range(TOKENS):
        if token % (TOKENS // 3) == 0:
            logits = skew * rng.standard_normal((LAYERS, EXPERTS))
        scores = logits + rng.gumbel(size=logits.shape)
        if token:
            scores[found[token - 1] & (rng.random(scores.shape) < kept)] += 100
        best = np.argsort(-scores, axis=1)[:, :CHOSEN]
        np.put_along_axis(found[token], best, True, axis=1)
    return found


def played_misses(routes: np.ndarray, num_slots: int) -> tuple[int, int]:
    """Misses and lookups after SETTLED tokens: what is used least by a mean over 16 tokens goes."""
    means = {(layer, expert): 0.0 for layer in range(LAYERS) for expert in range(EXPERTS)}
    in_slots: list[tuple[int, int]] = []
    misses = lookups = 0
    for token, of_layers in enumerate(routes):
        for layer, row in enumerate(of_layers):
            chosen = [(layer, int(expert)) for expert in np.flatnonzero(row)]
            for unit in means:
                means[unit] *= (15 / 16) ** (1 / LAYERS)
            for unit in chosen:
                means[unit] += 1 / 16
            for unit in chosen:
                is_missed = unit not in in_slots
                if is_missed and len(in_slots) == num_slots:
                    in_slots.remove(min(set(in_slots) - set(chosen), key=means.__getitem__))
                if is_missed:
                    in_slots.append(unit)
                misses += is_missed and token >= SETTLED
                lookups += token >= SETTLED
    return misses, lookups


@pytest.mark.sweep(keep=3)
@pytest.mark.parametrize(("kept", "skew"), [(0, 0), (0.5, 0), (0.3, 1), (0.8, 0.5), (0, 2)])
def test_as_many_are_missed_as_of_a_cache_of_any_size(kept: float, skew: float) -> None:
    routes = drawn_routes(kept, skew)
    distances = StackDistances(LAYERS * EXPERTS)
    distances.add(routes)
    assert distances.counts.sum() == (TOKENS - SETTLED) * LAYERS * CHOSEN
    expected, found = [], []
    for num_slots in (16, 24, 32, 48, 58):
        misses, lookups = played_misses(routes, num_slots)
        expected.append(misses / lookups)
        found.append(missed_share(distances.counts, num_slots))
    # Of some 3,500 choices one in 200 may miss by chance.
    np.testing.assert_allclose(found, expected, rtol=0.14, atol=0.005)
    assert sum(found) == pytest.approx(sum(expected), rel=0.05)
    assert missed_share(distances.counts, LAYERS * EXPERTS) == 0


def test_tokens_may_come_in_any_number_of_steps() -> None:
    routes = drawn_routes(0.4, 1)
    at_once, in_steps = (StackDistances(LAYERS * EXPERTS) for _ in range(2))
    at_once.add(routes)
    for first, last in ((0, 1), (1, 40), (40, 40), (40, 90), (90, TOKENS)):
        in_steps.add(routes[first:last])
    np.testing.assert_array_equal(in_steps.counts, at_once.counts)
    backwards = StackDistances(LAYERS * EXPERTS)
    backwards.add(routes[::-1])
    assert (backwards.counts != at_once.counts).any()


def test_what_is_not_counted_is_used_all_the_same() -> None:
    routes, found = drawn_routes(0.4, 1), StackDistances(LAYERS * EXPERTS)
    found.add(routes[:100], counts=False)
    assert not found.counts.any()
    found.add(routes[100:])
    every, before = (StackDistances(LAYERS * EXPERTS) for _ in range(2))
    every.add(routes)
    before.add(routes[:100])
    np.testing.assert_array_equal(found.counts, every.counts - before.counts)
