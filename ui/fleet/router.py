"""Where a request goes: to the replica that will be the first to answer it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Container, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.ui.fleet import turns
from hotcold.ui.fleet.order import Facts, Order, Speeds

# Until they are measured: of a small model.
_TOKEN_S, _ANSWER_S = 0.001, 1.0


class PrefixRouter(RequestRouter):
    """Counts the time until a replica would begin to answer.

    That is the wait for a free place there, and the time to read what of the prompt its KV cache
    does not hold. What it holds follows from what was sent there: pages that are used least leave.
    """

    def initialize_state(self, **_: Any) -> None:
        """Serve calls it once."""
        self._pages: dict[ReplicaID, OrderedDict[bytes, None]] = defaultdict(OrderedDict)
        self._running: dict[ReplicaID, set[str]] = defaultdict(set)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls it with those that run."""
        super().update_replicas(replicas)
        # Serve copies this module, but none that it imports.
        name = self._deployment_id.name
        turns.places[name] = sum(one.max_ongoing_requests for one in replicas)
        turns.at_once[name] = sum(one.replica_metadata["num_parallel"] for one in replicas)
        for held in (self._pages, self._running):
            for replica_id in held.keys() - self.curr_replicas.keys():
                del held[replica_id]

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
        usual = _usual(able)
        return [[one] for one in sorted(able, key=lambda one: self._begins(one, order, usual))]

    def _begins(
        self, replica: RunningReplica, order: Order, usual: Speeds
    ) -> tuple[float, int, int]:
        """When it would begin, in seconds from now; then how many requests and pages it has.

        `usual`: the speeds of a replica that has measured none
        """
        facts: Facts = replica.replica_metadata
        speeds: Speeds = replica.routing_stats or usual
        counted = self.replica_queue_len_cache.get(replica.replica_id) or 0  # other doors' too
        count = max(counted, len(self._running[replica.replica_id]))
        num_before = max(0, count + 1 - facts["num_parallel"])
        wait_s = num_before * (speeds["answer_s"] or usual["answer_s"]) / facts["num_parallel"]
        pages = self._pages[replica.replica_id]
        num_cached = _num_cached(order, pages, facts["share_tokens"])
        num_tokens = len(order.request.prompt_ids or ()) - num_cached
        return wait_s + num_tokens * (speeds["token_s"] or usual["token_s"]), count, len(pages)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note what a replica reads."""
        order, replica = _order(pending_request), self.curr_replicas.get(replica_id)
        if replica is None or order is None:
            return
        self._running[replica_id].add(pending_request.metadata.internal_request_id)
        pages = self._pages[replica_id]
        for key in order.keys:
            pages[key] = None
            pages.move_to_end(key)
        while len(pages) > replica.replica_metadata["num_pages"]:
            pages.popitem(last=False)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that a replica has answered, or has not."""
        self._running[replica_id].discard(internal_request_id)


def _usual(replicas: Sequence[RunningReplica]) -> Speeds:
    """The mean of what replicas have measured: one without figures is as fast as the others."""
    told = [one.routing_stats for one in replicas if one.routing_stats]
    token_s = [one["token_s"] for one in told if one["token_s"]]
    answer_s = [one["answer_s"] for one in told if one["answer_s"]]
    return Speeds(
        token_s=sum(token_s) / len(token_s) if token_s else _TOKEN_S,
        answer_s=sum(answer_s) / len(answer_s) if answer_s else _ANSWER_S,
    )


def _order(pending: PendingRequest | None) -> Order | None:
    """The order of a call of `Replica.answer`; None for other calls."""
    given = pending.args[:1] if pending is not None else []
    return given[0] if given and isinstance(given[0], Order) else None


def _num_cached(order: Order, pages: Container[bytes], share_tokens: int) -> int:
    """Tokens of an order's prompt that are in these pages, as far as prompts share them."""
    new = (at for at, key in enumerate(order.keys) if key not in pages)
    num_tokens = next(new, len(order.keys)) * PAGE_POSITIONS
    return num_tokens - num_tokens % share_tokens if share_tokens else 0
