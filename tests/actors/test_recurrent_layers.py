"""Recurrent layers keep a state in pages: answers are those of each request alone and cold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.driver import Driver
from hotcold.actors.kv_cache.pool import KvPool
from hotcold.model.sampling import SamplingParams
from hotcold.numba_kernels.loops.mailbox import RECURRENT
from tests.actors.batching import batching
from tests.actors.in_process import InProcessSystem
from tests.actors.test_prefix_cache import (
    Answer,
    all_are_free,
    answer,
    at_once,
    cold,
    request_of,
    same,
)
from tests.actors.test_speculation import attention_arrays_of
from tests.actors.test_windows import long_requests
from tests.conftest import GREEDY_TOKENS, TinyCheckpoint
from tests.tiny_models import VOCAB_SIZE

Tiny = Callable[..., TinyCheckpoint]
_CONTEXT = 832
_IDS = np.random.default_rng(5).integers(0, VOCAB_SIZE, _CONTEXT).tolist()


@contextmanager
def system_of(
    checkpoint: TinyCheckpoint, num_pages: int = 0, chunks: int = 1, **options: Any
) -> Iterator[tuple[InProcessSystem, Driver]]:
    """A system with so many pages for states; 0: as many as it takes by itself."""
    settings: dict[str, Any] = {"context": _CONTEXT, "kv_positions": 3 * _CONTEXT, "shares": True}
    with batching(checkpoint, **(settings | options)) as (system, driver):
        pool, engine = driver._pool, driver.engine
        engine.chunks_at_once = chunks
        window = pool._groups[1]._window
        assert window is not None and window.size <= 4
        if num_pages:
            window = replace(window, most_ends=chunks + 2)
            windows = {RECURRENT: (window, num_pages)}
            pool.__init__(system.num_pages(), pool._page_tables, windows)  # type: ignore[misc]
        yield system, driver


def alone(checkpoint: TinyCheckpoint) -> list[Answer]:
    """Answers to `long_requests`, each alone."""
    settings: dict[str, Any] = {"context": _CONTEXT, "kv_positions": 8 * _CONTEXT}
    return cold(checkpoint, long_requests(), **settings)


@pytest.mark.sweep(variant=["qwen3.5-moe", "lfm2", "granite4-h", "nemotron-h-moe"])
@pytest.mark.parametrize(
    "variant",
    ["qwen3.5", "qwen3.5-moe", "qwen3-next", "lfm2", "lfm2-moe", "granite4-h", "nemotron-h-moe"],
)
def test_greedy_tokens_are_those_of_transformers(tiny: Tiny, variant: str) -> None:
    """Beyond a page, after a short prompt and one of several pages."""
    checkpoint = tiny(variant)
    with system_of(checkpoint) as (_, driver):
        for prompt in (checkpoint.ids[:10].tolist(), _IDS[:200]):
            sampling = SamplingParams(max_tokens=GREEDY_TOKENS, temperature=0.0, ignore_eos=True)
            ids, *_ = answer(driver, request_of(prompt, sampling=sampling))
            assert ids == checkpoint.greedy_after(prompt, GREEDY_TOKENS)


@pytest.mark.parametrize("variant", ["qwen3.5", "lfm2", "granite4-h"])
def test_answers_with_few_pages_for_states(tiny: Tiny, variant: str) -> None:
    """One after another and side by side; prompts go chunk by chunk, or several at once."""
    expected = alone(tiny(variant))
    for num_pages, chunks in ((6, 1), (9, 4)):
        with system_of(tiny(variant), num_pages, chunks) as (system, driver):
            attention_arrays_of(system).recurrent_pages[:] = np.nan  # what warmed it up
            same([answer(driver, request) for request in long_requests()], expected)
            same(at_once(driver, long_requests()), expected)
            assert all_are_free(driver)
            used = ~np.isnan(attention_arrays_of(system).recurrent_pages).all(axis=(0, 2))
            assert used.sum() <= num_pages < _CONTEXT // 64


def test_waiting_for_pages_of_others(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come to the ends of their pages at once are not preempted for lack of them."""
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    requests = [
        request_of(_IDS[n : n + 10], request_id=str(n), sampling=sampling) for n in range(5)
    ]
    num_waits, lacks = 0, KvPool.lacks_states_alone

    def counted(*arguments: Any) -> bool:
        nonlocal num_waits
        num_waits += 1
        return lacks(*arguments)

    monkeypatch.setattr(KvPool, "lacks_states_alone", counted)
    with system_of(tiny("qwen3.5"), 9) as (_, driver):
        monkeypatch.setattr(driver._scheduler, "_preempt", None)
        same(at_once(driver, requests), cold(tiny("qwen3.5"), requests, context=_CONTEXT))
        assert num_waits and all_are_free(driver)


def test_scores_of_a_long_text(tiny: Tiny) -> None:
    with system_of(tiny("qwen3.5")) as (_, driver):
        expected = driver.score_window(_IDS, 5, False)
    with system_of(tiny("qwen3.5"), 5) as (_, driver):
        found = driver.score_window(_IDS, 5, False)
    np.testing.assert_array_equal(found.nll, expected.nll)


def test_profiles_do_not_depend_on_chunks(tiny: Tiny) -> None:
    """A profile computes a long text by itself, with the bos token before it."""
    found = []
    for size in (64, 320):
        with system_of(tiny("qwen3.5"), 5, max_tokens=size) as (_, driver):
            found.append(driver.profile_window(_IDS[:500], list(range(0, 500, 7))))
    np.testing.assert_array_equal(found[0], found[1])
