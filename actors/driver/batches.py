"""What the engine runs at once: next tokens of several requests, or a chunk of a long prompt."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.engine import Engine

# Takes a request's hidden states from a place on: `Drafter.keep`.
Keep = Callable[[ActiveRequest, int, np.ndarray], None]


class StepEnd(NamedTuple):
    """A request that came to its last token in a step.

    rows: logits (V,) after that token and after each of the draft's; [] where it embeds
    """

    request: ActiveRequest
    rows: list[np.ndarray]
    draft: list[int]


@dataclass(frozen=True)
class Batch:
    """The requests of one step of kernels, with counts[i] tokens of requests[i].

    drafts: for each request the tokens that may follow its last one, computed in the same step
    """

    requests: list[ActiveRequest]
    counts: list[int]
    drafts: list[list[int]] = field(default_factory=list)  # [] for no drafts at all

    @classmethod
    def of(cls, requests: Sequence[ActiveRequest], max_tokens: int, max_logits: int) -> "Batch":
        """One token of each request, and more of the first ones' prompts up to `max_tokens`.

        Every token of a scored prompt takes one of the `max_logits` rows of logits; any other
        request takes one row at most.
        """
        counts, free, free_logits = [], max_tokens - len(requests), max_logits - len(requests)
        for request in requests:
            more = min(request.num_left - 1, free, free_logits if request.is_scored else free)
            counts.append(1 + more)
            free -= more
            free_logits -= more if request.is_scored else 0
        return cls(list(requests), counts)

    def with_drafts(self, drafts: list[list[int]]) -> "Batch":
        """The same batch with a draft of each request, [] for none."""
        return replace(self, drafts=drafts if any(drafts) else [])

    def step(self, engine: Engine, keep: Keep | None = None) -> list[StepEnd]:
        """Run the step; returns the requests that came to their last token.

        `keep` gets the hidden states of all tokens of each request.

        Tokens whose logits are wanted stand last, because the head is computed for the last tokens
        of a step. Rows of logits are overwritten by the next step.
        Errors:  ServiceError, RequestError
        """
        drafts = self.drafts or [[]] * len(self.requests)
        without: list[tuple[ActiveRequest, int, int]] = []  # tokens: request, place, id
        with_logits: list[tuple[ActiveRequest, int, int]] = []
        for request, count, draft in zip(self.requests, self.counts, drafts, strict=True):
            first = request.num_done
            ids = request.tokens[first : first + count] + draft
            for place, token_id in enumerate(ids, first):
                kind = with_logits if request.wants_logits(place) else without
                kind.append((request, place, token_id))
        tokens = [(token_id, at, one.slot) for one, at, token_id in (*without, *with_logits)]
        token_ids, positions, slots = zip(*tokens, strict=True)
        logits = engine.step(token_ids, positions, slots, len(with_logits))
        for request, count in zip(self.requests, self.counts, strict=True):
            request.num_done += count
        embedding = [request for request in self.requests if request.embeds]
        if embedding:
            hidden = engine.exchange.buffers.hidden
            for row, (request, place, _) in enumerate(without):
                if request.embeds:
                    request.embed(place, hidden[row])
        if keep is not None:
            self._keep([*without, *with_logits], engine.exchange.buffers.hidden, keep)
        ends = {
            request: StepEnd(request, [], draft)
            for request, draft in zip(self.requests, drafts, strict=True)
            if not request.num_left
        }
        for (request, place, _), scores in zip(with_logits, logits, strict=True):
            if place >= len(request.tokens) - 1:
                ends[request].rows.append(scores)
            else:
                request.score(place, scores)
        return list(ends.values())

    def _keep(
        self, tokens: Sequence[tuple[ActiveRequest, int, int]], hidden: np.ndarray, keep: Keep
    ) -> None:
        rows: dict[ActiveRequest, list[int]] = {request: [] for request in self.requests}
        for row, (request, *_) in enumerate(tokens):
            rows[request].append(row)  # places ascend
        for request, own in rows.items():
            keep(request, tokens[own[0]][1], hidden[own])


class PromptChunks:
    """The next chunks of a request's prompt, `engine.chunks_at_once` of them side by side.

    A layer is run for each of them before the next layer, so neurons that have to be read for it
    are read once. Each chunk is computed as it is alone; other steps may run between two layers.
    """

    def __init__(self, engine: Engine, request: ActiveRequest) -> None:
        self.request = request
        self._engine = engine
        sizes = request.chunk_sizes[: engine.chunks_at_once]
        self._spans = list(pairwise(accumulate(sizes, initial=request.num_done)))
        self._saved: list[list[np.ndarray]] = [[] for _ in sizes]  # of paused chunks
        self._layer = self._turn = 0  # what is run next: which layer, of which chunk

    @property
    def is_done(self) -> bool:
        """Whether all layers of all of them have been run."""
        return self._layer == self._engine.config.num_layers

    def pause(self) -> None:
        """Save what a step of kernels would overwrite."""
        if self._layer > 0 and not self._saved[self._turn]:
            self._save(self._engine.kernel_tokens)

    def run_layer(self, keep: Keep | None = None) -> np.ndarray | None:
        """Run one more layer of one chunk; after the prompt's last one its logits (V,).

        With its last layer a chunk leaves `request.chunk_sizes`, `request.num_done` counts it, and
        `keep` gets the hidden states of all its tokens.
        Errors:  ServiceError, RequestError
        """
        engine, request, layer = self._engine, self.request, self._layer
        first, last = self._spans[self._turn]
        size, is_last = last - first, self._turn + 1 == len(self._spans)
        if layer == 0:
            engine.place(request.tokens[first:last], range(first, last), [request.slot] * size)
        saved, self._saved[self._turn] = self._saved[self._turn], []
        for rows, own in zip(self._shared_rows(), saved, strict=False):
            rows[: len(own)] = own
        ends_prompt = last == len(request.tokens)
        num_wanted = None if keep is not None else int(ends_prompt)
        engine.run_layer(layer, size, layer + is_last, num_wanted)
        logits = None
        if layer + 1 == engine.config.num_layers:
            request.num_done = last
            del request.chunk_sizes[0]
            logits = engine.logits(size, 1)[0] if ends_prompt else None
            if keep is not None:
                keep(request, first, engine.exchange.buffers.hidden[:size])
        elif len(self._spans) > 1:
            self._save(engine.max_tokens)
        self._turn, self._layer = (0, layer + 1) if is_last else (self._turn + 1, layer)
        return logits

    def _save(self, num_tokens: int) -> None:
        """Save what another step of `num_tokens` would overwrite of the chunk whose turn it is."""
        first, last = self._spans[self._turn]
        count = min(last - first, num_tokens)
        self._saved[self._turn] = [rows[:count].copy() for rows in self._shared_rows()]

    def _shared_rows(self) -> list[np.ndarray]:
        names = ["hidden", "embedded", "layer_embeddings", "positions", "slots"]
        names += ["ffn_residual"] if self._engine.config.has_ffn_pairs else []
        return [getattr(self._engine.exchange.buffers, name) for name in names]


class Turns:
    """Gives a long prompt and the other requests half of the time each while both need some."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """`clock` returns nanoseconds."""
        self._clock = clock
        self._lead_ns = 0  # of the prompt, since both have wanted time
        self._has_prompt = False

    def is_prompts(self, has_prompt: bool, has_others: bool) -> bool:
        """Whether a layer of the prompt is next, or else a step of the others."""
        self._has_prompt = has_prompt
        if not (has_prompt and has_others):
            self._lead_ns = 0
            return has_prompt
        return self._lead_ns <= 0

    @contextmanager
    def timed(self, is_prompts: bool) -> Iterator[None]:
        """Count the time that one of them takes."""
        started = self._clock()
        yield
        took_ns = self._clock() - started
        if is_prompts:  # alone too: those that come meanwhile have waited for it
            self._lead_ns += took_ns
        elif self._has_prompt:
            self._lead_ns -= took_ns
