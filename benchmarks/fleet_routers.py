"""Routers that a fleet's own is compared with; Serve's processes import this file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count
from typing import Any

from ray.serve.request_router import PendingRequest, RunningReplica

from hotcold.ui.fleet.router import PrefixRouter

Ranks = Sequence[list[RunningReplica]]


class RoundRobin(PrefixRouter):
    """One replica after another."""

    def initialize_state(self, **given: Any) -> None:
        """Serve calls it once."""
        super().initialize_state(**given)
        self._turns = count()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Ranks:
        """The next one first."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        ranks = sorted(ranks, key=lambda rank: str(rank[0].replica_id))
        first = next(self._turns) % max(1, len(ranks))
        return ranks[first:] + ranks[:first]


class TwoChoices(PrefixRouter):
    """Of two that are drawn the one with fewer requests, as Serve's own router."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Ranks:
        """One rank, of which Serve takes the one with fewest."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        able = [replica for rank in ranks for replica in rank]
        return [random.sample(able, min(2, len(able)))] if able else []


ROUTERS = {"longest beginning": PrefixRouter, "round robin": RoundRobin, "power of two": TwoChoices}
