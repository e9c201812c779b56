"""One step of kernels over the next tokens of several requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.driver.active_request import ActiveRequest
from actors.driver.engine import Engine


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

        Those of one that embeds are (0,).
        Tokens whose logits are wanted stand last: the head is computed for the last ones of a step.
        Errors:  ServiceError, RequestError
        """
        silent: list[tuple[int, int, int]] = []
        wanted: list[tuple[int, int, int]] = []
        takers: list[tuple[ActiveRequest, int]] = []
        embedded: list[tuple[ActiveRequest, int, int]] = []  # with place and row
        for request, count in zip(self.requests, self.counts, strict=True):
            for place in range(request.num_done, request.num_done + count):
                token = (request.tokens[place], place, request.slot)
                if request.wants_logits(place):
                    takers.append((request, place))
                    wanted.append(token)
                else:
                    if request.embeds:
                        embedded.append((request, place, len(silent)))
                    silent.append(token)
        token_ids, positions, slots = zip(*silent, *wanted, strict=True)
        logits = engine.step(token_ids, positions, slots, len(wanted))
        for request, count in zip(self.requests, self.counts, strict=True):
            request.num_done += count
        for request, place, row in embedded:
            request.embed(place, engine.exchange.wires.hidden[row])
        ends = [
            (request, logits[:0].reshape(-1))
            for request in self.requests
            if request.embeds and request.num_left == 0
        ]
        for (request, place), scores in zip(takers, logits, strict=True):
            if place == len(request.tokens) - 1:
                ends.append((request, scores))
            else:
                request.score(place, scores)
        return ends
