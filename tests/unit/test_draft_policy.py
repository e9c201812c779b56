"""The choice of drafts, with simulated steps: it finds what pays, and loses less than 1%."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hotcold.actors.driver.draft_policy import (
    MODEL,
    AutoPolicy,
    DraftPolicy,
    Fate,
    FixedPolicy,
    Offer,
    StepCost,
)
from hotcold.actors.protocol.messages import MOST_DRAFTED

ACCEPT_NS, LOOK_NS = 100_000, 100_000


class Request:
    """A key that can be forgotten."""


class Simulation:
    """Steps of some requests; a clock that stands still but for what steps take."""

    def __init__(
        self,
        policy: DraftPolicy,
        step_ns: Callable[[int], float],
        num_requests: int = 1,
        round_ns: float = 0.0,
        noise: float = 0.1,
        slow_share: float = 0.02,
        catch_up_ns: float = 0.0,
    ) -> None:
        """step_ns: of a step's tokens; round_ns: a model's draft of one token; 0: no model.

        catch_up_ns: before such a draft, where there was none for 17 steps
        """
        self.policy, self.step_ns, self.round_ns = policy, step_ns, round_ns
        self.requests = [Request() for _ in range(num_requests)]
        self.random = np.random.default_rng(0)
        self.noise, self.slow_share = noise, slow_share
        self.catch_up_ns, self.num_behind = catch_up_ns, 0
        self.took_ns, self.num_new, self.num_drafted, self.num_looks = 0.0, 0, 0, 0

    def run(
        self, num_steps: int, chance: float, ngram_chance: float = 0.0, ngram_length: int = 0
    ) -> float:
        """Tokens a millisecond of so many steps; `chance` of each token of a model's draft."""
        took, num_new = self.took_ns, self.num_new
        for _ in range(num_steps):
            self._step(chance, ngram_chance, ngram_length)
        return 1e6 * (self.num_new - num_new) / (self.took_ns - took)

    def _step(self, chance: float, ngram_chance: float, ngram_length: int) -> None:
        num, has_model = len(self.requests), self.round_ns > 0
        self.num_behind += 1
        if not self.policy.looks(num, 31, has_model):
            took, accept = round(self.step_ns(num) * self._noise()), ACCEPT_NS * num
            self.policy.learn_plain(num, took, accept)
            self.took_ns, self.num_new = self.took_ns + took + accept, self.num_new + num
            return
        self.num_looks += 1
        count = MOST_DRAFTED if ngram_length else 0
        offers = [Offer(one, MOST_DRAFTED, count, ngram_length) for one in self.requests]
        choices = self.policy.choose(offers, has_model, 31)
        fates = []
        for choice in choices:
            of_token = ngram_chance if choice.source else chance
            accepted = 0
            while accepted < choice.size and self.random.random() < of_token:
                accepted += 1
            fates.append(Fate(choice.size, accepted + 1, accepted))
        num_drafted = sum(choice.size for choice in choices)
        rounds = max((one.size for one in choices if one.source == MODEL), default=0)
        catch_up_ns = self.catch_up_ns * (rounds > 0 and self.num_behind > 17)
        self.num_behind = 0 if rounds else self.num_behind
        num_new = sum(fate.num_got for fate in fates)
        cost = StepCost(
            round(rounds * self.round_ns + catch_up_ns + LOOK_NS),
            round(self.step_ns(num + num_drafted) * self._noise()),
            ACCEPT_NS * num_new,
            fates,
        )
        self.policy.learn(offers, choices, cost)
        self.took_ns += cost.draft_ns + cost.step_ns + cost.accept_ns
        self.num_new += num_new
        self.num_drafted += num_drafted

    def _noise(self) -> float:
        """Mostly a little; now and then a step waits for another program."""
        slow = self.random.uniform(2, 6) if self.random.random() < self.slow_share else 1.0
        return slow * float(np.exp(self.noise * self.random.standard_normal()))


def by_memory(size: int) -> float:
    """A step bound by memory: more tokens cost little."""
    return 50e6 * (1 + 0.03 * (size - 1))


def by_arithmetic(size: int) -> float:
    """A step bound by products: each token costs as much."""
    return 20e6 * (0.1 + 0.9 * size)


def short(size: int) -> float:
    """A step that takes as long as five looks for drafts."""
    return 0.5e6 * (1 + 0.2 * (size - 1))


def without(step_ns: Callable[[int], float], num: int, steps: int) -> float:
    """Tokens a millisecond without drafts, in the same noise."""
    return Simulation(FixedPolicy(0), step_ns, num).run(steps, 0.0)


@pytest.mark.parametrize("num", [1, 3])
def test_it_is_nearly_as_fast_as_the_best_number(num: int) -> None:
    def rate(policy: DraftPolicy) -> float:
        simulation = Simulation(policy, by_memory, num, round_ns=8e6)
        simulation.run(200, 0.7)
        return simulation.run(1500, 0.7)

    best = max(rate(FixedPolicy(count)) for count in range(9))
    assert rate(AutoPolicy()) > 0.88 * best


@pytest.mark.sweep
@pytest.mark.parametrize("num", [1, 5])
@pytest.mark.parametrize(
    ("step_ns", "round_ns", "chance", "ngram_chance", "catch_up_ns"),
    [
        (by_arithmetic, 0.0, 0.0, 0.9, 0.0),
        (by_memory, 45e6, 0.8, 0.0, 0.0),
        (by_memory, 9e6, 0.1, 0.0, 30e6),
        (short, 0.0, 0.0, 0.1, 0.0),
        (short, 0.4e6, 0.3, 0.1, 0.0),
    ],
)
def test_it_loses_less_than_a_percent_where_nothing_pays(
    step_ns: Callable[[int], float],
    round_ns: float,
    chance: float,
    ngram_chance: float,
    catch_up_ns: float,
    num: int,
) -> None:
    """And at first what one draft took at most."""
    simulation = Simulation(AutoPolicy(), step_ns, num, round_ns, 0.02, 0.0, catch_up_ns)
    steps = 2500
    rate = simulation.run(steps, chance, ngram_chance, ngram_length=3)
    plain = 1e6 * num / (step_ns(num) + num * ACCEPT_NS)
    assert plain / rate - 1 < 0.01 + 2 / steps
    assert simulation.num_drafted > 0  # it was tried


@pytest.mark.parametrize("round_ns", [0.0, 6e6])
def test_it_comes_back(round_ns: float) -> None:
    """Drafts that begin to be right are noticed, and those that begin to be wrong.

    Those of n-grams, and of a model that has much to catch up with.
    """
    simulation = Simulation(AutoPolicy(), by_memory, 1, round_ns, 0.02, 0.0, 30e6)

    def run(steps: int, chance: float) -> float:
        return simulation.run(steps, chance) if round_ns else simulation.run(steps, 0.0, chance, 4)

    run(2000, 0.02)
    off = 1e6 / (by_memory(1) + ACCEPT_NS)
    run(1500, 0.95)
    assert run(500, 0.95) > 2 * off
    run(60, 0.02)
    assert run(2000, 0.02) > 0.985 * off


@pytest.mark.parametrize("has_model", [False, True])
def test_one_pause_is_forgiven(has_model: bool) -> None:
    """The first drafts pay well, but waited for something else."""
    paused, pause_ns = {"left": 2}, 400e6

    def step_ns(size: int) -> float:
        waits = size > 1 and paused["left"] > 0
        paused["left"] -= waits
        return 0.4 * by_memory(size) + waits * pause_ns

    simulation = Simulation(AutoPolicy(), step_ns, round_ns=pause_ns if has_model else 0.0)
    args = (0.85,) if has_model else (0.0, 0.85, 8)
    while not simulation.num_drafted:
        simulation.run(1, *args)
    simulation.round_ns = 6e6 if has_model else 0.0
    simulation.run(4000, *args)
    assert simulation.run(500, *args) > 1.3 * without(step_ns, 1, 500)


def test_each_request_has_its_own_number() -> None:
    """Of two requests only the one whose drafts are right is offered many."""
    policy, random = AutoPolicy(), np.random.default_rng(0)
    requests = [Request(), Request()]
    counts = []
    for _ in range(400):
        offers = [Offer(one, MOST_DRAFTED, MOST_DRAFTED, 4) for one in requests]
        choices = policy.choose(offers, False, 30)
        counts.append([choice.size for choice in choices])
        accepted = [choices[0].size, int(random.random() < 0.05) if choices[1].size else 0]
        fates = [Fate(*one) for one in zip(counts[-1], np.add(accepted, 1), accepted, strict=True)]
        step_ns = round(by_memory(2 + sum(counts[-1])))
        policy.learn(offers, choices, StepCost(1000, step_ns, 1, fates))
    right, wrong = np.mean(counts[200:], axis=0)
    assert right > 8 and wrong < 3


def test_room_is_kept() -> None:
    """Never more tokens than there is room for, than a request may have, or than a draft has."""
    random = np.random.default_rng(1)
    for policy in (AutoPolicy(), FixedPolicy(7)):
        requests = [Request() for _ in range(5)]
        for _ in range(500):
            num = int(random.integers(1, 6))
            offers = []
            for one in requests[:num]:
                length = int(random.choice([0, 2, 5, 32]))
                most = int(random.integers(0, 17))
                offers.append(Offer(one, most, min(most, 9) if length else 0, length))
            most, has_model = int(random.integers(0, 12)), bool(random.integers(2))
            choices = policy.choose(offers, has_model, most)
            assert len(choices) == num and sum(one.size for one in choices) <= most
            for offer, choice in zip(offers, choices, strict=True):
                assert choice.size <= offer.most
                if choice.size and choice.source:
                    assert choice.source == offer.ngram_length
                    assert choice.size <= offer.ngram_tokens
                elif choice.size:
                    assert has_model
            fates = [Fate(one.size, 1 + one.size, one.size) for one in choices]
            policy.learn(offers, choices, StepCost(10, 10**7, 10, fates))


def test_looking_for_drafts_costs_little() -> None:
    """Of short steps few are looked at, of long ones all, and none without room."""
    for step_ns, least, most in ((short, 0.005, 0.1), (by_memory, 0.9, 1.0)):
        simulation = Simulation(AutoPolicy(), step_ns)
        simulation.run(4000, 0.0)
        assert least < simulation.num_looks / 4000 <= most
        assert not simulation.policy.looks(1, 0, False)
