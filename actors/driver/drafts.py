"""Drafts: tokens that may follow a request's, proposed cheaply and verified by the model.

A draft is never part of `request.tokens`. The step that verifies it computes the last token and the
draft's at once, and keeps those that the request itself would have chosen; so drafts change how
fast an answer comes, and nothing else. N-grams of the text propose, or the model itself in fewer
bits or with the neurons that predictors choose; `draft_policy` says how many tokens, and of which.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.batches import Batch, Keep
from hotcold.actors.driver.draft_policy import (
    MODEL,
    Choice,
    DraftPolicy,
    Fate,
    Offer,
    StepCost,
    draft_policy,
)
from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.modes import StepMode
from hotcold.actors.driver.ngrams import Match, Ngrams
from hotcold.actors.protocol.failures import NotFiniteError, RequestError, first_line
from hotcold.actors.protocol.messages import MOST_DRAFTED
from hotcold.model.errors import ServiceError

_log = logging.getLogger(__name__)


class Drafter(Protocol):
    """Proposes tokens, in the engine's thread, between two steps."""

    source: str = "model"  # as drafts are counted by it

    def propose(self, requests: Sequence[ActiveRequest], counts: Sequence[int]) -> list[list[int]]:
        """At most counts[i] ids (>= 1) that may follow `requests[i].tokens`; [] for no draft.

        Of each request all tokens but the last one are in the KV cache, and its slot has pages for
        len(tokens) + counts[i] positions. A drafter may write rows of the KV cache at positions
        >= num_done: the step that follows writes them again. It leaves tokens and `num_done` alone.
        Errors:  those of `Engine.step`
        """
        ...

    @property
    def keep(self) -> Keep | None:
        """Takes the hidden states (T, d) after the last layer of a step's tokens, if it reads them.

        Of one request, from a place on. It leaves logits as they are, `hidden` it need not.
        """
        return None


class ModelDrafter(Drafter):
    """A `Drafter`: the likeliest token of a cheaper step, and again of the step after it.

    Its steps use the KV cache that the model has filled, so there is no prompt to read again. What
    they write there, the verifying step writes again.
    """

    def __init__(self, engine: Engine, mode: StepMode) -> None:
        """`mode` is of the steps that draft."""
        self._engine = engine
        self.mode = mode

    def warm_up(self) -> None:
        """Run one token, so that no request waits for a kernel to be compiled."""
        with suppress(NotFiniteError):  # a draft will raise it
            self._engine.step([0], [0], [0], mode=self.mode)

    def propose(self, requests: Sequence[ActiveRequest], counts: Sequence[int]) -> list[list[int]]:
        """counts[i] ids that may follow `requests[i].tokens`, by as many steps as the most of them.

        Errors:  those of `Engine.step`
        """
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


class Speculation:
    """Proposes tokens for the scheduler's steps. It decides speed alone, never a token."""

    def __init__(
        self,
        policy: DraftPolicy,
        drafter: Drafter | None = None,
        has_ngrams: bool = True,
    ) -> None:
        """`drafter` proposes where the policy wants a model's draft."""
        self._policy = policy
        self._drafter = drafter
        self._ngrams = Ngrams() if has_ngrams else None
        self._offers: list[Offer] = []  # of the step that was prepared last; []: without drafts
        self._choices: list[Choice] = []
        self._num_plain = 0  # its requests, where nothing was looked for
        self._draft_ns = 0
        self._has_failed = False

    @property
    def keep(self) -> Keep | None:
        """`Drafter.keep` of the drafter, where that reads hidden states."""
        return None if self._drafter is None else self._drafter.keep

    @property
    def draft_ns(self) -> int:
        """What the drafts of the prepared step took."""
        return self._draft_ns if self._offers else 0

    def drafted(
        self, batch: Batch, most: int, reserve: Callable[[ActiveRequest, int], int]
    ) -> Batch:
        """The batch with drafts, of `most` tokens in all at most.

        reserve: of (request, count), allocates pages for a draft of `count` tokens where they are
                 free; returns for how many tokens there are pages
        Errors:  ServiceError; after any other, which is no request's, there are no drafts
        """
        try:
            return self._drafted(batch, most, reserve)
        except ServiceError:
            raise
        except Exception as error:
            self._offers, self._num_plain = [], 0
            self._note(error)
            return batch

    def _drafted(
        self, batch: Batch, most: int, reserve: Callable[[ActiveRequest, int], int]
    ) -> Batch:
        self._offers, self._num_plain, requests = [], 0, batch.requests
        if any(request.num_left != 1 or request.embeds for request in requests):
            return batch  # prompts take the room
        if not self._policy.looks(len(requests), most, self._drafter is not None):
            self._num_plain = len(requests)
            return batch
        started = time.monotonic_ns()
        rooms = [max(0, min(request.most_drafted, MOST_DRAFTED)) for request in requests]
        matches = [
            None if self._ngrams is None else self._ngrams.find(request, request.tokens, room)
            for request, room in zip(requests, rooms, strict=True)
        ]
        self._offers = [
            Offer(request, room, len(match.ids) if match else 0, match.length if match else 0)
            for request, room, match in zip(requests, rooms, matches, strict=True)
        ]
        choices = self._policy.choose(self._offers, self._drafter is not None, most)
        self._choices = [
            choice._replace(size=reserve(request, choice.size)) if choice.size else choice
            for request, choice in zip(requests, choices, strict=True)
        ]
        by_model = "" if self._drafter is None else self._drafter.source
        for request, choice in zip(requests, self._choices, strict=True):
            request.draft_source = by_model if choice.source == MODEL else "ngram"
        drafts = self._proposed(requests, self._choices, matches)
        self._draft_ns = time.monotonic_ns() - started
        return batch.with_drafts(drafts)

    def learn(self, step_ns: int, accept_ns: int, fates: Sequence[Fate]) -> None:
        """Take what the prepared step took and gave, as of `StepCost`."""
        try:
            if self._num_plain:
                self._policy.learn_plain(self._num_plain, step_ns, accept_ns)
            elif self._offers:
                cost = StepCost(self._draft_ns, step_ns, accept_ns, fates)
                self._policy.learn(self._offers, self._choices, cost)
        except Exception as error:  # what requests got is theirs all the same
            self._note(error)

    def _note(self, error: Exception) -> None:
        """Write the first such error to the log."""
        if not self._has_failed:
            _log.warning("drafts failed, answers go on without them: %s", first_line(error))
        self._has_failed = True

    def _proposed(
        self,
        requests: Sequence[ActiveRequest],
        choices: Sequence[Choice],
        matches: Sequence[Match | None],
    ) -> list[list[int]]:
        """The drafts of these choices; [] where nothing can be proposed."""
        drafts: list[list[int]] = [
            request.useful(match.ids[: choice.size])
            if match is not None and choice.source != MODEL and choice.size
            else []
            for request, choice, match in zip(requests, choices, matches, strict=True)
        ]
        asked = [at for at, one in enumerate(choices) if one.source == MODEL and one.size]
        if self._drafter is None or not asked:
            return drafts
        counts = [choices[at].size for at in asked]
        try:
            found = self._drafter.propose([requests[at] for at in asked], counts)
        except RequestError:
            return drafts  # the model's own step says what is wrong, if anything is
        for at, count, ids in zip(asked, counts, found, strict=True):
            drafts[at] = requests[at].useful(ids[:count])
        return drafts


def speculation(speculate: str, drafter: Drafter | None = None) -> Speculation | None:
    """What `--speculate` says; None for "off"."""
    return None if speculate == "off" else Speculation(draft_policy(speculate), drafter)
