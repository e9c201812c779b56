"""One step of kernels over the next tokens of several requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.engine import Engine
from actors.generation import Run


@dataclass(frozen=True)
class Batch:
    """Who stands in a step, with how many tokens each."""

    runs: list[Run]
    counts: list[int]

    @classmethod
    def of(cls, runs: Sequence[Run], most_tokens: int) -> "Batch":
        """One token of each run, and while there is room more of the first ones' prompts."""
        counts, room = [], most_tokens - len(runs)
        for run in runs:
            more = min(run.num_left - 1, room)
            counts.append(1 + more)
            room -= more
        return cls(list(runs), counts)

    def step(self, engine: Engine) -> list[tuple[Run, np.ndarray]]:
        """Run the step; the runs that have come to their last token, each with its logits (V,).

        Tokens whose logits are wanted stand last: the head is computed for the last ones of a step.
        Errors:  ServiceError, RequestError
        """
        silent: list[tuple[int, int, int]] = []
        wanted: list[tuple[int, int, int]] = []
        ends: list[Run] = []
        for run, count in zip(self.runs, self.counts, strict=True):
            places = range(run.num_done, run.num_done + count)
            tokens = [(run.tokens[place], place, run.slot) for place in places]
            if count == run.num_left:
                ends.append(run)
                wanted.append(tokens.pop())
            silent += tokens
        token_ids, positions, slots = zip(*silent, *wanted, strict=True)
        logits = engine.step(token_ids, positions, slots, len(wanted))
        for run, count in zip(self.runs, self.counts, strict=True):
            run.num_done += count
        return list(zip(ends, logits, strict=True))
