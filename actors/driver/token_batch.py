"""One step of kernels over the next tokens of several requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.engine import Engine

NO_LOGITS = np.empty(0, np.float32)


@dataclass(frozen=True)
class Batch:
    """Who is in a step, with how many tokens each."""

    requests: list[ActiveRequest]
    counts: list[int]

    @classmethod
    def of(cls, requests: Sequence[ActiveRequest], most_tokens: int, most_logits: int) -> "Batch":
        """One token of each request, and while there is room more of the first ones' prompts.

        Of a prompt that is scored every token takes one of the `most_logits` rows of logits, of
        another request one token at most.
        """
        counts, room, logit_room = [], most_tokens - len(requests), most_logits - len(requests)
        for request in requests:
            more = min(request.num_left - 1, room, logit_room if request.is_scored else room)
            counts.append(1 + more)
            room -= more
            logit_room -= more if request.is_scored else 0
        return cls(list(requests), counts)

    def step(self, engine: Engine) -> list[tuple[ActiveRequest, np.ndarray]]:
        """Run the step; the requests that have come to their last token, each with its logits (V,).

        Those of one that embeds are NO_LOGITS.
        Tokens whose logits are wanted stand last: the head is computed for the last ones of a step.
        Errors:  ServiceError, RequestError
        """
        silent: list[tuple[ActiveRequest, int]] = []  # tokens by whose they are, and their places
        heard: list[tuple[ActiveRequest, int]] = []
        for request, count in zip(self.requests, self.counts, strict=True):
            for place in range(request.num_done, request.num_done + count):
                (heard if request.wants_logits(place) else silent).append((request, place))
        tokens = [(one.tokens[place], place, one.slot) for one, place in (*silent, *heard)]
        token_ids, positions, slots = zip(*tokens, strict=True)
        logits = engine.step(token_ids, positions, slots, len(heard))
        for request, count in zip(self.requests, self.counts, strict=True):
            request.num_done += count
        embedding = [request for request in self.requests if request.embeds]
        if embedding:
            hidden = engine.exchange.buffers.hidden
            for row, (request, place) in enumerate(silent):
                if request.embeds:
                    request.embed(place, hidden[row])
        ends = [(one, NO_LOGITS) for one in embedding if not one.num_left]
        for (request, place), scores in zip(heard, logits, strict=True):
            if place == len(request.tokens) - 1:
                ends.append((request, scores))
            else:
                request.score(place, scores)
        return ends
