"""Prompts that begin alike are computed once, and answered as if each were the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.driver import Driver
from hotcold.actors.protocol.failures import (
    CacheLost,
    NotFiniteError,
)
from hotcold.actors.protocol.kv_pool import Page
from hotcold.actors.protocol.messages import GenerateRequest, TokenLogprob
from hotcold.model.sampling import SamplingParams
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS as PAGE
from tests.actors.batching import CONTEXT, Background, batching
from tests.actors.changing_services import config_of, driver_of
from tests.actors.cuda_in_process import CudaInProcess, a_third
from tests.actors.in_process import InProcessSystem
from tests.actors.kept_system import wait_until
from tests.actors.stand_in_ray import StandInRay, lose_once, stand_in_system
from tests.conftest import TinyCheckpoint
from tests.tiny_models import VOCAB_SIZE

Tiny = Callable[..., TinyCheckpoint]
Answer = tuple[list[int], list[TokenLogprob], int]  # the last: cached tokens

_IDS = np.random.default_rng(5).integers(0, VOCAB_SIZE, CONTEXT).tolist()
_EDITED = [*_IDS[:150], (_IDS[150] + 1) % VOCAB_SIZE, *_IDS[151:]]
# Of one text, whole and edited: of other lengths, which end in a page or fill it.
_PROMPTS = [_IDS[:300], _IDS[:64], _IDS[:65], _IDS[:128], _IDS[:170], _EDITED[:230], _IDS[:340]]
# Of each, in turn, what those before it have left: less than the whole prompt.
_CACHED = [0, 0, 64, 64, 128, 128, 256]


def request_of(ids: Sequence[int], **changes: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=9, temperature=0.8, seed=len(ids), ignore_eos=True)
    return replace(GenerateRequest(sampling, prompt_ids=list(ids), num_logprobs=2), **changes)


def answer(driver: Driver, request: GenerateRequest) -> Answer:
    logprobs: list[TokenLogprob] = []
    for event in driver.generate(request):
        logprobs += event.logprobs
        if event.result is not None:
            return event.result.ids, logprobs, event.result.num_cached_tokens
    raise AssertionError("no result")


def cold(tiny: TinyCheckpoint, requests: Sequence[GenerateRequest], **options: Any) -> list[Answer]:
    """Each alone, of a system that shares nothing."""
    with batching(tiny, **options) as (_, driver):
        found = [answer(driver, request) for request in requests]
    assert not any(cached for *_, cached in found)
    return found


def same(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    assert [one[:2] for one in found] == [one[:2] for one in expected]


def at_once(driver: Driver, requests: Sequence[GenerateRequest]) -> list[Answer]:
    """Answers to requests that are all there before the first begins."""
    running: list[Background] = []

    def ask() -> None:
        for request in requests:
            num_waiting = driver.load().num_waiting
            running.append(Background(partial(answer, driver, request)))
            wait_until(lambda num=num_waiting: driver.load().num_waiting > num)  # type: ignore[misc]

    driver.between_requests(ask)
    return [one.end() for one in running]


# Variant, mode, and options of the system.
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("llama-gqa", "float16", "exact", {"kv_dtype": "float16", "max_tokens": 200}),
    ("llama-gqa", "float32", "exact", {"kv_dtype": "q8", "max_tokens": 200}),
    ("llama-relu", "bfloat16", "sign", {}),
    ("llama-silu", "bfloat16", "threshold", {}),
    ("falcon-bias", "bfloat16", "dense", {"max_tokens": 200}),
    ("gemma3", "float32", "exact", {}),
    ("olmo2", "bfloat16", "exact", {}),
]


@pytest.mark.parametrize(("variant", "dtype", "mode", "options"), CASES)
def test_cold_is_cached(
    tiny: Tiny, variant: str, dtype: str, mode: str, options: dict[str, Any]
) -> None:
    """Alone and in batches, to the last bit of each log-probability, however chunks are cut."""
    requests = [request_of(ids) for ids in _PROMPTS]
    checkpoint = tiny(variant, dtype)
    expected = cold(checkpoint, requests, mode=mode, **options)
    with batching(checkpoint, mode, shares=True, **options) as (_, driver):
        found = [answer(driver, request) for request in requests]
        same(found, expected)
        assert [cached for *_, cached in found] == _CACHED
        found = at_once(driver, requests)
        same(found, expected)
        lengths = [len(request.prompt_ids or ()) for request in requests]
        assert [cached for *_, cached in found] == [(size - 1) // PAGE * PAGE for size in lengths]
        assert all_are_free(driver)


@pytest.mark.usefixtures("one_torch_thread")
def test_a_gpu_shares_whole_chunks(tiny: Tiny) -> None:
    """Its products depend on a chunk's size, so each prompt is cut at the same places.

    One after another: the stand-in's products of a step depend on the step's size, too.
    """
    requests = [request_of(ids) for ids in _PROMPTS]
    checkpoint = tiny("llama-gqa")
    options: dict[str, Any] = {"kind": partial(CudaInProcess, hot=a_third)}
    options["max_tokens"] = max_tokens = 128
    expected = cold(checkpoint, requests, **options)
    with batching(checkpoint, shares=True, **options) as (_, driver):
        assert driver.engine.cut_tokens == max_tokens
        found = [answer(driver, request) for request in requests]
        same(found, expected)
        assert [cached for *_, cached in found] == [n // max_tokens * max_tokens for n in _CACHED]


def all_are_free(driver: Driver) -> bool:
    driver.between_requests(lambda: None)  # when the last one has left
    return driver._pool.num_free_pages.tolist() == driver._pool.num_pages.tolist()


def test_the_second_finds_what_the_first_has_computed_meanwhile(tiny: Tiny) -> None:
    """Of eight requests with one beginning, all of which wait before the first begins."""
    requests = [request_of([*_IDS[:200], n]) for n in range(8)]
    checkpoint = tiny("llama-gqa", "bfloat16")
    expected = cold(checkpoint, requests)
    with batching(checkpoint, shares=True) as (_, driver):
        placed: list[int] = []
        place = driver.engine.place

        def noted(token_ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> None:
            placed.extend(position for position in positions if position < 192)
            place(token_ids, positions, slots)

        driver.engine.place = noted  # type: ignore[method-assign]
        found = at_once(driver, requests)
        assert sorted(placed) == list(range(192))
    same(found, expected)
    assert [cached for *_, cached in found] == [0] + [192] * 7


def test_a_small_pool_gives_up_what_was_used_least_recently(tiny: Tiny) -> None:
    """Pages for one context: what others need is computed again, and never what is in use."""
    others = [[(token + n) % VOCAB_SIZE for token in _IDS] for n in range(1, 4)]
    prompts = [ids[:length] for length in (300, 200, 90) for ids in (_IDS, *others)]
    requests = [request_of(ids) for ids in prompts]
    checkpoint = tiny("llama-gqa", "bfloat16")
    expected = cold(checkpoint, requests)
    with batching(checkpoint, shares=True, kv_positions=CONTEXT) as (_, driver):
        pool, random = driver._pool, np.random.default_rng(1)
        assert pool.num_pages == CONTEXT // PAGE
        same([answer(driver, request) for request in requests], expected)
        for _ in range(3):
            order = random.permutation(len(requests)).tolist()
            found = at_once(driver, [requests[number] for number in order])
            same(found, [expected[number] for number in order])
        assert all_are_free(driver)
        first, *rest = (requests[0], *requests[1:4])
        for request in (first, rest[0], first):
            *_, cached = answer(driver, request)
        assert cached < 256  # the other one had needed some of its pages
        *_, cached = answer(driver, first)
        assert cached == 256


# --- who shares --------------------------------------------------------------------------------


def test_salts_are_apart_and_some_share_nothing(tiny: Tiny) -> None:
    with batching(tiny("llama-gqa", "bfloat16"), shares=True) as (_, driver):

        def cached(**changes: Any) -> int:
            return answer(driver, request_of(_IDS[:200], **changes))[2]

        assert cached(use_cache=False) == 0
        assert cached() == 0  # nor was it kept
        assert cached(use_cache=False) == 0
        assert cached(num_prompt_logprobs=0) == 0
        assert cached(wants_embedding=True) == 0
        assert cached(cache_salt="a") == 0
        assert cached(cache_salt="b") == 0
        assert [cached(cache_salt=salt) for salt in ("", "a", "b")] == [192] * 3


# --- what goes wrong ---------------------------------------------------------------------------


def test_a_lost_cache_is_found_no_more(tiny: Tiny) -> None:
    """While some share pages: each is computed anew, and answers stay."""
    requests = [request_of([*_IDS[:200], n]) for n in range(4)]
    late = request_of(_EDITED[:290])
    checkpoint = tiny("llama-gqa", "bfloat16")
    expected = cold(checkpoint, [*requests, late])
    with batching(checkpoint, shares=True) as (system, driver):
        same([answer(driver, requests[0])], expected[:1])
        run_layer, num_layers = driver.engine.run_layer, 0

        def losing(
            layer: int, num_tokens: int, next_layer: int, num_wanted: int | None = None
        ) -> None:
            nonlocal num_layers
            num_layers += 1
            if num_layers == 8:
                lose_cache(system)
                raise CacheLost("a test lost it")
            run_layer(layer, num_tokens, next_layer, num_wanted)

        driver.engine.run_layer = losing  # type: ignore[method-assign]
        found = at_once(driver, [*requests, late])
        assert num_layers > 8
        assert all_are_free(driver)
        same(found, expected)
        same([answer(driver, request) for request in (*requests, late)], expected)


def lose_cache(system: InProcessSystem) -> None:
    arrays = system.services[0].arrays  # type: ignore[attr-defined]
    for cache in (arrays.keys, arrays.values):
        cache[:] = np.nan if cache.dtype == np.float32 else 0x7E00


def test_a_prompt_of_too_large_numbers_fails_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on with what they have, and find it later; no service is replaced."""
    unused = next(token for token in range(VOCAB_SIZE) if token not in _IDS)
    requests = [request_of(_IDS[n : 200 + n]) for n in range(3)]
    bad = request_of([*_IDS[:260], unused])
    checkpoint = tiny("llama-gqa", "bfloat16")
    expected = cold(checkpoint, requests)
    store = DictStore()
    with batching(checkpoint, shares=True, store=store) as (system, driver):
        store.system = system
        same([answer(driver, requests[0])], expected[:1])
        engine, replaced = driver.engine, list[int]()
        buffers, run_layers = engine.exchange.buffers, engine._run_layers
        row = engine.embedding.lookup(np.array([unused]), np.array([0]))[0].copy()

        def overflowing(layers: range, num_tokens: int, *rest: Any, **options: Any) -> None:
            """An output of the first layer is too large wherever the token is."""
            if 0 in layers:
                found = (buffers.hidden[:num_tokens] == row).all(axis=1)
                if found.any():
                    slots = frozenset(buffers.slots[:num_tokens][found].tolist())
                    raise NotFiniteError("in layer 0", slots, 1)
            run_layers(layers, num_tokens, *rest, **options)

        monkeypatch.setattr(engine, "_run_layers", overflowing)
        monkeypatch.setattr(
            engine.exchange, "try_replace", lambda service, cause: replaced.append(service)
        )
        for _ in range(2):
            running = [
                Background(partial(answer, driver, one)) for one in (requests[1], bad, requests[2])
            ]
            outcomes: list[Any] = [one.end() for one in running]
            assert isinstance(outcomes.pop(1), NotFiniteError)
            same(outcomes, expected[1:])
            again = answer(driver, requests[0])
            same([again], expected[:1])
            assert again[2] == 192
        assert not replaced and not store.dropped
        assert all_are_free(driver)


def test_after_a_service_made_a_nan_all_that_runs_is_computed_anew(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had a part in before may be wrong, too, though finite."""
    requests = [request_of(_IDS[n : 200 + n]) for n in range(3)]
    checkpoint = tiny("llama-gqa", "bfloat16")
    expected = cold(checkpoint, requests)
    store = DictStore()
    with batching(checkpoint, shares=True, store=store) as (system, driver):
        store.system = system
        answer(driver, request_of(_EDITED[:100]))
        assert wait_until(lambda: len(store.kept) == 1)
        kept = set(store.kept)
        replaced, num_layers, run_layer = list[int](), 0, driver.engine.run_layer

        def spoiled(
            layer: int, num_tokens: int, next_layer: int, num_wanted: int | None = None
        ) -> None:
            nonlocal num_layers
            num_layers += 1
            if num_layers == 4:
                raise NotFiniteError("in a test", frozenset({0}), 1)
            run_layer(layer, num_tokens, next_layer, num_wanted)

        def replace_it(service: int, cause: str) -> bool:
            replaced.append(service)
            lose_cache(system)
            return True

        monkeypatch.setattr(driver.engine, "run_layer", spoiled)
        monkeypatch.setattr(driver.engine.exchange, "try_replace", replace_it)
        found = at_once(driver, requests)
        same(found, expected)
        assert replaced == [1]
        assert kept <= store.dropped  # of the file, too


def test_a_job_takes_the_pages_that_it_needs(tiny: Tiny) -> None:
    request = request_of(_IDS[:300])
    checkpoint = tiny("llama-gqa", "bfloat16")
    expected = cold(checkpoint, [request])
    with batching(checkpoint, shares=True, kv_positions=CONTEXT) as (_, driver):
        answer(driver, request)
        driver.score_window(_EDITED[:200], 5, False)  # writes into pages of slot 0
        found = answer(driver, request)
        same([found], expected)
        assert found[2] == 0
        driver.between_requests(lambda: None, has_slot=False)
        assert answer(driver, request)[2] > 0  # nothing was given up for it


# --- a store beside memory ---------------------------------------------------------------------


class DictStore:
    """A `PageStore` in a dict; it writes a page some calls after it was asked to."""

    def __init__(self, kept: dict[bytes, np.ndarray] | None = None, delay: int = 3) -> None:
        self.kept = {} if kept is None else kept
        self.system: InProcessSystem | None = None
        self.torn: set[bytes] = set()
        self.dropped: set[bytes] = set()
        self.loads: list[int] = []
        self._delay = delay
        self._writing: list[tuple[int, bytes, Page, bytes]] = []
        self.identities: list[bytes] = []

    def _page(self, page: Page) -> list[np.ndarray]:
        assert self.system is not None
        arrays = self.system.services[0].arrays  # type: ignore[attr-defined]
        pages = [page[layer.attention.window > 0] for layer in self.system.config.layers]
        rows = (arrays.keys, arrays.values)
        return [of_layer[at] for array in rows for of_layer, at in zip(array, pages, strict=True)]

    def reopen(self, identity: bytes, anew: bool = False) -> bool:
        self.identities.append(identity)
        self._writing.clear()
        if anew:
            self.dropped |= set(self.kept)
            self.kept.clear()
        return True

    def keys(self) -> set[bytes]:
        return set(self.kept)

    def save(self, key: bytes, page: Page) -> None:
        content = np.stack(self._page(page)).tobytes()
        self._writing.append((self._delay, key, page, content))

    def saved(self) -> list[bytes]:
        done = [one for one in self._writing if one[0] == 0]
        later = [one for one in self._writing if one[0] > 0]
        self._writing = [(left - 1, key, page, content) for left, key, page, content in later]
        for _, key, page, content in done:
            now = np.stack(self._page(page))
            assert now.tobytes() == content  # nobody has written there meanwhile
            self.kept[key] = now
        return [key for _, key, _, _ in done]

    def load(self, keys: Sequence[bytes], pages: Sequence[Page]) -> int:
        self.loads.append(len(keys))
        for number, (key, page) in enumerate(zip(keys, pages, strict=True)):
            for target, source in zip(self._page(page), self.kept[key], strict=True):
                target[:] = source
            if key in self.torn:
                for key in keys[number:]:
                    del self.kept[key]
                self._page(page)[0][:] = 0  # half of what was to be there
                return number
        return len(keys)


# --- services that change or are lost ----------------------------------------------------------


def test_other_services_find_nothing_of_earlier_ones(
    copied: TinyCheckpoint, host: StandInRay
) -> None:
    """A sum has another order then; a service that replaces a lost one computes the same."""
    request = request_of(_IDS[:200])
    fresh = {}
    for count in (1, 2):
        config = config_of(copied.path, num_cpu_actors=count, prefix_cache_bytes=0)
        with stand_in_system(host, config) as system:
            fresh[count] = answer(driver_of(system), request)
    with stand_in_system(host, config_of(copied.path)) as system:

        def cached(count: int) -> int:
            found = answer(driver_of(system), request)
            same([found], [fresh[count]])
            return found[2]

        assert [cached(1), cached(1)] == [0, 192]
        system.actor.scale(2)
        assert [cached(2), cached(2)] == [0, 192]
        lose_once(host, 1)
        assert cached(2) == 192
        lose_once(host, 0)  # with the KV cache, in the middle of the answer
        assert cached(2) == 192  # as it began
        assert cached(2) == 192
        system.service("gpu").kill()
        assert cached(2) in (0, 192)  # by when it was noticed
        assert cached(2) == 192
        system.actor.scale(1)
        assert [cached(1), cached(1)] == [0, 192]
