"""Drafts by the model's own layer for them (multi-token prediction), which follows the others.

It has keys and values of its own, in the same pages: row p is of the hidden state at p and of the
token at p + 1. So a row can be computed once that token is chosen; until then the hidden state is
kept. Rows of long prompts are computed with these. Of other tokens, nothing is computed before a
draft is asked for, and the last hidden states alone are kept until then. Rows that were left out so
have no place: those after them follow the ones before, as in StreamingLLM (Xiao et al., arXiv
2309.17453), whose positions are those in the cache, too. Rows that are missing or another text's,
as where a page was shared at its end, only make drafts worse.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from hotcold.actors.driver.drafts import Drafter
from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.modes import step_mode
from hotcold.actors.protocol.failures import NotFiniteError, RequestError
from hotcold.actors.protocol.topology import Topology
from hotcold.model.weights.draft_layer import DraftInputs
from hotcold.numba_kernels.loops.mailbox import DRAFT

if TYPE_CHECKING:
    from hotcold.actors.driver.active_request import ActiveRequest
    from hotcold.actors.driver.batches import Keep


@dataclass
class _Kept:
    """Hidden states (d,) whose rows are still to be computed, of positions from `first` on.

    place: of the first one's row in the cache; before `first` where rows were left out
    """

    first: int = 0
    place: int = 0
    states: list[np.ndarray] = field(default_factory=list)

    def leave_out(self, count: int) -> None:
        """Drop the first so many: they have no rows."""
        del self.states[:count]
        self.first += count

    def go_on(self, count: int) -> None:
        """Drop the first so many, whose rows were computed."""
        self.leave_out(count)
        self.place += count


class DraftEngine(Engine):
    """The engine of the layer that drafts, a model of one layer in services' second weights.

    Shares the exchange with the engine of requests; the two take turns.
    """

    def __init__(self, engine: Engine) -> None:
        """Of the layer that drafts for the model of `engine`."""
        layer = engine.config.draft_layer()
        mode = replace(step_mode(layer, "dense"), weights=DRAFT)
        super().__init__(layer, engine.embedding, engine.exchange, engine.topology, mode)
        self.prepare_matmul = lambda: engine.prepare_matmul()  # that of then

    def use_services(self, topology: Topology) -> None:
        """As `Engine.use_services`, of the parts of `topology` that draft."""
        super().use_services(Topology(tuple(filter(None, (p.drafts for p in topology.parts)))))

    def draft(
        self, inputs: np.ndarray, positions: Sequence[int], slots: Sequence[int], num_logits: int
    ) -> np.ndarray:
        """Run the layer on its inputs (T, d); returns logits of the last `num_logits` of them.

        Of the others only keys and values are computed. `hidden` has the layer's output.
        Errors:  those of `step`
        """
        buffers, num_tokens = self.exchange.buffers, len(inputs)
        with self.times.step(num_tokens):
            if self._multiplies(num_tokens):
                self.prepare_matmul()
            buffers.positions[:num_tokens], buffers.slots[:num_tokens] = positions, slots
            buffers.hidden[:num_tokens] = inputs
            self.run_layer(0, num_tokens, 1, num_logits)
            return self.logits(num_tokens, num_logits)


class LayerDrafter(Drafter):
    """A `Drafter`: the likeliest token by the layer, and again of its output and that token."""

    source = "mtp"

    def __init__(self, engine: DraftEngine, weights: DraftInputs) -> None:
        self.engine, self._weights = engine, weights
        self._kept: MutableMapping[ActiveRequest, _Kept] = WeakKeyDictionary()

    def warm_up(self) -> None:
        """Run one token, so that no request waits for a kernel to be compiled."""
        hidden = np.zeros((1, self.engine.config.hidden_size), np.float32)
        with suppress(NotFiniteError):  # a draft will raise it
            self.engine.draft(self._weights.inputs(hidden, np.zeros(1, np.int64)), [0], [0], 1)

    @property
    def keep(self) -> Keep:
        """As `Drafter.keep`."""
        return self._keep

    def _keep(self, request: ActiveRequest, first: int, hidden: np.ndarray) -> None:
        """Keep hidden states, as many as kernels take; of a prompt's chunk compute the rows."""
        kept, most = self._kept.setdefault(request, _Kept()), self.engine.kernel_tokens
        before = first - kept.first
        if 0 <= before <= len(kept.states):
            del kept.states[before:]
        else:
            kept.first, kept.place, kept.states = first, first, []
        kept.states += [state.copy() for state in hidden]
        if len(hidden) <= most:
            kept.leave_out(max(0, len(kept.states) - most))
            return
        try:
            num_known = len(request.tokens) - 1 - kept.first
            self._compute(request, kept, min(len(kept.states), num_known))
        except RequestError:
            kept.states.clear()

    def propose(self, requests: Sequence[ActiveRequest], counts: Sequence[int]) -> list[list[int]]:
        """As `Drafter.propose`, by as many steps as the most of the counts.

        [] for a request whose last hidden state is not known.
        Errors:  those of `Engine.step`
        """
        drafts: list[list[int]] = [[] for _ in requests]
        found = {i: self._known(request) for i, request in enumerate(requests)}
        known = {i: kept for i, kept in found.items() if kept is not None}
        if sum(len(kept.states) for kept in known.values()) > self.engine.kernel_tokens:
            for i, kept in known.items():
                self._compute(requests[i], kept, len(kept.states) - 1)
        asked: dict[int, _Kept] = {}  # normed, and then guessed
        for i, kept in known.items():
            asked[i] = replace(kept, states=list(self._weights.final(np.stack(kept.states))))
            kept.go_on(len(kept.states))
        for place in range(max(counts, default=0)):
            left = {i: kept for i, kept in asked.items() if place < counts[i]}
            ids = {i: [*requests[i].tokens, *drafts[i]] for i in left}
            # Tokens with logits stand last.
            tokens = [(i, at) for i, kept in left.items() for at in range(len(kept.states) - 1)]
            tokens += [(i, len(kept.states) - 1) for i, kept in left.items()]
            if not tokens:
                break
            states = np.stack([left[i].states[at] for i, at in tokens])
            next_ids = [ids[i][left[i].first + at + 1] for i, at in tokens]
            inputs = self._weights.inputs(states, np.array(next_ids, np.int64))
            places = [left[i].place + at for i, at in tokens]
            slots = [requests[i].slot for i, _ in tokens]
            logits = self.engine.draft(inputs, places, slots, len(left))
            hidden = self.engine.exchange.buffers.hidden[len(tokens) - len(left) : len(tokens)]
            for i, scores, output in zip(left, logits, self._weights.output(hidden), strict=True):
                drafts[i].append(int(scores.argmax()))
                left[i].go_on(len(left[i].states))
                left[i].states.append(output)
        return drafts

    def _known(self, request: ActiveRequest) -> _Kept | None:
        """Hidden states up to that of the last token but one; None where they are not known.

        Those of a draft's tokens that were not chosen are dropped.
        """
        kept = self._kept.get(request)
        if kept is None:
            return None
        num_known = max(0, len(request.tokens) - 1 - kept.first)
        del kept.states[num_known:]
        return kept if 0 < num_known == len(kept.states) else None

    def _compute(self, request: ActiveRequest, kept: _Kept, num_rows: int) -> None:
        """Compute the first rows, whose tokens are known, and drop their hidden states."""
        engine = self.engine
        size = engine.kernel_tokens if num_rows <= 2 * engine.kernel_tokens else engine.max_tokens
        for begin in range(0, num_rows, size):
            states = self._weights.final(np.stack(kept.states[begin : min(begin + size, num_rows)]))
            first, place = kept.first + begin, kept.place + begin
            next_ids = request.tokens[first + 1 : first + 1 + len(states)]
            inputs = self._weights.inputs(states, np.array(next_ids, np.int64))
            places = range(place, place + len(states))
            engine.draft(inputs, places, [request.slot] * len(states), 0)
        kept.go_on(max(0, num_rows))
