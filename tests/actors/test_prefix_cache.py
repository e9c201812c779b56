"""Prompts that begin alike are computed once, and answered as if each were the first."""

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.draft_policy import FixedPolicy
from hotcold.actors.driver.driver import Driver
from hotcold.actors.kv_cache.page_store import PageStore
from hotcold.actors.kv_cache.prefix_file import FOLDER
from hotcold.actors.protocol.failures import CacheLost, NotFiniteError
from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig
from hotcold.actors.protocol.options import OPTIONS, SystemOptions
from hotcold.actors.setup.choose import choose_system
from hotcold.actors.system import System
from hotcold.model.config.build import read_config
from hotcold.model.errors import UsageError
from hotcold.model.sampling import SamplingParams
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS as PAGE
from tests.actors.batching import (
    CONTEXT,
    Answer,
    Background,
    all_pages_are_free,
    answer,
    at_once,
    batching,
)
from tests.actors.cuda_in_process import CudaInProcess, a_third
from tests.actors.in_process import InProcessSystem
from tests.actors.kept_system import wait_until
from tests.actors.test_speculation import drafting
from tests.draft_layer_models import DraftedModel
from tests.tiny_checkpoint import Tiny, TinyCheckpoint
from tests.tiny_models import VOCAB_SIZE

_IDS = np.random.default_rng(5).integers(0, VOCAB_SIZE, CONTEXT).tolist()
_EDITED = [*_IDS[:150], (_IDS[150] + 1) % VOCAB_SIZE, *_IDS[151:]]
# Of one text, whole and edited: of other lengths, which end in a page or fill it.
_PROMPTS = [_IDS[:300], _IDS[:64], _IDS[:65], _IDS[:128], _IDS[:170], _EDITED[:230], _IDS[:340]]
# Of each, in turn, what those before it have left: less than the whole prompt.
_CACHED = [0, 0, 64, 64, 128, 128, 256]


def request_of(ids: Sequence[int], **changes: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=9, temperature=0.8, seed=len(ids), ignore_eos=True)
    return replace(GenerateRequest(sampling, prompt_ids=list(ids), num_logprobs=2), **changes)


def cold(tiny: TinyCheckpoint, requests: Sequence[GenerateRequest], **options: Any) -> list[Answer]:
    """Each alone, of a system that shares nothing."""
    with batching(tiny, **options) as (_, driver):
        found = [answer(driver, request) for request in requests]
    assert not any(one.num_cached for one in found)
    return found


@pytest.fixture(scope="module")
def llama(tiny: Tiny) -> TinyCheckpoint:
    return tiny("llama-gqa", "bfloat16")


# Variant, mode, and options of the system.
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("llama-gqa", "float16", "exact", {"kv_dtype": "float16", "max_tokens": 200}),
    ("llama-relu", "bfloat16", "sign", {}),
    ("gemma3", "float32", "exact", {}),
    ("deepseek-v3", "float32", "dense", {}),
    ("gpt-oss", "float32", "dense", {}),
    ("gemma4-e", "float32", "exact", {"kv_dtype": "q8"}),
    ("qwen3.5", "float32", "dense", {}),
]


@pytest.mark.sweep(variant=["llama-gqa", "gemma4-e", "qwen3.5"])
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
        assert found == expected
        assert [one.num_cached for one in found] == _CACHED
        found = at_once(driver, requests)
        assert found == expected
        lengths = [len(request.prompt_ids or ()) for request in requests]
        assert [one.num_cached for one in found] == [(size - 1) // PAGE * PAGE for size in lengths]
        assert all_pages_are_free(driver)


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
        assert found == expected
        assert [one.num_cached for one in found] == [n // max_tokens * max_tokens for n in _CACHED]


def test_the_second_finds_what_the_first_has_computed_meanwhile(llama: TinyCheckpoint) -> None:
    """Of eight requests with one beginning, all of which wait before the first begins."""
    requests = [request_of([*_IDS[:200], n]) for n in range(8)]
    expected = cold(llama, requests)
    with batching(llama, shares=True) as (_, driver):
        placed: list[int] = []
        place = driver.engine.place

        def noted(token_ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> None:
            placed.extend(position for position in positions if position < 192)
            place(token_ids, positions, slots)

        driver.engine.place = noted  # type: ignore[method-assign]
        found = at_once(driver, requests)
        assert sorted(placed) == list(range(192))
    assert found == expected
    assert [one.num_cached for one in found] == [0] + [192] * 7


def test_a_small_pool_gives_up_what_was_used_least_recently(llama: TinyCheckpoint) -> None:
    """Pages for one context: what others need is computed again, and never what is in use."""
    others = [[(token + n) % VOCAB_SIZE for token in _IDS] for n in range(1, 4)]
    prompts = [ids[:length] for length in (300, 200, 90) for ids in (_IDS, *others)]
    requests = [request_of(ids) for ids in prompts]
    expected = cold(llama, requests)
    with batching(llama, shares=True, kv_positions=CONTEXT) as (_, driver):
        pool, random = driver._pool, np.random.default_rng(1)
        assert pool.num_pages == CONTEXT // PAGE
        assert [answer(driver, request) for request in requests] == expected
        for _ in range(3):
            order = random.permutation(len(requests)).tolist()
            found = at_once(driver, [requests[number] for number in order])
            assert found == [expected[number] for number in order]
        assert all_pages_are_free(driver)
        first, other = requests[:2]
        cached = [answer(driver, request).num_cached for request in (first, other, first, first)]
        assert cached[2] < 256 == cached[3]  # the other one had needed some of its pages


# --- who shares --------------------------------------------------------------------------------


def test_salts_are_apart_and_some_share_nothing(llama: TinyCheckpoint) -> None:
    with batching(llama, shares=True) as (_, driver):

        def cached(**changes: Any) -> int:
            return answer(driver, request_of(_IDS[:200], **changes)).num_cached

        assert cached(use_cache=False) == 0
        assert cached() == 0  # nor was it kept
        assert cached(use_cache=False) == 0
        assert cached(num_prompt_logprobs=0) == 0
        assert cached(wants_embedding=True) == 0
        assert cached(cache_salt="a") == 0
        assert cached(cache_salt="b") == 0
        assert [cached(cache_salt=salt) for salt in ("", "a", "b")] == [192] * 3


# --- what goes wrong ---------------------------------------------------------------------------


def test_a_lost_cache_is_found_no_more(llama: TinyCheckpoint) -> None:
    """While some share pages: each is computed anew, and answers stay."""
    requests = [*(request_of([*_IDS[:200], n]) for n in range(4)), request_of(_EDITED[:290])]
    expected = cold(llama, requests)
    with batching(llama, shares=True) as (system, driver):
        assert answer(driver, requests[0]) == expected[0]
        run_layer, num_layers = driver.engine.run_layer, 0

        def losing(*given: Any) -> None:
            nonlocal num_layers
            num_layers += 1
            if num_layers == 8:
                lose_cache(system)
                raise CacheLost("a test lost it")
            run_layer(*given)

        driver.engine.run_layer = losing  # type: ignore[assignment, method-assign]
        assert at_once(driver, requests) == expected
        assert num_layers > 8 and all_pages_are_free(driver)
        assert [answer(driver, request) for request in requests] == expected


def lose_cache(system: InProcessSystem) -> None:
    arrays = system.services[0].arrays  # type: ignore[attr-defined]
    for cache in (arrays.keys, arrays.values):
        cache.items[:] = np.nan if cache.items.dtype == np.float32 else 0x7E00


def test_a_prompt_of_too_large_numbers_fails_alone(
    llama: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on with what they have, and find it later; no service is replaced."""
    unused = next(token for token in range(VOCAB_SIZE) if token not in _IDS)
    requests = [request_of(_IDS[n : 200 + n]) for n in range(3)]
    bad = request_of([*_IDS[:260], unused])
    expected = cold(llama, requests)
    with batching(llama, shares=True, folder=tmp_path) as (_, driver):
        assert [answer(driver, requests[0])] == expected[:1]
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
            assert outcomes == expected[1:]
            again = answer(driver, requests[0])
            assert again == expected[0] and again.num_cached == 192
        assert not replaced and pages_on_file(driver)
        assert all_pages_are_free(driver)


def test_after_a_service_made_a_nan_all_that_runs_is_computed_anew(
    llama: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had a part in before may be wrong, too, though finite."""
    requests = [request_of(_IDS[n : 200 + n]) for n in range(3)]
    expected = cold(llama, requests)
    with batching(llama, shares=True, folder=tmp_path) as (system, driver):
        answer(driver, request_of(_IDS[250:350]))
        (kept,) = pages_on_file(driver)
        replaced, num_layers, run_layer = list[int](), 0, driver.engine.run_layer

        def spoiled(*given: Any) -> None:
            nonlocal num_layers
            num_layers += 1
            if num_layers == 4:
                raise NotFiniteError("in a test", frozenset({0}), 1)
            run_layer(*given)

        def replace_it(service: int, cause: str) -> bool:
            replaced.append(service)
            lose_cache(system)
            return True

        monkeypatch.setattr(driver.engine, "run_layer", spoiled)
        monkeypatch.setattr(driver.engine.exchange, "try_replace", replace_it)
        found = at_once(driver, requests)
        assert found == expected
        assert replaced == [1]
        assert kept not in pages_on_file(driver)


def test_a_job_takes_the_pages_that_it_needs(llama: TinyCheckpoint) -> None:
    request = request_of(_IDS[:300])
    expected = cold(llama, [request])
    with batching(llama, shares=True, kv_positions=CONTEXT) as (_, driver):
        answer(driver, request)
        driver.score_window(_EDITED[:200], 5, False)  # writes into pages of slot 0
        found = answer(driver, request)
        assert [found] == expected and found.num_cached == 0
        driver.between_requests(lambda: None, has_slot=False)
        assert answer(driver, request).num_cached > 0  # nothing was given up for it


# --- a file beside memory ----------------------------------------------------------------------


def pages_on_file(driver: Driver) -> set[bytes]:
    """Their keys, once all is written."""
    store = driver._prefixes.store
    assert isinstance(store, PageStore)
    assert wait_until(lambda: not driver._prefixes.is_saving)
    return store.keys()


def note(driver: Driver) -> str:
    """What is said of the file at the start."""
    store = driver._prefixes.store
    assert isinstance(store, PageStore) and "\n" not in store.note
    return store.note


@pytest.mark.parametrize("has_mtp", [False, True])
def test_a_later_start_computes_only_what_is_new(
    llama: TinyCheckpoint, tmp_path: Path, has_mtp: bool
) -> None:
    """With the rows of a layer that drafts, too, whose drafts change nothing."""
    prompt, options = _IDS[:200], dict[str, Any]()
    checkpoint: Any = llama
    if has_mtp:
        checkpoint = DraftedModel("glm4-moe-groups", tmp_path / "m")
        options = {"draft": "mtp"}
    requests = [request_of(prompt), request_of([*prompt[:100], *prompt[50:]])]
    expected = cold(checkpoint, requests, **options)
    for said, cached in (("0 pages", [0, 64, 192]), ("5 pages", [192, 192, 192])):
        made = batching(checkpoint, shares=True, folder=tmp_path, **options)
        with made as (_, driver), ExitStack() as stack:
            if has_mtp:
                stack.enter_context(drafting(driver, driver.drafter, FixedPolicy(3), ngrams=False))
            assert note(driver).startswith(f"prefix cache: {said}")
            found = [answer(driver, one) for one in (*requests, requests[0])]
            assert len(pages_on_file(driver)) == 5
        assert found == [*expected, expected[0]]
        assert [one.num_cached for one in found] == cached


@pytest.mark.parametrize(
    ("what", "said"),
    [("flipped", "3 pages"), ("cut", "its end is missing"), ("of another model", "begun anew"),
     ("empty", "0 pages")],
)  # fmt: skip
def test_a_damaged_file_changes_no_answer(
    llama: TinyCheckpoint, tmp_path: Path, what: str, said: str
) -> None:
    request = request_of(_IDS[:200])
    expected = cold(llama, [request])
    with batching(llama, shares=True, folder=tmp_path) as (_, driver):
        answer(driver, request)
        pages_on_file(driver)
    (path,) = (tmp_path / "hotcold" / FOLDER).iterdir()
    content = bytearray(path.read_bytes())
    slot = (len(content) - 8192) // 3
    if what == "flipped":
        content[8192 + slot + 5] ^= 4  # of the second page
    elif what == "cut":
        del content[8192 + 2 * slot - 5 :]
    else:
        content[:] = b"" if what == "empty" else content[64:128] * (len(content) // 64)
    path.write_bytes(content)
    for wanted in ({0, 64, 128}, {192}):
        with batching(llama, shares=True, folder=tmp_path) as (_, driver):
            assert (said if 0 in wanted else "3 pages") in note(driver)
            found = answer(driver, request)
            pages_on_file(driver)
        assert [found] == expected
        # Which page is the damaged one depends on how many were written by one call.
        assert found.num_cached in wanted


def test_two_systems_at_once(llama: TinyCheckpoint, tmp_path: Path) -> None:
    request = request_of(_IDS[:200])
    expected = cold(llama, [request])
    with batching(llama, shares=True, folder=tmp_path) as (_, first):
        answer(first, request)
        pages_on_file(first)
        with batching(llama, shares=True, folder=tmp_path) as (_, second):
            assert "another running system uses it" in note(second)
            found = [answer(second, request) for _ in range(2)]
    assert found == expected * 2
    assert [one.num_cached for one in found] == [0, 192]  # of its own memory


def test_memory_for_one_prompt_alone(llama: TinyCheckpoint, tmp_path: Path) -> None:
    """Pages given up in memory come back from the file, and in turns that is all there is."""
    requests = [request_of(_IDS[n : n + 200]) for n in range(0, 160, 40)]
    expected = cold(llama, requests)
    options: dict[str, Any] = {"kv_positions": 256, "num_slots": 1, "context": 256}
    with batching(llama, shares=True, folder=tmp_path, **options) as (_, driver):
        for cached in (0, 192, 192):
            found = [answer(driver, request) for request in requests]
            assert found == expected
            assert [one.num_cached for one in found] == [cached] * len(requests)
            assert len(pages_on_file(driver)) == 3 * len(requests)


@pytest.mark.usefixtures("local_ray")
def test_processes_that_are_killed_and_replaced(copied: TinyCheckpoint) -> None:
    """Who comes later finds what they had; the last pages are written at the end."""
    config = SystemConfig(
        str(copied.path), num_cpu_actors=1, num_threads=2, context_length=CONTEXT,
        kv_dtype="float32", prefix_cache_bytes=10 << 20,
    )  # fmt: skip
    prompt = [token % 99 for token in _IDS[:200]]
    request = request_of(prompt)
    with System.start(config) as system:
        expected = system.complete(replace(request, use_cache=False)).ids

        def cached() -> int:
            found = system.complete(request)
            assert found.ids == expected
            return found.num_cached_tokens

        assert [cached(), cached()] == [0, 192]
        for name in ("cpu0", "gpu"):
            system.complete(request_of(prompt[:30]))
            os.kill(system.call("processes")[name], signal.SIGKILL)
            assert cached() in (0, 192) and cached() == 192
        system.call("scale", 2)
        assert [cached(), cached()] == [192, 192]
        os.kill(system.call("processes")["driver"], signal.SIGKILL)
    with System.start(config) as system:
        assert cached() == 192
        system.complete(request_of(prompt[50:150], sampling=SamplingParams(max_tokens=1)))
    with System.start(config) as system:
        assert system.complete(request_of(prompt[50:150])).num_cached_tokens == 64


def test_options(copied: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(copied.path)
    nothing = dict.fromkeys(one.keyword for one in OPTIONS.values())

    def chosen(given: Any, device: str = "cpu", **others: Any) -> int | None:
        monkeypatch.setattr("hotcold.actors.setup.choose.choose_device", lambda *_: device)
        options = SystemOptions.of_keywords(**nothing | {"prefix_cache": given, "device": device})
        return choose_system(copied.path, config, replace(options, **others)).prefix_cache_bytes

    assert [chosen(given) for given in (None, "off", "2GiB", 0)] == [None, 0, 2 << 30, 0]
    hosts: dict[str, Any] = {"hosts": ("10.0.0.1", "10.0.0.2")}
    assert chosen("off", "cuda") == 0 and chosen(None, **hosts) is None
    refused: list[tuple[Any, str, dict[str, Any], str]] = [
        (-1, "cpu", {}, "give a size like 20GiB, or off"),
        ("on", "cpu", {}, "prefix_cache: 'on' is no size"),
        ("1GiB", "cuda", {}, "give --device cpu"),
        (4096, "cpu", hosts, "is for one computer"),
    ]
    for given, device, others, told in refused:
        with pytest.raises(UsageError, match=told):
            chosen(given, device, **others)
