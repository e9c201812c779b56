"""How many tokens of drafts a step verifies, and whose: by measured acceptance and cost.

A choice changes how fast answers come, never a token. `AutoPolicy` maximizes the expected tokens a
second of all requests that run; acceptance and costs are decayed means of what happened here. Where
drafts do not pay, or what is known has become old, rare cheap trials are paid from a small account
of time, so that drafts never cost more than a percent or so; where steps are short, looking for
drafts is paid from another one.
"""

import math
from bisect import bisect_left
from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from hotcold.actors.protocol.messages import MOST_DRAFTED

# Sources of drafts. What is known of n-grams is kept by the length of the n-gram, at least so many
# tokens, with the acceptance that is expected before anything is measured.
MODEL = 0
_MODEL_PRIOR = 0.7
_NGRAM_PRIORS = {2: 0.3, 3: 0.4, 4: 0.6, 8: 0.8, 16: 0.9}
_LENGTHS = tuple(_NGRAM_PRIORS)

_PRIOR_TRIALS = 2.0  # that a prior counts for
_REQUEST_DECAY, _SYSTEM_DECAY = 0.95, 0.99  # a draft
_ANCHORS = (1, 2, 3, 5, 9, 17, 32)  # sizes between which costs are on a line
_FRESH_STEPS = 64  # after so many steps the cost of a step without drafts is measured again
_MEASURED_PLAIN = 4  # of so many steps without drafts one is measured
_MOST_SLOWED = 1.5  # of what a step takes: the rest is other programs'
_KEPT_STEPS = 512  # after so many the cost of an anchor is forgotten
_EARNED = 0.01  # of a step's time without drafts, for trials
_LOOK_EARNED = 0.005  # and for looking for drafts
_FIRST_SAVED, _LEAST_SAVED, _MOST_SAVED = 1.0, -1.0, 3.0  # steps; drafts pay from the least on
_MOST_OWED = 2.0  # steps, whatever one draft took
_MOST_LOOKED, _MOST_LOOK = 1.0, 0.1  # steps, for looking in vain: in all, and once
_RISKED = 0.5  # step's time that a draft may cost in vain, however little is saved,
_SURE = 1.1  # unless it is expected to give so many times what steps without drafts give
_TRIED = 2  # tokens of a trial's draft
_LEAST_CHANCE = 0.02  # a token that is accepted less often is not proposed


class Offer(NamedTuple):
    """What a request could verify: at most `most` tokens, and an n-gram's draft where one is."""

    request: Hashable
    most: int
    ngram_tokens: int = 0  # of the draft
    ngram_length: int = 0  # of the n-gram


class Choice(NamedTuple):
    """How many tokens of a draft a request's next step verifies; `source` proposes them."""

    source: int  # MODEL, or the n-gram's length
    size: int


NO_DRAFT = Choice(MODEL, 0)


@dataclass
class StepCost:
    """What a step took, in nanoseconds, and what it gave.

    accept_ns: for choosing the tokens that the step gave
    drafted: of each request, the tokens of its draft, which may be fewer than were chosen
    fates: of each request, how many tokens it got, and how many of the first of them were its
           draft's
    """

    draft_ns: int
    step_ns: int
    accept_ns: int
    drafted: Sequence[int]
    fates: Sequence[tuple[int, int]]


class DraftPolicy(Protocol):
    """Chooses drafts before each step, and learns from it."""

    def looks(self, num: int, most: int) -> bool:
        """Whether to look for drafts of `num` requests at all: else the step is one without."""
        ...

    def choose(self, offers: Sequence[Offer], has_model: bool, most: int) -> list[Choice]:
        """One choice of each offer; their counts add up to `most` at most.

        has_model: whether a model can propose tokens, for any offer
        """
        ...

    def learn(self, offers: Sequence[Offer], choices: Sequence[Choice], cost: StepCost) -> None:
        """Take what the step with these choices took and gave."""
        ...


class FixedPolicy:
    """Always the same number of tokens, of an n-gram where there is one, else of the model."""

    def __init__(self, count: int) -> None:
        self._count = count

    def looks(self, num: int, most: int) -> bool:
        """As `DraftPolicy.looks`."""
        return self._count > 0 and most > 0

    def choose(self, offers: Sequence[Offer], has_model: bool, most: int) -> list[Choice]:
        """As `DraftPolicy.choose`."""
        choices, free = [], most
        for offer in offers:
            count = min(self._count, offer.most, free)
            source = offer.ngram_length
            if source:
                count = min(count, offer.ngram_tokens)
            elif not has_model:
                count = 0
            choices.append(Choice(source, count) if count else NO_DRAFT)
            free -= count
        return choices

    def learn(self, offers: Sequence[Offer], choices: Sequence[Choice], cost: StepCost) -> None:
        """Nothing."""


class Costs:
    """What something takes, by its size, from a few measured sizes.

    A line between anchors, in logarithms, and what measured sizes are beside it: costs may jump
    from a size to the next. Each measurement moves the two anchors beside its size, as an
    exponentially weighted mean, and all others half as much; single slow ones count as 1.5 times at
    most.
    """

    def __init__(self, growth: float) -> None:
        """growth: what one more costs, as a share of the first, where that was never measured."""
        self._growth = growth
        self._level = 0.0
        self._shape: dict[int, float] = {}  # by anchors that were measured: beside the level
        self._counts: dict[int, int] = {}
        self._anchored_at: dict[int, int] = {}  # by anchors
        self._measured_at: dict[int, int] = {}  # by the sizes themselves
        self._num_measured = 0
        self._beside: dict[int, float] = {}  # by size: of the line
        self._found: dict[int, float] = {}  # by size, since the last measurement

    def add(self, size: int, took: float) -> None:
        """Take one measurement."""
        self._num_measured += 1
        if self._num_measured == 1:
            self._level = math.log(max(took, 1e-9)) - self._prior(size)
        error = math.log(max(took, 1e-9)) - self._line(size)
        shares = _anchors(size)
        is_known = all(self._counts.get(anchor, 0) > 2 for anchor in shares)
        if is_known:
            error = min(error, math.log(_MOST_SLOWED))
            self._level += 0.1 * error
        values = {anchor: self._shape_at(anchor) for anchor in shares}
        for anchor, share in shares.items():
            count = self._counts.get(anchor, 0)
            gain = max(0.1, 1 / (1 + count))
            self._shape[anchor] = values[anchor] + gain * share * error
            self._counts[anchor] = count + 1
            self._anchored_at[anchor] = self._num_measured
        self._measured_at[size] = self._num_measured
        self._forget()
        known = self._beside.get(size, 0.0)
        error = math.log(max(took, 1e-9)) - self._line(size) - known
        self._beside[size] = known + 0.1 * min(error, math.log(_MOST_SLOWED))
        self._found.clear()

    def _forget(self) -> None:
        """Forget what was not measured for long: a slow step may have made it."""
        for size in list(self._beside):
            if self._num_measured - self._measured_at[size] > _KEPT_STEPS:
                del self._beside[size]
        oldest = min(self._shape, key=lambda one: self._anchored_at[one])
        if self._num_measured - self._anchored_at[oldest] > _KEPT_STEPS:
            del self._shape[oldest], self._counts[oldest]

    def is_fresh(self, size: int) -> bool:
        """Whether the size was among the last _FRESH_STEPS measured."""
        at = self._measured_at.get(size)
        return at is not None and self._num_measured - at < _FRESH_STEPS

    def of(self, size: int) -> float:
        """What `size` is expected to take; 0 where nothing was measured."""
        if size not in self._found:
            self._found[size] = (
                math.exp(self._line(size) + self._beside.get(size, 0.0)) if self._shape else 0.0
            )
        return self._found[size]

    def _line(self, size: int) -> float:
        shares = _anchors(size)
        return self._level + sum(share * self._shape_at(anchor) for anchor, share in shares.items())

    def _shape_at(self, anchor: int) -> float:
        """An anchor's own, or of the nearest measured one, with what more should cost."""
        if anchor in self._shape:
            return self._shape[anchor]
        if not self._shape:
            return self._prior(anchor)
        nearest = max((one for one in self._shape if one < anchor), default=min(self._shape))
        return self._shape[nearest] + self._prior(anchor) - self._prior(nearest)

    def _prior(self, size: int) -> float:
        return math.log1p(self._growth * (size - 1))


def _anchors(size: int) -> dict[int, float]:
    """The anchors beside a size, each with its share."""
    at = bisect_left(_ANCHORS, size)
    more = _ANCHORS[min(at, len(_ANCHORS) - 1)]
    if more <= size:
        return {more: 1.0}
    less = _ANCHORS[at - 1]
    return {less: (more - size) / (more - less), more: (size - less) / (more - less)}


class Acceptance:
    """How often a draft's token is accepted where all before it were, by its position."""

    def __init__(self, decay: float, prior: "Acceptance | float") -> None:
        """prior: what is expected before anything was seen."""
        self._decay = decay
        self._prior = prior
        self._tried = [0.0] * MOST_DRAFTED
        self._accepted = [0.0] * MOST_DRAFTED
        self._num_added = 0
        self._found: list[float] = []  # chances by place, at so many added here and to the prior
        self._found_at = (-1, -1)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Take a draft's fate."""
        self._num_added += 1
        self._tried = [count * self._decay for count in self._tried]
        self._accepted = [count * self._decay for count in self._accepted]
        for place in range(min(num_drafted, num_accepted + 1)):
            self._tried[place] += 1
            self._accepted[place] += place < num_accepted

    def chance(self, place: int) -> float:
        """Of the token at `place`, given those before it."""
        prior = self._prior
        of_prior = prior._num_added if isinstance(prior, Acceptance) else 0
        if self._found_at != (self._num_added, of_prior):
            self._found_at = self._num_added, of_prior
            self._found = [
                (accepted + _PRIOR_TRIALS * expected) / (tried + _PRIOR_TRIALS)
                for tried, accepted, expected in zip(
                    self._tried, self._accepted, self._expected(), strict=True
                )
            ]
        return self._found[place]

    def _expected(self) -> Iterator[float]:
        """The chance at each place by all but what was tried there."""
        prior = self._prior
        if isinstance(prior, Acceptance):
            yield from map(prior.chance, range(MOST_DRAFTED))
            return
        before, right = 0.0, 0.0  # the places before it say something, too
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            weight = _PRIOR_TRIALS / (_PRIOR_TRIALS + before)
            yield prior * weight + (right / before if before else 0.0) * (1 - weight)
            before, right = before + tried, right + accepted

    def chances(self) -> Iterator[float]:
        """That a draft is accepted up to each position."""
        chance = 1.0
        for place in range(MOST_DRAFTED):
            chance *= self.chance(place)
            yield chance


@dataclass
class _Plan:
    """Choices with the tokens and the time that they are expected to take."""

    choices: list[Choice]
    num_new: float
    took: float

    @property
    def rate(self) -> float:
        return self.num_new / max(self.took, 1e-9)


class AutoPolicy:
    """As many tokens as give the most tokens a second, none where drafts do not pay."""

    def __init__(self) -> None:
        self._steps = Costs(growth=0.15)  # by tokens of the step
        self._rounds = Costs(growth=0.1)  # of a model's draft, by requests: a token of each
        self._accepting = Costs(growth=1.0)  # choosing one token
        priors = {MODEL: _MODEL_PRIOR, **_NGRAM_PRIORS}
        self._of_system = {
            source: Acceptance(_SYSTEM_DECAY, prior) for source, prior in priors.items()
        }
        self._of_requests: MutableMapping[Hashable, dict[int, Acceptance]] = WeakKeyDictionary()
        self._num_plain = 0  # steps without drafts
        self._saved = _FIRST_SAVED  # steps' time that drafts may still cost
        self._looked = _MOST_LOOKED  # and that looking for them in vain may

    def looks(self, num: int, most: int) -> bool:
        """As `DraftPolicy.looks`."""
        return most > 0 and self._looked > 0 and self._may_draft(num)

    def _may_draft(self, num: int) -> bool:
        return self._saved > _LEAST_SAVED and self._steps.is_fresh(num)

    def choose(self, offers: Sequence[Offer], has_model: bool, most: int) -> list[Choice]:
        """As `DraftPolicy.choose`."""
        num, none = len(offers), [NO_DRAFT] * len(offers)
        can_draft = most > 0 and any(
            one.most > 0 and (has_model or one.ngram_length) for one in offers
        )
        if not can_draft or not self._may_draft(num):
            return none
        without = num / self._time_without(num)
        plans = [self._plan(offers, self._sources(offers, False), most)]
        if has_model:
            plans.append(self._plan(offers, self._sources(offers, True), most))
            if any(one.ngram_length for one in offers):
                plans.append(self._plan(offers, [MODEL] * num, most))
        best = max(plans, key=lambda plan: plan.rate)
        if best.rate > without:
            return best.choices
        trial = self._trial(offers, has_model, most)
        return trial.choices if trial is not None and self._loss(trial) <= self._saved else none

    def learn(self, offers: Sequence[Offer], choices: Sequence[Choice], cost: StepCost) -> None:
        """As `DraftPolicy.learn`."""
        num, size = len(offers), len(offers) + sum(cost.drafted)
        by_model = [choice.size for choice in choices if choice.source == MODEL and choice.size]
        if size == num and not by_model:
            self._saved = min(_MOST_SAVED, self._saved + _EARNED)
            looked = min(_MOST_LOOK, cost.draft_ns / max(cost.step_ns, 1))
            self._looked = min(_MOST_LOOKED, self._looked + _LOOK_EARNED - looked)
            self._num_plain += 1
            if self._num_plain % _MEASURED_PLAIN and self._steps.is_fresh(num):
                return  # most steps are such ones, and alike
        num_new = sum(fate[0] for fate in cost.fates)
        self._steps.add(size, cost.step_ns)
        if num_new and cost.accept_ns:
            self._accepting.add(1, cost.accept_ns / num_new)
        if by_model:
            self._rounds.add(len(by_model), cost.draft_ns / max(by_model))
        for offer, choice, drafted, (got, accepted) in zip(
            offers, choices, cost.drafted, cost.fates, strict=True
        ):
            if drafted and got:
                source = _source(choice.source)
                self._acceptance(offer.request, source).add(min(drafted, got), accepted)
                self._of_system[source].add(min(drafted, got), accepted)
        if size > num or by_model:
            plan = _Plan([], num_new, self._charged(cost, num, by_model))
            saved = min(_MOST_SAVED, self._saved - self._loss(plan, num))
            self._saved = max(-_MOST_OWED, saved)

    def _charged(self, cost: StepCost, num: int, by_model: Sequence[int]) -> float:
        """What the step took, each part up to 1.5 times what is expected of it.

        The rest was a pause, of which drafts are not the cause.
        """
        num_new = sum(fate[0] for fate in cost.fates)
        draft_ns = self._steps.of(num)  # of n-grams: an index may be new
        if by_model:
            draft_ns += _MOST_SLOWED * max(by_model) * self._rounds.of(len(by_model))
        return (
            min(cost.step_ns, _MOST_SLOWED * self._steps.of(num + sum(cost.drafted)))
            + min(cost.draft_ns, draft_ns)
            + min(cost.accept_ns, _MOST_SLOWED * num_new * self._accepting.of(1))
        )

    def _sources(self, offers: Sequence[Offer], has_model: bool) -> list[int | None]:
        """N-grams where there are any; elsewhere the model, if there is one."""
        other = MODEL if has_model else None
        return [one.ngram_length or other for one in offers]

    def _plan(self, offers: Sequence[Offer], sources: Sequence[int | None], most: int) -> _Plan:
        """The best counts of tokens from these sources: one by one, the likeliest next."""
        num, accepting = len(offers), self._accepting.of(1)
        gains: list[tuple[float, int]] = []
        for at, (offer, source) in enumerate(zip(offers, sources, strict=True)):
            if source is None:
                continue
            limit = offer.ngram_tokens if source else offer.most
            chances = self._acceptance(offer.request, _source(source)).chances()
            likely = takewhile(lambda chance: chance >= _LEAST_CHANCE, chances)
            gains += [(chance, at) for _, chance in zip(range(limit), likely, strict=False)]
        gains.sort(key=lambda gain: -gain[0])  # stable: a request's own stay in order
        counts, num_new, best = [0] * num, float(num), _Plan([], 0.0, 1.0)
        without = self._time_without(num)
        most_time = (1 + max(self._saved, _RISKED)) * without
        best_counts, num_models, rounds = counts, 0, 0
        for size, (chance, at) in enumerate(gains[:most], num + 1):
            if sources[at] == MODEL:
                num_models += counts[at] == 0
                rounds = max(rounds, counts[at] + 1)
            counts[at] += 1
            num_new += chance
            took = self._steps.of(size) + num_new * accepting
            took += rounds * self._rounds.of(num_models) if rounds else 0
            is_sure = num_new * without > _SURE * num * took
            if took > most_time and not is_sure:  # it may all be in vain
                break
            if num_new * best.took > best.num_new * took:
                best, best_counts = _Plan([], num_new, took), counts.copy()
        best.choices = [
            Choice(source, count) if source is not None and count else NO_DRAFT
            for source, count in zip(sources, best_counts, strict=True)
        ]
        return best

    def _trial(self, offers: Sequence[Offer], has_model: bool, most: int) -> _Plan | None:
        """A short draft of one request, that of the likeliest source."""
        best: tuple[float, int, int] | None = None
        for at, offer in enumerate(offers):
            for source in {offer.ngram_length, MODEL if has_model else offer.ngram_length}:
                limit = min(offer.ngram_tokens if source else offer.most, most)
                if limit < 1 or (source == MODEL and not has_model):
                    continue
                chance = self._acceptance(offer.request, _source(source)).chance(0)
                if best is None or chance > best[0]:
                    best = chance, at, source
        if best is None:
            return None
        chance, at, source = best
        offer = offers[at]
        count = min(_TRIED, offer.ngram_tokens if source else offer.most, most)
        round_ns = 0.0
        if source == MODEL:
            # A round is of fewer bytes than a step: one that took longer may have been a pause.
            round_ns, most_ns = self._rounds.of(1), self._time_without(len(offers))
            if round_ns > most_ns:
                round_ns, count = most_ns, 1
        choices = [NO_DRAFT] * len(offers)
        choices[at] = Choice(source, count)
        took = self._steps.of(len(offers) + count) + len(offers) * self._accepting.of(1)
        took += count * round_ns
        return _Plan(choices, len(offers), took)  # at worst

    def _loss(self, plan: _Plan, num: int | None = None) -> float:
        """What a plan takes beyond as many tokens without drafts, in steps; less than 0: a gain."""
        num = num or len(plan.choices)
        return plan.took / max(self._time_without(num), 1e-9) - plan.num_new / num

    def _time_without(self, num: int) -> float:
        """What a step of so many requests takes without drafts."""
        return self._steps.of(num) + num * self._accepting.of(1)

    def _acceptance(self, request: Hashable, source: int) -> Acceptance:
        of_request = self._of_requests.setdefault(request, {})
        if source not in of_request:
            of_request[source] = Acceptance(_REQUEST_DECAY, self._of_system[source])
        return of_request[source]


def _source(ngram_length: int) -> int:
    """What acceptance is kept by: MODEL, or one of _LENGTHS."""
    return max((length for length in _LENGTHS if length <= ngram_length), default=MODEL)


def draft_policy(speculate: str) -> DraftPolicy:
    """The policy of `--speculate` auto, or of a number. Errors: ValueError for another text."""
    return AutoPolicy() if speculate == "auto" else FixedPolicy(int(speculate))
