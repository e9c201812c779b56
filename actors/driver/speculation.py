"""Drafts for a step, and what became of them: n-grams, a drafter and a policy put together."""

import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.batches import Batch
from hotcold.actors.driver.draft_policy import (
    MODEL,
    Choice,
    DraftPolicy,
    Offer,
    StepCost,
    draft_policy,
)
from hotcold.actors.driver.drafts import Drafter
from hotcold.actors.driver.ngrams import Match, Ngrams
from hotcold.actors.protocol.failures import NotFiniteError, RequestError
from hotcold.actors.protocol.messages import MOST_DRAFTED


class Speculation:
    """Proposes tokens for the scheduler's steps. It decides speed alone, never a token."""

    def __init__(
        self,
        policy: DraftPolicy,
        drafter: Drafter | None = None,
        has_ngrams: bool = True,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`drafter` proposes where the policy wants a model's draft; `clock` is in nanoseconds."""
        self._policy = policy
        self._drafter = drafter
        self._ngrams = Ngrams() if has_ngrams else None
        self._clock = clock
        self._offers: list[Offer] = []  # of the step that was prepared last; []: without drafts
        self._choices: list[Choice] = []
        self._before: list[tuple[ActiveRequest, int]] = []  # requests, each with its tokens
        self._drafts: list[list[int]] = []
        self._draft_ns = 0

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
        Errors:  ServiceError
        """
        started = self._clock()
        self._offers, requests = [], batch.requests
        if any(request.num_left != 1 or request.embeds for request in requests):
            return batch  # prompts take the room
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
        self._before = [(request, len(request.tokens)) for request in requests]
        self._drafts = self._proposed(requests, self._choices, matches)
        self._draft_ns = self._clock() - started
        return batch.with_drafts(self._drafts)

    def learn(self, step_ns: int, accept_ns: int) -> None:
        """Take what the prepared step took, and choosing the tokens that its requests got."""
        if not self._offers:
            return
        fates = [
            _fate(request.tokens[num_before:], draft)
            for (request, num_before), draft in zip(self._before, self._drafts, strict=True)
        ]
        drafted = [len(draft) for draft in self._drafts]
        cost = StepCost(self._draft_ns, step_ns, accept_ns, drafted, fates)
        self._policy.learn(self._offers, self._choices, cost)

    def _match(self, request: ActiveRequest) -> Match | None:
        if self._ngrams is None:
            return None
        count = min(request.most_drafted, MOST_DRAFTED)
        match = self._ngrams.find(request, request.tokens, count)
        if match is None:
            return None
        ids = request.useful(match.ids)
        return Match(ids, match.length) if ids else None

    def _proposed(
        self,
        requests: Sequence[ActiveRequest],
        choices: Sequence[Choice],
        matches: Sequence[Match | None],
    ) -> list[list[int]]:
        """The drafts of these choices; [] where nothing can be proposed."""
        drafts: list[list[int]] = [
            match.ids[: choice.size] if match is not None and choice.source != MODEL else []
            for choice, match in zip(choices, matches, strict=True)
        ]
        asked = [at for at, one in enumerate(choices) if one.source == MODEL and one.size]
        if self._drafter is None or not asked:
            return drafts
        counts = [choices[at].size for at in asked]
        try:
            found = self._drafter.propose([requests[at] for at in asked], counts)
        except (NotFiniteError, RequestError):
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
