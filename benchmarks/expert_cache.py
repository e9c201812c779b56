"""Which rule keeps the right experts in memory: hit rates over routes, recorded or drawn.

    python -m benchmarks.expert_cache [--routes FILE.npy] [--kept 0.45] [--topics 1.5]

Routes say which experts each token chooses in each layer: (tokens, layers, chosen) of integers, as
`examples.train_mixture` records them. Without a file they are drawn: a token keeps a share of the
last one's experts and draws the others by how popular they are in general and in its document. Half
of the tokens are the profile that fills the cache; the other half is counted. Rules are played over
one cache for all layers, whose size is a share of all experts. The last rows are what `hotcold
plan` expects of the mean over 16 tokens, by stack distances of either half, and without a profile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from hotcold.numba_kernels.compiler import njit
from hotcold.placement.expert_reuse import StackDistances, missed_share
from hotcold.placement.storage import missed_experts

SHARES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9)
LRU, DECAYED, PINNED, OPTIMUM = range(4)
_NEVER = 1 << 60


@dataclass(frozen=True)
class Drawn:
    """How routes are drawn.

    kept: the share of experts that the next token keeps; skew: the exponent of popularity by rank;
    topics: how much popularity differs between documents, the deviation of its logarithm
    """

    num_tokens: int = 2048
    num_layers: int = 48
    num_experts: int = 128
    num_chosen: int = 8
    kept: float = 0.45
    skew: float = 0.5
    topics: float = 1.5
    document: int = 512

    def routes(self, seed: int = 0) -> np.ndarray:
        """(tokens, layers, chosen) int16."""
        rng = np.random.default_rng(seed)
        shape = self.num_layers, self.num_experts
        ranks = np.argsort(rng.random(shape), axis=1)
        general = -self.skew * np.log1p(ranks)
        found = np.empty((self.num_tokens, self.num_layers, self.num_chosen), np.int16)
        for token in range(self.num_tokens):
            if token % self.document == 0:
                logits = general + self.topics * rng.standard_normal(shape)
            scores = logits + rng.gumbel(size=shape)  # the largest are a draw without replacement
            if token:
                is_kept = rng.random((self.num_layers, self.num_chosen)) < self.kept
                again = np.take_along_axis(scores, found[token - 1].astype(np.int64), axis=1)
                again[is_kept] = np.inf
                np.put_along_axis(scores, found[token - 1].astype(np.int64), again, axis=1)
            found[token] = np.argpartition(-scores, self.num_chosen, axis=1)[:, : self.num_chosen]
        return found


@njit(cache=True)
def _misses(units, num_units, num_slots, rule, memory, rates, following):  # type: ignore[no-untyped-def]
    """How many of `units` (steps, chosen) were not in one of the slots, which are warm at first.

    following (steps, chosen): when each is used next; rates (units,): the profile's
    """
    score, slot_of = rates.copy(), np.full(num_units, -1, np.int64)
    unit_of, used = np.argsort(-rates)[:num_slots].copy(), np.full(num_units, -1, np.int64)
    slot_of[unit_of] = np.arange(num_slots)
    until = np.full(num_units, _NEVER, np.int64)
    misses, unit = 0, 1.0
    for step in range(units.shape[0]):
        unit /= 1 - memory
        for i in range(units.shape[1]):
            one = units[step, i]
            used[one], until[one] = step, following[step, i]
            score[one] = score[one] + memory * unit if rule == DECAYED else float(step + 1)
        for i in range(units.shape[1]):
            one = units[step, i]
            if slot_of[one] >= 0:
                continue
            misses += 1
            if rule == PINNED:
                continue
            victim, least = -1, np.inf
            for slot in range(num_slots):
                other = unit_of[slot]
                value = float(-until[other]) if rule == OPTIMUM else score[other]
                if value < least and used[other] != step:
                    victim, least = slot, value
            slot_of[unit_of[victim]] = -1
            unit_of[victim], slot_of[one] = one, victim
    return misses


def _following(units: np.ndarray, num_units: int) -> np.ndarray:
    """At which step each is used next."""
    found, next_use = np.empty_like(units), np.full(num_units, _NEVER)
    for step in range(len(units) - 1, -1, -1):
        found[step] = next_use[units[step]]
        next_use[units[step]] = step
    return found


class Replay:
    """Routes, cut in a profile and what is counted."""

    def __init__(self, routes: np.ndarray, num_experts: int) -> None:
        num_layers, half = routes.shape[1], len(routes) // 2
        self.num_layers, self.num_units = num_layers, num_layers * num_experts
        self.distances = [self._distances(part) for part in (routes[:half], routes[half:])]
        units = routes + np.arange(num_layers)[None, :, None] * num_experts
        counts = np.bincount(units[:half].ravel(), minlength=self.num_units)
        self.rates = counts / max(1, half)
        self.units = units[half:].reshape(-1, routes.shape[2])
        self.following = _following(self.units, self.num_units)

    def hits(self, share: float, rule: int, tokens: float = 1.0, is_warm: bool = True) -> float:
        """The share of lookups that hit; `tokens`: over how many the mean of uses goes."""
        memory = 1 - (1 - 1 / max(tokens, 1.0)) ** (1 / self.num_layers) if rule == DECAYED else 0
        slots = self._num_slots(share)
        rates = self.rates if is_warm else np.zeros(self.num_units)
        # A use counts so much that an expert that every token uses has 1 in the mean.
        weighed = rates * (memory * self.num_layers if rule == DECAYED else 1)
        if rule in (LRU, OPTIMUM):
            weighed = rates - 2.0  # before all steps
        misses = _misses(self.units, self.num_units, slots, rule, memory, weighed, self.following)
        return 1 - misses / self.units.size

    def expected_hits(self, share: float, half: int) -> float:
        """What `hotcold plan` expects of a mean over 16 tokens, by a profile of that half."""
        return 1 - missed_share(self.distances[half], self._num_slots(share))

    def _distances(self, routes: np.ndarray) -> np.ndarray:
        distances = StackDistances(self.num_units)
        chosen = np.zeros((len(routes), self.num_layers, self.num_units // self.num_layers), bool)
        np.put_along_axis(chosen, routes, True, axis=2)
        distances.add(chosen)
        return distances.counts

    def assumed_hits(self, share: float) -> float:
        """What it expects without a profile."""
        num_experts, num_chosen = self.num_units // self.num_layers, self.units.shape[1]
        slots = self._num_slots(share) / self.num_layers
        return 1 - missed_experts(slots, num_experts, num_chosen) / num_chosen

    def _num_slots(self, share: float) -> int:
        return max(int(share * self.num_units), self.units.shape[1] * 2)

    def repeats(self, distance: int) -> float:
        """The share of choices that one of the last `distance` tokens made too."""
        by_token = self.units.reshape(-1, self.num_layers, self.units.shape[1])
        found = [
            np.isin(by_token[t], by_token[max(0, t - distance) : t]).mean()
            for t in range(distance, len(by_token), max(1, len(by_token) // 200))
        ]
        return float(np.mean(found))


Rule = Callable[[Replay, float], float]
RULES: dict[str, Rule] = {
    "fixed by the profile": lambda replay, share: replay.hits(share, PINNED),
    "LRU": lambda replay, share: replay.hits(share, LRU),
    "LRU, cold": lambda replay, share: replay.hits(share, LRU, is_warm=False),
    **{
        f"mean over {tokens} tokens": lambda replay, share, tokens=tokens: replay.hits(  # type: ignore[misc]
            share, DECAYED, tokens
        )
        for tokens in (4, 16, 64, 256)
    },
    "optimum": lambda replay, share: replay.hits(share, OPTIMUM),
    "expected by the same tokens": lambda replay, share: replay.expected_hits(share, 1),
    "expected by the profile": lambda replay, share: replay.expected_hits(share, 0),
    "expected without": lambda replay, share: replay.assumed_hits(share),
}


@click.command()
@click.option("--routes", type=click.Path(path_type=Path), help="Recorded ones, instead of drawn.")
@click.option("--tokens", default=2048, show_default=True)
@click.option("--layers", default=48, show_default=True)
@click.option(
    "--experts",
    type=click.IntRange(min=1),
    help="Of a layer; 128, or as many as routes name, without it.",
)
@click.option("--chosen", default=8, show_default=True)
@click.option("--kept", default=0.45, show_default=True, help="Experts kept from token to token.")
@click.option("--skew", default=0.5, show_default=True, help="Of how popular experts are.")
@click.option("--topics", default=1.5, show_default=True, help="How much documents differ.")
def main(
    routes: Path | None,
    tokens: int,
    layers: int,
    experts: int | None,
    chosen: int,
    kept: float,
    skew: float,
    topics: float,
) -> None:
    """Print a table: rules, and shares of all experts that are held."""
    if routes is not None:
        found = np.load(routes, allow_pickle=False).astype(np.int64)
        named = int(found.max()) + 1
        experts = max(experts or named, named)
    else:
        experts = experts or 128
        drawn = Drawn(tokens, layers, experts, chosen, kept, skew, topics)
        found = drawn.routes().astype(np.int64)
    replay = Replay(found, experts)
    click.echo(
        f"{len(found)} tokens, {found.shape[1]} layers, {found.shape[2]} of {experts} experts; "
        f"{replay.repeats(1):.0%} were chosen by the token before, {replay.repeats(8):.0%} by one "
        "of the last eight"
    )
    click.echo("| share held | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |")
    click.echo("| --- |" + " --- |" * len(SHARES))
    for name, rule in RULES.items():
        rates = " | ".join(f"{rule(replay, share):.1%}" for share in SHARES)
        click.echo(f"| {name} | {rates} |")


if __name__ == "__main__":
    main()
