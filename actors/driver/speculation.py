"""Drafts for a step, and what became of them: n-grams, a drafter and a policy put together."""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.batches import Batch
from hotcold.actors.driver.draft_policy import (
    MODEL,
    NO_DRAFT,
    Choice,
    DraftPolicy,
    Offer,
    StepCost,
    draft_policy,
)
from hotcold.actors.driver.drafts import Drafter
from hotcold.actors.driver.ngrams import Match, Ngrams
from hotcold.actors.protocol.failures import RequestError, first_line
from hotcold.actors.protocol.messages import MOST_DRAFTED
from hotcold.model.errors import ServiceError

_log = logging.getLogger(__name__)


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
        self._before: list[tuple[ActiveRequest, int]] = []  # requests, each with its tokens
        self._drafts: list[list[int]] = []
        self._draft_ns = 0
        self._has_failed = False

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
            self._offers = []
            self._note(error)
            return batch

    def _drafted(
        self, batch: Batch, most: int, reserve: Callable[[ActiveRequest, int], int]
    ) -> Batch:
        started = time.monotonic_ns()
        self._offers, requests = [], batch.requests
        if any(request.num_left != 1 or request.embeds for request in requests):
            return batch  # prompts take the room
        self._before = [(request, len(request.tokens)) for request in requests]
        if not self._policy.looks(len(requests), most):
            self._offers = [Offer(request, 0) for request in requests]
            self._choices = [NO_DRAFT] * len(requests)
            self._drafts = [[] for _ in requests]
            self._draft_ns = time.monotonic_ns() - started
            return batch
        matches = [self._match(request) for request in requests]
        self._offers = [
            Offer(
                request,
                max(0, min(request.most_drafted, MOST_DRAFTED)),
                len(match.ids) if match else 0,
                match.length if match else 0,
            )
            for request, match in zip(requests, matches, strict=True)
        ]
        choices = self._policy.choose(self._offers, self._drafter is not None, most)
        self._choices = [
            choice._replace(size=reserve(request, choice.size)) if choice.size else choice
            for request, choice in zip(requests, choices, strict=True)
        ]
        self._drafts = self._proposed(requests, self._choices, matches)
        self._draft_ns = time.monotonic_ns() - started
        return batch.with_drafts(self._drafts)

    def learn(self, step_ns: int, accept_ns: int) -> None:
        """Take what the prepared step took, and choosing the tokens that its requests got."""
        if not self._offers:
            return
        try:
            self._learn(step_ns, accept_ns)
        except Exception as error:  # what requests got is theirs all the same
            self._note(error)

    def _learn(self, step_ns: int, accept_ns: int) -> None:
        fates = [
            _fate(request.tokens[num_before:], draft)
            for (request, num_before), draft in zip(self._before, self._drafts, strict=True)
        ]
        drafted = [len(draft) for draft in self._drafts]
        cost = StepCost(self._draft_ns, step_ns, accept_ns, drafted, fates)
        self._policy.learn(self._offers, self._choices, cost)

    def _note(self, error: Exception) -> None:
        """Write the first such error to the log."""
        if not self._has_failed:
            _log.warning("drafts failed, answers go on without them: %s", first_line(error))
        self._has_failed = True

    def _match(self, request: ActiveRequest) -> Match | None:
        if self._ngrams is None:
            return None
        count = min(request.most_drafted, MOST_DRAFTED)
        return self._ngrams.find(request, request.tokens, count)

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


def _fate(got: list[int], draft: list[int]) -> tuple[int, int]:
    """How many tokens a request got, and how many of the first of them were its draft's."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(got, draft, strict=False))
    return len(got), sum(1 for _ in same)


def speculation(speculate: str, drafter: Drafter | None = None) -> Speculation | None:
    """What `--speculate` says; None for "off"."""
    return None if speculate == "off" else Speculation(draft_policy(speculate), drafter)
