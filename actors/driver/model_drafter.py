"""Drafts by the model itself, in fewer bits or with the neurons that predictors choose.

A draft's steps use the KV cache that the model has filled, so there is no prompt to read again.
What they write there, the verifying step writes again.
"""

from collections.abc import Sequence
from contextlib import suppress

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.step_mode import StepMode
from hotcold.actors.protocol.failures import NotFiniteError
from hotcold.actors.telemetry.step_times import StepTimes


class ModelDrafter:
    """A `Drafter`: the likeliest token of a cheaper step, and again of the step after it.

    times: of all its steps, which are not among the engine's
    """

    def __init__(self, engine: Engine, mode: StepMode) -> None:
        """`mode` is of the steps that draft."""
        self._engine = engine
        self.mode = mode
        self.times = StepTimes()

    def warm_up(self) -> None:
        """Run one token, so that no request waits for a kernel to be compiled."""
        with suppress(NotFiniteError):  # a draft will raise it
            self._engine.step([0], [0], [0], mode=self.mode)

    def propose(self, requests: Sequence[ActiveRequest], counts: Sequence[int]) -> list[list[int]]:
        """counts[i] ids that may follow `requests[i].tokens`, by as many steps as the most of them.

        Errors:  those of `Engine.step`
        """
        engine, own_times = self._engine, self._engine.times
        engine.times = self.times
        try:
            return self._propose(requests, counts)
        finally:
            engine.times = own_times

    def _propose(self, requests: Sequence[ActiveRequest], counts: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in requests]
        for place in range(max(counts, default=0)):
            left = [i for i, count in enumerate(counts) if place < count]
            ids = [drafts[i][-1] if place else requests[i].tokens[-1] for i in left]
            positions = [len(requests[i].tokens) - 1 + place for i in left]
            slots = [requests[i].slot for i in left]
            logits = self._engine.step(ids, positions, slots, len(left), self.mode)
            for i, token_id in zip(left, logits.argmax(axis=1).tolist(), strict=True):
                drafts[i].append(token_id)
        return drafts
