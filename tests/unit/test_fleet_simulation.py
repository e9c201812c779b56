"""The simulated fleet, and the fleet's decisions that run in it, beside independent truth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.commands import run_main

pytest.importorskip("simpy")
from hotcold.jobs.support.fleet_plan import Targets, outcome
from hotcold.ui.fleet.order import Speeds
from hotcold.ui.fleet.policy import HeldPages, ReplicaColumns, measure, ranked
from hotcold.ui.fleet.simulation import Events, Fleet, Load, Request, Service, simulate

NODE = Service(token_s=1 / 150, tokens_per_s={1: 25.0, 8: 60.0})


class RoundRobin(Fleet):
    turns = count()

    def ranked(self, num_tokens: np.ndarray) -> Iterator[int]:
        return (number % len(num_tokens) for number in self.turns)


@pytest.mark.parametrize(
    ("service", "load"),
    [
        (Service(1e-9, {1: 100.0}, num_parallel=1), Load(0.06, 1, 1000)),  # one after another
        (Service(1e-9, {1: 100.0, 99: 100.0}, num_parallel=99), Load(0.06, 1, 1000)),  # shared
        (Service(1e-2, {1: 1e9}, num_parallel=99), Load(0.06, 1000, 1)),  # prompts
    ],
)
def test_times_are_those_of_m_m_1(service: Service, load: Load) -> None:
    """One server, 0.1 requests a second: in the mean 1 / (0.1 - 0.06) s there, and Little's law."""
    fleet = Fleet(service, 1, most_waiting=10_000)
    seen: list[int] = []

    def watch() -> Events:
        while True:
            yield fleet.env.timeout(1)
            seen.append(fleet.num_asked)

    fleet.env.process(watch())
    asked = fleet.run(load.requests(20_000, seed=0))
    mean_s = np.mean([one.ended_s - one.asked_s for one in asked])
    assert mean_s == pytest.approx(1 / (0.1 - 0.06), rel=0.06)
    assert np.mean(seen) == pytest.approx(len(asked) / asked[-1].ended_s * mean_s, rel=0.01)


def test_a_prompt_and_answers_have_half_of_the_time_each() -> None:
    """By hand: at 3 s one has 10 of 30 tokens; two share 10 a second until 10 of each are done."""
    first, second = Request(0.0, 10, 31, []), Request(1.0, 10, 11, [])
    Fleet(Service(0.1, {1: 10.0}, num_parallel=2), 1).run([first, second])
    assert (first.first_s, second.first_s) == pytest.approx((1.0, 3.0))
    assert (second.ended_s, first.ended_s) == pytest.approx((5.0, 6.0))


def test_who_finds_no_place_is_refused() -> None:
    """One runs, one waits at the replica, one at the door: of five at once two are refused."""
    fleet = Fleet(Service(0.1, {1: 10.0}, num_parallel=1), 1, most_waiting=1)
    asked = fleet.run([Request(0.0, 10, 11, []) for _ in range(5)])
    assert sorted(one.ended_s for one in asked) == pytest.approx([0, 0, 2, 4, 6])


def test_a_tokens_time_is_that_of_prompts_which_did_not_wait() -> None:
    """One in four does not; a replica that has become slow is found to be so."""
    chance, speeds = np.random.default_rng(0), Speeds(token_s=0.0, answer_s=0.0)
    for speed_s in (0.01, 0.03):
        for waited_s in chance.choice([0.0, 1.0, 4.0, 9.0], 100):
            measure(speeds, 100, 100 * speed_s + waited_s, 2.0)
        assert speed_s <= speeds["token_s"] < 1.3 * speed_s


def test_replicas_are_ranked_as_by_a_plain_sort() -> None:
    chance = np.random.default_rng(0)
    for size in [0, *chance.integers(1, 9, 200)]:
        parallel, counts, pages, tokens = (chance.integers(1, most, size) for most in (4, 6, 3, 4))
        token_s, answer_s = chance.choice([0.5, 2.0], (2, size))
        known = ReplicaColumns(parallel, counts, pages, token_s, answer_s)
        begins_s = counts * answer_s / parallel + tokens * token_s
        expected = sorted(range(size), key=lambda at: (begins_s[at], counts[at], pages[at]))
        assert list(ranked(known, tokens)) == expected


def test_pages_are_those_of_a_plain_lru_of_each_replica() -> None:
    chance, held = np.random.default_rng(0), HeldPages[int, tuple[int, int]]()
    plain: list[list[tuple[int, int]]] = [[], []]
    for _ in range(500):
        replica, start, size = map(int, chance.integers((2, 5, 6)))
        keys = [(start, at) for at in range(size)]
        for one, pages in enumerate(plain):
            expected = next((at for at, key in enumerate(keys) if key not in pages), size)
            assert held.beginnings(keys).get(one, 0) == expected
            assert held.count(one) == len(pages)
        held.add(replica, keys, 8)
        plain[replica] = ([one for one in plain[replica] if one not in keys] + keys)[-8:]
        if chance.random() < 0.02:
            held.forget(replica)
            plain[replica] = []


def test_the_same_seed_gives_the_same_and_nothing_is_lost() -> None:
    """Also where nodes end and are slow."""

    def asked() -> list[tuple[float, float, float]]:
        fleet = Fleet(NODE, 9, mean_life_s=500.0, slow=0.3, most_waiting=10_000)
        found = fleet.run(Load(0.8, 300, 100, 0.5, burst=3.0).requests(3000, seed=2))
        return [(one.asked_s, one.first_s, one.ended_s) for one in found]

    once = asked()
    assert once == asked()
    assert all(start < first <= end for start, first, end in once)


def test_beginnings_are_found_more_often_than_by_turns() -> None:
    load = Load(0.6, 512, 64, shared=0.5)
    ours, turns = (simulate(kind(NODE, 8), load, 4000) for kind in (Fleet, RoundRobin))
    assert ours.cached == pytest.approx(0.5, rel=0.1)
    assert turns.cached < 0.5 * ours.cached
    assert np.mean(ours.first_s) < 0.8 * np.mean(turns.first_s)


def test_the_command_says_how_many_nodes_keep_the_targets(tmp_path: Path) -> None:
    """A few more do, a few fewer do not, nor do as many above the load at which they fail."""
    prefill, decode = '{"tokens_per_s": 150}\n', '{"batch": 1, "tokens_per_s": 25}\n'
    (tmp_path / "node").write_text("log\n" + prefill + decode + '{"batch": 8, "tokens_per_s": 60}')
    line = ["plan", "--fleet", "--measured", str(tmp_path / "node"), "--node-cost", "0.36"]
    (row,) = run_main(*line, "--json").report["fleet"]
    number, load, targets = row["nodes"], Load(1.0, 512, 128), Targets(20.0, 0.25)
    assert not targets.missed(outcome(NODE, number + 2, load))
    assert targets.missed(outcome(NODE, number - 2, load)) == row["fails_first"] == "first token"
    assert targets.missed(
        outcome(NODE, number, replace(load, rate=1.2 * row["fails_at_requests_per_second"]))
    )
    assert row["cost_per_million_answered"] == pytest.approx(
        number * 100 / 128
    )  # of 3600 * 128 tokens an hour
    (narrow,) = run_main(*line, "--parallel", "1", "--kv-tokens", "1024", "--json").report["fleet"]
    assert narrow["nodes"] > number
    (tmp_path / "half").write_text(decode)
    for arguments, told in (
        ([*line, "--ttft", "1"], "alone, one request in a hundred takes"),
        ([*line, "--node-cost", "1"], "once for each kind of node, which are 1"),
        ([*line[:3], str(tmp_path / "half")], "lacks figures of prompts"),
        (["plan", "--ttft", "1"], "--ttft is of --fleet"),
    ):
        assert told in run_main(*arguments).refusal
