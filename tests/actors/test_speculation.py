"""Answers with drafts are those without, to the last bit, whatever is proposed; of mixtures too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.draft_policy import AutoPolicy, DraftPolicy, FixedPolicy
from hotcold.actors.driver.drafts import Drafter, Speculation
from hotcold.actors.driver.driver import Driver
from hotcold.actors.protocol.failures import AnswerFailed, CacheLost, NotFiniteError
from hotcold.actors.protocol.messages import (
    GenerateRequest,
    Grammar,
)
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import SamplingParams
from tests.actors.batching import (
    Answer,
    all_pages_are_free,
    answer,
    answers,
    batching,
    random_request,
    start,
)
from tests.actors.in_process import InProcessSystem
from tests.actors.test_batching import spoil
from tests.draft_layer_models import DraftedModel
from tests.tiny_checkpoint import Tiny, TinyCheckpoint
from tests.tiny_models import VOCAB_SIZE


class NastyDrafter(Drafter):
    """Proposes what it knows to follow, right up to a random place, and any tokens after it.

    known: answers to requests, whose ids those of later ones begin with
    """

    def __init__(
        self,
        seed: int,
        vocab_size: int = VOCAB_SIZE,
        requests: Sequence[GenerateRequest] = (),
        known: Sequence[Answer] = (),
    ) -> None:
        pairs = zip(requests, known, strict=True)
        self.answers = {request.request_id: answer.ids for request, answer in pairs}
        self.tokens: Sequence[int] = range(vocab_size)
        self.num_calls = 0
        self.before_call: Callable[[], None] = lambda: None
        self._random = np.random.default_rng(seed)

    def propose(self, requests: Sequence[ActiveRequest], counts: Sequence[int]) -> list[list[int]]:
        """Drafts of up to so many tokens, a few longer than allowed."""
        self.num_calls += 1
        self.before_call()
        return [self._draft(one, count) for one, count in zip(requests, counts, strict=True)]

    def _draft(self, request: ActiveRequest, count: int) -> list[int]:
        random = self._random
        answer = self.answers.get(request.stream.request_id.split("/")[0], [])
        num_new = len(request.tokens) - request.num_prompt_tokens
        right = answer[num_new : num_new + int(random.integers(count + 1))]
        others = random.choice(self.tokens, count - len(right) + int(random.integers(2))).tolist()
        return right + others


@contextmanager
def drafting(driver: Driver, drafter: Any, policy: DraftPolicy, ngrams: bool) -> Iterator[None]:
    """Let a driver speculate with a drafter of a test."""
    scheduler = driver._scheduler
    made = Speculation(policy, drafter, has_ngrams=ngrams)
    driver._scheduler.between_steps(lambda: setattr(scheduler, "speculation", made))
    try:
        yield
    finally:
        driver._scheduler.between_steps(lambda: setattr(scheduler, "speculation", None))


def varied(seed: int, ids: Sequence[int], **changes: Any) -> GenerateRequest:
    """A request with sampling drawn at random: temperatures, filters, penalties, ends, logprobs."""
    random = np.random.default_rng(seed)
    max_tokens = int(random.integers(1, 40))
    penalized = bool(random.integers(2))
    values: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": int(random.integers(0, max_tokens + 1)) if random.integers(2) else 0,
        "temperature": float(random.choice([0.0, 0.0, 0.3, 1.0, 1.5])),
        "top_k": int(random.choice([0, 5, 40])),
        "top_p": float(random.choice([0.7, 1.0])),
        "min_p": float(random.choice([0.0, 0.1])),
        "seed": seed,
        "repeat_penalty": 1.3 if penalized else 1.0,
        "presence_penalty": float(random.choice([0.0, 0.5])),
        "frequency_penalty": 0.4 if penalized else 0.0,
        "repeat_last_n": int(random.choice([-1, 4, 64])),
        "stop_token_ids": random.choice(ids, 2).tolist() if random.integers(3) == 0 else (),
        "ignore_eos": bool(random.integers(2)),
    }
    return GenerateRequest(
        SamplingParams(**values | changes),
        request_id=f"request {seed}",
        num_logprobs=int(random.integers(4)) if random.integers(2) else None,
        num_prompt_logprobs=1 if random.integers(6) == 0 else None,
    )


def repetitive(seed: int) -> GenerateRequest:
    """A varied request whose prompt repeats itself."""
    random = np.random.default_rng(1000 + seed)
    phrase = random.integers(0, VOCAB_SIZE, int(random.integers(1, 12))).tolist()
    ids = (phrase * 40)[: int(random.integers(1, 88))]
    return replace(varied(seed, ids), prompt_ids=ids)


def beside(requests: Sequence[GenerateRequest], turn: str) -> list[GenerateRequest]:
    return [replace(one, request_id=f"{one.request_id}/{turn}") for one in requests]


POLICIES: dict[str, Callable[[], DraftPolicy]] = {
    "1": lambda: FixedPolicy(1),
    "5": lambda: FixedPolicy(5),
    "16": lambda: FixedPolicy(16),
    "auto": AutoPolicy,
}


@pytest.mark.sweep(variant=["llama-relu", "qwen3.5"])
@pytest.mark.parametrize(
    ("variant", "mode", "options"),
    [
        ("llama-gqa", "lowrank", {}),
        ("llama-relu", "sign", {"copying": True}),
        ("gpt-oss", "dense", {}),
        ("glm4-moe-lite", "dense", {}),
        ("gemma4-e", "dense", {}),
        ("qwen3.5", "dense", {}),
        ("granite4-h", "dense", {}),
    ],
)
def test_answers_do_not_depend_on_drafts(
    tiny: Tiny, variant: str, mode: str, options: dict[str, Any]
) -> None:
    """All at once, with drafts that are right, partly right and wrong, and n-grams beside them."""
    requests = [repetitive(seed) for seed in range(16)]
    with batching(tiny(variant), mode, context=128, **options) as (_, driver):
        alone = [answer(driver, request) for request in requests]
        num_accepted = 0
        for seed, (name, policy) in enumerate(POLICIES.items()):
            drafter = NastyDrafter(seed, requests=requests, known=alone)
            with drafting(driver, drafter, policy(), ngrams=name != "5"):
                assert answers(driver, beside(requests, name)) == alone
                found = answer(driver, beside(requests, f"{name} alone")[4])
                assert found == alone[4]
                drafts = found.result.drafts
                num_accepted += drafts.num_accepted
                counts = [*drafts.by_source.values(), [0, 0]]
                sums = [drafts.num_drafted, drafts.num_accepted]
                assert np.sum(counts, axis=0).tolist() == sums
            assert drafter.num_calls
        assert num_accepted
        assert all_pages_are_free(driver)


def texts() -> list[GenerateRequest]:
    """Requests of the embedded model with stop strings and grammars."""
    schema = (
        '{"type": "object", "properties": {"name": {"type": "string"}, "sizes": {"type": "array", '
        '"items": {"type": "integer"}}}, "required": ["name", "sizes"]}'
    )
    grammars = [
        Grammar("json_schema", schema),
        Grammar("lark", 'start: "Return " /[a-z]{1,8}/ (" and " /[a-z]{1,8}/){2,5} "."'),
    ]
    prompts = ["Return the", "Remove all spaces. Remove all spaces. Remove all", "def f(x):\n    "]
    found = []
    for seed in range(12):
        request = varied(seed, [0], stop_token_ids=(), max_tokens=40, min_tokens=seed % 3)
        stops = [("e", " the"), (".\n",), ()][seed % 3]
        sampling = replace(request.sampling, stop=stops, include_stop_str_in_output=bool(seed % 2))
        grammar = None if seed % 4 else grammars[seed // 4 % 2]
        prompt = prompts[seed % len(prompts)]
        found.append(replace(request, sampling=sampling, grammar=grammar, prompt=prompt))
    return found


def test_stop_strings_and_grammars_do_not_depend_on_drafts() -> None:
    checkpoint = TinyCheckpoint(DEMO_DIRECTORY)
    requests = texts()
    with batching(checkpoint, context=192) as (_, driver):
        alone = [answer(driver, request) for request in requests]
        assert {one.finish_reason for one in alone} == {"stop", "length"}
        drafter = NastyDrafter(3, driver.generator.config.vocab_size, requests, alone)
        for ngrams in (False, True):
            with drafting(driver, drafter, FixedPolicy(6), ngrams):
                assert answers(driver, beside(requests, f"{ngrams}")) == alone


@pytest.mark.parametrize("drafts", [pytest.param("none", marks=pytest.mark.thorough), "any", "mtp"])
def test_preempted_requests_have_the_same_tokens(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: str
) -> None:
    """Answers to the end of the context lack pages; one of them is cancelled meanwhile.

    Drafts preempt nobody: their pages are those that are left over.
    """
    monkeypatch.setattr("hotcold.actors.driver.scheduler._AHEAD", 8)
    requests = [random_request(seed, longest=120) for seed in range(7)]
    endless = [
        replace(one, sampling=replace(one.sampling, max_tokens=None, ignore_eos=True))
        for one in requests
    ]
    model: Any = tiny("llama-gqa")
    options: dict[str, Any] = {}
    if drafts == "mtp":
        model, options = DraftedModel("qwen3.5", tmp_path / "m"), {"draft": "mtp"}
    made = batching(model, context=192, kv_positions=2 * 192, **options)
    with made as (_, driver), ExitStack() as stack:
        alone = [answer(driver, request) for request in endless]
        preempted: list[ActiveRequest] = []
        preempt = driver._scheduler._preempt

        def recorded(request: ActiveRequest) -> None:
            preempted.append(request)
            preempt(request)

        monkeypatch.setattr(driver._scheduler, "_preempt", recorded)
        drafter: Any = driver.drafter
        if drafts == "any":
            drafter = NastyDrafter(4, requests=endless, known=alone)
        if drafts != "none":
            stack.enter_context(drafting(driver, drafter, FixedPolicy(7), ngrams=True))
        running = [start(driver, request) for request in beside(endless, "beside")]
        while not preempted:
            threading.Event().wait(0.001)
        driver.cancel("request 6/beside")
        results = [one.end().ids for one in running]
        assert results[:6] == [one.ids for one in alone[:6]]
        assert results[6] == alone[6].ids[: len(results[6])]
        assert all_pages_are_free(driver)
        assert drafts != "mtp" or drafter.engine.times.num_steps > 50


def attention_arrays_of(system: InProcessSystem) -> Any:
    """Those of the service with attention; its KV cache is float32."""
    service: Any = system.services[0]
    return service.arrays


def test_a_lost_cache_changes_nothing(tiny: Tiny) -> None:
    """It is lost in steps that verify drafts, and while drafts are proposed."""
    requests = [repetitive(seed) for seed in range(8)]
    with batching(tiny("llama-gqa"), context=192) as (system, driver):
        alone = [answer(driver, request) for request in requests]
        drafter = NastyDrafter(5, requests=requests, known=alone)
        engine, random = driver.engine, np.random.default_rng(0)
        step, num_lost = engine.step, 0

        def lose() -> None:
            nonlocal num_lost
            if random.integers(9) == 0:
                num_lost += 1
                arrays = attention_arrays_of(system)
                arrays.keys.items[:] = arrays.values.items[:] = 0  # what a new process has
                raise CacheLost("the gpu service was replaced")

        def losing(*args: Any, **options: Any) -> np.ndarray:
            lose()
            found = step(*args, **options)
            lose()
            return found

        drafter.before_call = lose
        engine.step = losing  # type: ignore[method-assign]
        with drafting(driver, drafter, FixedPolicy(5), ngrams=True):
            assert answers(driver, beside(requests, "beside")) == alone
        assert num_lost > 5


def test_a_draft_that_is_not_finite_is_dropped(tiny: Tiny) -> None:
    """A token without finite numbers ends the request that has it, not one that was offered it."""
    checkpoint = tiny("llama-gqa")
    requests = [repetitive(seed) for seed in range(8)]
    with batching(checkpoint, context=192) as (_, driver):
        alone = [answer(driver, request) for request in requests]
        used = {token for one in requests for token in one.prompt_ids or ()}
        used |= {token for one in alone for token in one.ids}
        bad_id = max(set(range(VOCAB_SIZE)) - used)
        spoil(driver, bad_id)
        drafter = NastyDrafter(6)
        drafter.tokens = [bad_id, 5]
        with drafting(driver, drafter, FixedPolicy(4), ngrams=False):
            greedy = SamplingParams(max_tokens=9, temperature=0.0)
            bad = start(driver, GenerateRequest(greedy, prompt_ids=[3, bad_id], request_id="bad"))
            assert answers(driver, beside(requests, "beside")) == alone
            assert isinstance(bad.end(), NotFiniteError)


def test_a_failure_of_drafts_is_no_request_s(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    """A drafter fails, or a service cannot answer a step that has drafts."""
    requests = [replace(repetitive(seed), num_prompt_logprobs=None) for seed in range(6)]
    with batching(tiny("llama-gqa"), context=192) as (_, driver):
        alone = [answer(driver, request) for request in requests]
        drafter, random = NastyDrafter(2), np.random.default_rng(0)

        def fail() -> None:
            if random.integers(2):
                raise KeyError("no such thing")

        drafter.before_call = fail
        engine = driver.engine
        step, num_failed = engine.step, 0

        def failing(*args: Any, **options: Any) -> np.ndarray:
            nonlocal num_failed
            slots, num_logits = args[2:4] if len(args) > 3 else ((), 0)
            if num_logits > len(set(slots)):  # logits of drafts
                num_failed += 1
                raise AnswerFailed(1, "a neuron cannot be read")
            return step(*args, **options)

        engine.step = failing  # type: ignore[method-assign]
        with drafting(driver, drafter, FixedPolicy(4), ngrams=True):
            assert answers(driver, beside(requests, "beside")) == alone
        assert num_failed and drafter.num_calls
        assert caplog.text.count("drafts failed") == 1
