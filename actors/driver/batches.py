"""What the engine runs at once: next tokens of several requests, or a chunk of a long prompt."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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


class PromptChunk:
    """One chunk of a request's prompt, layer by layer; other steps may run between two layers."""

    def __init__(self, engine: Engine, request: ActiveRequest, before: int = 0) -> None:
        """The chunk of `request.chunk_sizes` with `before` others before it."""
        self.request = request
        self._engine = engine
        self._first = request.num_done + sum(request.chunk_sizes[:before])
        self._size = request.chunk_sizes[before]
        self._saved: list[np.ndarray] | None = None
        self.next_layer = 0

    def pause(self, num_tokens: int) -> None:
        """Save what another step of `num_tokens` would overwrite."""
        if self.next_layer > 0 and self._saved is None:
            self._saved = [rows.copy() for rows in self._shared_rows(num_tokens)]

    def run_layer(self, following: int, keep: Keep | None = None) -> np.ndarray | None:
        """Run one more layer; after the last one the prompt's logits (V,), if it ends here.

        `keep` then gets the hidden states of all its tokens.

        `request.chunk_sizes` then loses this chunk, the first, and `request.num_done` counts it.
        The engine will run layer `following` next.
        Errors:  ServiceError, RequestError
        """
        engine, request = self._engine, self.request
        first, last = self._first, self._first + self._size
        if self.next_layer == 0:
            engine.place(
                request.tokens[first:last], range(first, last), [request.slot] * self._size
            )
        elif self._saved is not None:
            for rows, saved in zip(self._shared_rows(self._size), self._saved, strict=True):
                rows[: len(saved)] = saved
            self._saved = None
        num_wanted = None if keep is not None else int(self._ends_prompt)
        engine.run_layer(self.next_layer, self._size, following, num_wanted)
        self.next_layer += 1
        if not self.is_done:
            return None
        request.num_done = last
        del request.chunk_sizes[0]
        logits = engine.logits(self._size, 1)[0] if request.num_left == 0 else None
        if keep is not None:
            keep(request, first, engine.exchange.buffers.hidden[: self._size])
        return logits

    @property
    def _ends_prompt(self) -> bool:
        """Whether logits are wanted: of the last token."""
        return self._first + self._size == len(self.request.tokens)

    @property
    def is_done(self) -> bool:
        """Whether all layers have been run."""
        return self.next_layer == self._engine.config.num_layers

    def _shared_rows(self, num_tokens: int) -> list[np.ndarray]:
        buffers = self._engine.exchange.buffers
        num_rows = min(self._size, num_tokens)
        names = ["hidden", "embedded", "layer_embeddings", "positions", "slots"]
        names += ["ffn_residual"] if self._engine.config.has_ffn_pairs else []
        return [getattr(buffers, name)[:num_rows] for name in names]


class PromptChunks:
    """The next chunks of a request's prompt, `engine.chunks_at_once` of them side by side.

    A layer is run for each of them before the next layer, so neurons that have to be read for it
    are read once. Each chunk is computed as it is alone.
    """

    def __init__(self, engine: Engine, request: ActiveRequest) -> None:
        self.request = request
        self._engine = engine
        count = min(engine.chunks_at_once, len(request.chunk_sizes))
        self._chunks = [PromptChunk(engine, request, i) for i in range(count)]
        self._turn = 0

    def pause(self) -> None:
        """Save what a step of kernels would overwrite."""
        self._chunks[self._turn].pause(self._engine.kernel_tokens)

    def run_layer(self, keep: Keep | None = None) -> np.ndarray | None:
        """Run one more layer of one chunk; as `PromptChunk.run_layer`."""
        chunk = self._chunks[self._turn]
        is_last = self._turn + 1 == len(self._chunks)
        logits = chunk.run_layer(chunk.next_layer + is_last, keep)
        if len(self._chunks) > 1 and not chunk.is_done:
            chunk.pause(self._engine.max_tokens)
        self._turn = 0 if is_last else self._turn + 1
        return logits

    @property
    def is_done(self) -> bool:
        """Whether all layers of all of them have been run."""
        return self._chunks[-1].is_done


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
