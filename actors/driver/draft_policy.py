"""How many tokens of drafts a step verifies, and whose: by measured acceptance and measured cost.

A choice changes how fast answers come, never a token. `AutoPolicy` takes what promises the most
tokens a second. One account of time bounds what that may lose: each step adds 0.6% of a step to it,
a draft that gains adds that, and all that drafts cost in vain, looking for them included, is paid
from it. What an empty account cannot pay is not tried, so drafts lose less than 1% of the time.
"""

from collections.abc import Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

MODEL = 0  # a source of drafts; others are n-grams, named by their length

_EARNED = 0.006  # of a step, by each step
_FIRST_SAVED, _MOST_SAVED = 0.3, 3.0  # steps
_MOST_OWED = 1.0  # steps: what one draft took beyond that was a pause
_LEAST_GAIN = 1.03  # times the rate without drafts, or measurements' noise decides
_TRIED = 2  # tokens of a draft where none pays, to see whether one does by now
_FRESH_STEPS = 64  # after so many steps one without drafts is measured again
_MEASURED_PLAIN = 8  # of so many steps without drafts one is measured
_FORGOTTEN_AFTER = 512  # measurements: a pause may have made a cost
_GAIN, _STALE_GAIN = 0.1, 0.4  # of one measurement in a mean, and of one after long
_MOST_SLOWED = 1.5  # times its mean one counts at most
_GROWTH = 0.15  # of a step, by one more token, where that was never measured
_PRIOR_TOKENS = 2.0  # that what is expected of a request counts for


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


class Fate(NamedTuple):
    """What became of a request's draft: tokens of all three.

    num_drafted: of the draft, which may be fewer than were chosen
    num_got: that the step gave the request; num_accepted: the first of them, which the draft had
    """

    num_drafted: int
    num_got: int
    num_accepted: int


@dataclass
class StepCost:
    """What a step took, in nanoseconds, and what it gave each request.

    accept_ns: for choosing the tokens that the step gave
    """

    draft_ns: int
    step_ns: int
    accept_ns: int
    fates: Sequence[Fate]


class DraftPolicy(Protocol):
    """Chooses drafts before each step, and may learn from it."""

    def looks(self, num: int, most: int, has_model: bool) -> bool:
        """Whether to look for drafts of `num` requests at all: else the step is one without."""
        ...

    def choose(self, offers: Sequence[Offer], has_model: bool, most: int) -> list[Choice]:
        """One choice of each offer; their counts add up to `most` at most.

        has_model: whether a model can propose tokens, for any offer
        """
        ...

    def learn(self, offers: Sequence[Offer], choices: Sequence[Choice], cost: StepCost) -> None:
        """Take what the step with these choices took and gave."""
        return

    def learn_plain(self, num: int, step_ns: int, accept_ns: int) -> None:
        """Take what a step of `num` requests took for which nothing was looked for."""
        return


class FixedPolicy(DraftPolicy):
    """Always the same number of tokens, of an n-gram where there is one, else of the model."""

    def __init__(self, count: int) -> None:
        self._count = count

    def looks(self, num: int, most: int, has_model: bool) -> bool:
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


class Costs:
    """What something takes by its size: decayed means of measured sizes, and lines between them.

    What one size takes beyond its mean moves the others half as much. A slow measurement counts as
    1.5 times its mean at most: the rest is other programs'.
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._measured: dict[int, tuple[int, int]] = {}  # by size: how often, and when last
        self._now = 0

    def add(self, size: int, took: float) -> None:
        """Take one measurement."""
        count, _ = self._measured.get(size, (0, 0))
        gain = max(_GAIN if self.is_fresh(size) else _STALE_GAIN, 1 / (count + 1))
        self._now += 1
        if expected := self.of(size):
            took = min(took, _MOST_SLOWED * expected)
            if count > 2:
                moved = 1 + _GAIN / 2 * (took / expected - 1)
                self._means = {other: mean * moved for other, mean in self._means.items()}
        mean = self._means.get(size, took)
        self._means[size] = mean + gain * (took - mean)
        self._measured[size] = count + 1, self._now
        oldest = min(self._measured, key=lambda one: self._measured[one][1])
        if self._now - self._measured[oldest][1] > _FORGOTTEN_AFTER:
            del self._measured[oldest], self._means[oldest]

    def is_fresh(self, size: int) -> bool:
        """Whether the size was among the last _FRESH_STEPS measured."""
        count, last = self._measured.get(size, (0, 0))
        return count > 0 and self._now - last < _FRESH_STEPS

    def of(self, size: int) -> float:
        """What `size` is expected to take; 0 where nothing was measured."""
        if size in self._means or not self._means:
            return self._means.get(size, 0.0)
        less = max((one for one in self._means if one < size), default=0)
        more = min((one for one in self._means if one > size), default=0)
        if less and more:
            share = (size - less) / (more - less)
            return self._means[less] * (1 - share) + self._means[more] * share
        near = less or more
        return self._means[near] * (1 + _GROWTH * (size - 1)) / (1 + _GROWTH * (near - 1))


class Acceptance:
    """How often a draft's token is accepted where all before it were."""

    def __init__(self, decay: float, expected: "Acceptance | float") -> None:
        """decay: of what was seen, at each draft; expected: before anything was."""
        self._decay, self._expected = decay, expected
        self._tried = self._accepted = 0.0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Take a draft's fate."""
        self._tried = self._tried * self._decay + min(num_drafted, num_accepted + 1)
        self._accepted = self._accepted * self._decay + num_accepted

    @property
    def chance(self) -> float:
        """Of one token."""
        expected = self._expected
        prior = expected.chance if isinstance(expected, Acceptance) else expected
        return (self._accepted + _PRIOR_TOKENS * prior) / (self._tried + _PRIOR_TOKENS)

    def chances(self) -> Iterator[float]:
        """That a draft is accepted up to each of its tokens."""
        chance = one = self.chance
        while True:
            yield chance
            chance *= one


class _Plan(NamedTuple):
    """Choices with the tokens that they promise, and the time that they take; steps' time."""

    choices: list[Choice]
    num_new: float
    took: float


class AutoPolicy:
    """As many tokens as give the most tokens a second, none where drafts do not pay."""

    def __init__(self) -> None:
        self._steps = Costs()  # by tokens of the step
        self._rounds = Costs()  # of a model's draft, by requests: a token of each
        self._accepting = Costs()  # choosing one token
        self._looking = Costs()  # by requests
        self._of_system: dict[int, Acceptance] = {}  # by kind of source
        self._of_requests: MutableMapping[Hashable, dict[int, Acceptance]] = WeakKeyDictionary()
        self._num_plain = 0  # steps for which nothing was looked for
        self._saved = _FIRST_SAVED  # the account: steps' time that may be lost

    def looks(self, num: int, most: int, has_model: bool) -> bool:
        """As `DraftPolicy.looks`: where the account could pay for a trial."""
        if most < 1 or self._saved <= 0 or not self._steps.is_fresh(num):
            return False
        needed_ns = self._looking.of(num) + self._steps.of(num + 1) - self._steps.of(num)
        plain_ns = self._plain_ns(num)
        needed_ns += min(self._rounds.of(1), plain_ns) if has_model else 0
        return self._saved * plain_ns >= min(needed_ns, plain_ns)

    def choose(self, offers: Sequence[Offer], has_model: bool, most: int) -> list[Choice]:
        """As `DraftPolicy.choose`."""
        num, none = len(offers), [NO_DRAFT] * len(offers)
        if most < 1 or self._saved <= 0 or not self._steps.is_fresh(num):
            return none
        ngrams = [one.ngram_length or None for one in offers]
        sources = [ngrams]
        if has_model:
            sources += [[one or MODEL for one in ngrams], [MODEL] * num]
        plans = [self._plan(offers, one, most) for one in sources]
        best = max(plans, key=lambda plan: plan.num_new / plan.took)
        if best.num_new > _LEAST_GAIN * num * best.took:
            return best.choices
        return self._trial(offers, has_model, most) or none

    def learn(self, offers: Sequence[Offer], choices: Sequence[Choice], cost: StepCost) -> None:
        """As `DraftPolicy.learn`."""
        num, size = len(offers), len(offers) + sum(fate.num_drafted for fate in cost.fates)
        by_model = [choice.size for choice in choices if choice.source == MODEL and choice.size]
        num_new = sum(fate.num_got for fate in cost.fates)
        self._measure(size, cost.step_ns, cost.accept_ns, num_new)
        if by_model:
            self._rounds.add(len(by_model), cost.draft_ns / max(by_model))
        else:
            self._looking.add(num, cost.draft_ns)
        for offer, choice, (drafted, got, accepted) in zip(
            offers, choices, cost.fates, strict=True
        ):
            if drafted and got:
                of_request, of_system = self._acceptances(offer.request, choice.source)
                of_request.add(min(drafted, got), accepted)
                of_system.add(min(drafted, got), accepted)
        took_ns = cost.draft_ns + self._step_ns(num, size) + num_new * self._accepting.of(1)
        saved = self._saved + _EARNED + num_new / num - took_ns / self._plain_ns(num)
        self._saved = max(-_MOST_OWED, min(_MOST_SAVED, saved))

    def learn_plain(self, num: int, step_ns: int, accept_ns: int) -> None:
        """As `DraftPolicy.learn_plain`; most steps are such ones, and alike."""
        self._saved = min(_MOST_SAVED, self._saved + _EARNED)
        self._num_plain += 1
        if self._num_plain % _MEASURED_PLAIN == 0 or not self._steps.is_fresh(num):
            self._measure(num, step_ns, accept_ns, num)

    def _measure(self, size: int, step_ns: int, accept_ns: int, num_new: int) -> None:
        self._steps.add(size, step_ns)
        if num_new and accept_ns:
            self._accepting.add(1, accept_ns / num_new)

    def _plain_ns(self, num: int) -> float:
        """What a step of so many requests takes without drafts."""
        return max(1.0, self._steps.of(num) + num * self._accepting.of(1))

    def _step_ns(self, num: int, size: int) -> float:
        """What a step of `num` requests with drafts takes: no less than one without."""
        return max(self._steps.of(size), self._steps.of(num))

    def _took(
        self, num: int, size: int, num_new: float, num_models: int = 0, rounds: int = 0
    ) -> float:
        """What a step with a draft takes, beside one without: `rounds` of a model's own."""
        took_ns = self._step_ns(num, size) + num_new * self._accepting.of(1)
        if rounds:
            took_ns += rounds * (self._rounds.of(num_models) or self._plain_ns(num))
        else:
            took_ns += self._looking.of(num)
        return took_ns / self._plain_ns(num)

    def _plan(self, offers: Sequence[Offer], sources: Sequence[int | None], most: int) -> _Plan:
        """The best counts of tokens from these sources: one by one, the likeliest next.

        In vain it takes no more than is in the account.
        """
        num = len(offers)
        gains: list[tuple[float, int]] = []
        for at, (offer, source) in enumerate(zip(offers, sources, strict=True)):
            if source is not None:
                limit = min(_room(offer, source), most)
                chances = self._acceptances(offer.request, source)[0].chances()
                gains += [(chance, at) for chance in islice(chances, limit)]
        gains.sort(key=lambda gain: -gain[0])  # stable: a request's own stay in order
        counts, num_new = [0] * num, float(num)
        best_counts, best_new, best_took = counts.copy(), num_new, 1.0
        num_models = rounds = 0
        for size, (chance, at) in enumerate(gains[:most], num + 1):
            if sources[at] == MODEL:
                num_models += counts[at] == 0
                rounds = max(rounds, counts[at] + 1)
            counts[at] += 1
            num_new += chance
            if self._took(num, size, num, num_models, rounds) - 1 > self._saved:
                break
            took = self._took(num, size, num_new, num_models, rounds)
            if num_new * best_took > best_new * took:
                best_counts, best_new, best_took = counts.copy(), num_new, took
        choices = [
            Choice(source, count) if source is not None and count else NO_DRAFT
            for source, count in zip(sources, best_counts, strict=True)
        ]
        return _Plan(choices, best_new, best_took)

    def _trial(self, offers: Sequence[Offer], has_model: bool, most: int) -> list[Choice] | None:
        """A short draft of one request, that of the likeliest source, if the account can pay it."""
        found = [
            (self._acceptances(offer.request, source)[0].chance, at, source)
            for at, offer in enumerate(offers)
            for source in {offer.ngram_length or MODEL, MODEL}
            if (source != MODEL or has_model) and _room(offer, source) > 0
        ]
        if not found:
            return None
        _, at, source = max(found)
        num, count = len(offers), min(_TRIED, _room(offers[at], source), most)
        took = self._took(num, num + count, num)
        if source == MODEL:
            # A round is of fewer bytes than a step: one that took longer may have been a pause.
            round_steps = self._rounds.of(1) / self._plain_ns(num)
            count = count if round_steps < 1 else 1
            took += count * min(round_steps, 1)
        choices = [NO_DRAFT] * num
        choices[at] = Choice(source, count)
        return choices if took - 1 <= self._saved else None

    def _acceptances(self, request: Hashable, source: int) -> tuple[Acceptance, Acceptance]:
        """Of a request and of all, by the model or by n-grams of about that length."""
        kind = source.bit_length()
        if kind not in self._of_system:
            least = 1 << kind >> 1  # tokens of such n-grams
            self._of_system[kind] = Acceptance(0.99, least / (least + 3) if least else 0.7)
        of_system = self._of_system[kind]
        own = self._of_requests.setdefault(request, {})
        if kind not in own:
            own[kind] = Acceptance(0.95, of_system)
        return own[kind], of_system


def _room(offer: Offer, source: int) -> int:
    """Tokens that a request may have of a source."""
    return min(offer.ngram_tokens, offer.most) if source else offer.most


def draft_policy(speculate: str) -> DraftPolicy:
    """The policy of `--speculate` auto, or of a number. Errors: ValueError for another text."""
    return AutoPolicy() if speculate == "auto" else FixedPolicy(int(speculate))
