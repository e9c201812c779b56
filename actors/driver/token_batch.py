"""One step of kernels over the next tokens of several requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.driver.active_request import Run
from actors.driver.engine import Engine


@dataclass(frozen=True)
class Batch:
    """Who stands in a step, with how many tokens each."""

    runs: list[Run]
    counts: list[int]

    @classmethod
    def of(cls, runs: Sequence[Run], most_tokens: int, most_logits: int) -> "Batch":
        """One token of each run, and while there is room more of the first ones' prompts.

        Of a prompt that is scored every token takes one of the `most_logits` rows of logits, of
        another run one token at most.
        """
        counts, room, logit_room = [], most_tokens - len(runs), most_logits - len(runs)
        for run in runs:
            more = min(run.num_left - 1, room, logit_room if run.is_scored else room)
            counts.append(1 + more)
            room -= more
            logit_room -= more if run.is_scored else 0
        return cls(list(runs), counts)

    def step(self, engine: Engine) -> list[tuple[Run, np.ndarray]]:
        """Run the step; the runs that have come to their last token, each with its logits (V,).

        Tokens whose logits are wanted stand last: the head is computed for the last ones of a step.
        Errors:  ServiceError, RequestError
        """
        silent: list[tuple[int, int, int]] = []
        wanted: list[tuple[int, int, int]] = []
        takers: list[tuple[Run, int]] = []
        for run, count in zip(self.runs, self.counts, strict=True):
            for place in range(run.num_done, run.num_done + count):
                token = (run.tokens[place], place, run.slot)
                if run.wants_logits(place):
                    takers.append((run, place))
                    wanted.append(token)
                else:
                    silent.append(token)
        token_ids, positions, slots = zip(*silent, *wanted, strict=True)
        logits = engine.step(token_ids, positions, slots, len(wanted))
        for run, count in zip(self.runs, self.counts, strict=True):
            run.num_done += count
        ends = []
        for (run, place), row in zip(takers, logits, strict=True):
            if place == len(run.tokens) - 1:
                ends.append((run, row))
            else:
                run.score(place, row)
        return ends
