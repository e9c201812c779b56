"""Where a request goes: to the replica that will be the first to answer it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from hotcold.ui.fleet import turns
from hotcold.ui.fleet.order import Order, Speeds
from hotcold.ui.fleet.policy import HeldPages, ReplicaColumns, cached_tokens, ranked

_NOT_MEASURED = Speeds(token_s=0.0, answer_s=0.0)


class PrefixRouter(RequestRouter):
    """Counts the time until a replica would begin to answer.

    That is the wait for a free place there, and the time to read what of the prompt its KV cache
    does not hold. What it holds follows from what was sent there.
    """

    def initialize_state(self, **_: Any) -> None:
        """Serve calls it once."""
        self._held: HeldPages[ReplicaID, bytes] = HeldPages()
        self._running: dict[ReplicaID, set[str]] = defaultdict(set)
        # Requests that no replica has taken yet, by what holds them until then.
        self._chosen: WeakKeyDictionary[Any, ReplicaID] = WeakKeyDictionary()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls it with those that run."""
        super().update_replicas(replicas)
        # Serve copies this module, but none that it imports.
        name = self._deployment_id.name
        turns.places[name] = sum(one.max_ongoing_requests for one in replicas)
        turns.at_once[name] = sum(one.replica_metadata["num_parallel"] for one in replicas)
        for replica_id in self._running.keys() - self.curr_replicas.keys():
            del self._running[replica_id]
            self._held.forget(replica_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Sequence[list[RunningReplica]]:
        """The replicas that may answer, the first to do so first; no other than the same bits."""
        order = _order(pending_request)
        if pending_request is None or order is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        able = [
            one for one in candidate_replicas
            if order.identity in ("", one.replica_metadata["identity"])
        ]  # fmt: skip
        held = self._held.beginnings(order.keys)
        num_prompt = len(order.request.prompt_ids or ())
        num_tokens = [
            num_prompt
            - cached_tokens(held.get(one.replica_id, 0), one.replica_metadata["share_tokens"])
            for one in able
        ]
        self._chosen.pop(pending_request.future, None)
        ranks = [able[at] for at in ranked(self._columns(able), np.array(num_tokens))]
        if ranks:  # so that the next request, which may come at once, does not see it free
            self._chosen[pending_request.future] = ranks[0].replica_id
        return [[one] for one in ranks]

    def _columns(self, replicas: Sequence[RunningReplica]) -> ReplicaColumns:
        ids = [one.replica_id for one in replicas]
        chosen = Counter(self._chosen.values())
        counted = [self.replica_queue_len_cache.get(one) or 0 for one in ids]  # other doors' too
        own = [len(self._running[one]) + chosen[one] for one in ids]
        speeds: list[Speeds] = [one.routing_stats or _NOT_MEASURED for one in replicas]
        return ReplicaColumns(
            num_parallel=np.array([one.replica_metadata["num_parallel"] for one in replicas]),
            count=np.array(list(map(max, counted, own))),
            num_pages=np.array(list(map(self._held.count, ids))),
            token_s=np.array([one["token_s"] for one in speeds]),
            answer_s=np.array([one["answer_s"] for one in speeds]),
        )

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note what a replica reads."""
        self._chosen.pop(pending_request.future, None)
        order, replica = _order(pending_request), self.curr_replicas.get(replica_id)
        if replica is None or order is None:
            return
        self._running[replica_id].add(pending_request.metadata.internal_request_id)
        self._held.add(replica_id, order.keys, replica.replica_metadata["num_pages"])

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a replica has answered, or has not."""
        self._running[replica_id].discard(internal_request_id)


def _order(pending: PendingRequest | None) -> Order | None:
    """The order of a call of `Replica.answer`; None for other calls."""
    given = pending.args[:1] if pending is not None else []
    return given[0] if given and isinstance(given[0], Order) else None
