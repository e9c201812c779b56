"""Layers with a window keep the pages of a window, recurrent ones states in pages.

Answers are those of each request alone and cold, of a system that keeps all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.driver import Driver
from hotcold.actors.kv_cache.pool import KvPool, Window
from hotcold.actors.protocol.failures import CacheLost
from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.sampling import SamplingParams
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS as PAGE
from hotcold.numba_kernels.loops.mailbox import RECURRENT, WINDOWED
from tests.actors.batching import Answer, all_pages_are_free, answer, at_once, batching, greedy
from tests.actors.cuda_in_process import CudaInProcess, a_third
from tests.actors.in_process import InProcessSystem
from tests.actors.test_prefix_cache import cold, pages_on_file, request_of
from tests.actors.test_speculation import attention_arrays_of
from tests.tiny_checkpoint import GREEDY_TOKENS, Tiny, TinyCheckpoint
from tests.tiny_models import VOCAB_SIZE, make_tiny

_CONTEXT = 832
_IDS = np.random.default_rng(5).integers(0, VOCAB_SIZE, _CONTEXT).tolist()
_EDITED = [*_IDS[:350], (_IDS[350] + 1) % VOCAB_SIZE, *_IDS[351:]]
Models = Callable[[str, int], "Layers"]


@contextmanager
def system_of(
    checkpoint: TinyCheckpoint, few: int = 0, chunks: int = 1, **options: Any
) -> Iterator[tuple[InProcessSystem, Driver]]:
    """A system with pages for the windows of `few` sequences, or with `few` pages for states.

    0: windowed layers have pages for all positions, states as many as they take by themselves.
    """
    settings: dict[str, Any] = {"context": _CONTEXT, "kv_positions": 3 * _CONTEXT, "shares": True}
    with batching(checkpoint, **(settings | options)) as (system, driver):
        pool, config, engine = driver._pool, system.config, driver.engine
        engine.chunks_at_once = chunks
        own = pool._groups[1]._window
        assert own is not None
        if RECURRENT in config.page_groups:
            assert own.size <= 4
            windows = {RECURRENT: (replace(own, most_ends=chunks + 2), few)}
        elif few:
            step = max(chunks * engine.max_tokens, engine.kernel_tokens)
            window = Window(max(config.windows), step)
            assert chunks > 1 or own == window
            windows = {WINDOWED: (window, few * window.num_pages)}
        else:
            windows = {WINDOWED: (Window(_CONTEXT, _CONTEXT), system.num_pages())}
        if few or WINDOWED in windows:
            pool.__init__(system.num_pages(), pool._page_tables, windows)  # type: ignore[misc]
        yield system, driver


@dataclass(frozen=True)
class Layers:
    """A model with layers that keep the pages of a window, or states in pages."""

    checkpoint: TinyCheckpoint
    has_states: bool

    @property
    def few(self) -> int:
        """So few pages, or windows, that requests have to wait for them."""
        return 9 if self.has_states else 2

    def system(self, *sizes: int, **options: Any) -> Any:
        """See `system_of`."""
        kept = {"kv_positions": (3 if self.has_states else 2) * _CONTEXT}
        return system_of(self.checkpoint, *sizes, **kept | options)

    def alone(self, requests: list[GenerateRequest]) -> list[Answer]:
        """Each request by itself, of a system that shares nothing."""
        return cold(self.checkpoint, requests, context=_CONTEXT, kv_positions=8 * _CONTEXT)

    def pages(self, system: InProcessSystem) -> list[np.ndarray]:
        """Of each such layer all that there are."""
        arrays = attention_arrays_of(system)
        if self.has_states:
            return list(arrays.recurrent_pages)
        windows = enumerate(system.config.windows)
        return [arrays.keys.pages(layer) for layer, size in windows if size]


@pytest.fixture(scope="session")
def models(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The tiny model of a variant with a window of so many positions, or with states (0)."""
    made: dict[tuple[str, int], Path] = {}

    def make(variant: str, size: int) -> Layers:
        if not size:
            return Layers(tiny(variant), True)
        if (variant, size) not in made:
            path = made[variant, size] = tmp_path_factory.mktemp(f"{variant}-{size}")
            make_tiny(variant, path)
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").unlink()
            (path / "config.json").write_text(json.dumps(config | {"sliding_window": size}))
        return Layers(TinyCheckpoint(made[variant, size]), False)

    return make


@pytest.fixture(scope="module", params=[("gemma3", 150), ("qwen3.5", 0)], ids=["windows", "states"])
def layers(request: pytest.FixtureRequest, models: Models) -> Layers:
    return models(*request.param)


@pytest.fixture(scope="module")
def expected(layers: Layers) -> list[Answer]:
    return layers.alone(long_requests())


def long_requests() -> list[GenerateRequest]:
    """Prompts that begin alike, of one token up to many windows, and answers of several pages."""
    prompts = [_IDS[:500], _IDS[:1], _IDS[:130], _EDITED[:480], _EDITED[:70]]
    return [
        request_of(
            ids,
            request_id=f"request {number}",
            sampling=SamplingParams(
                max_tokens=10 + 18 * number, temperature=0.8, seed=number, ignore_eos=True
            ),
        )
        for number, ids in enumerate(prompts)
    ]


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
            assert answer(driver, greedy(prompt)).ids == checkpoint.greedy_after(
                prompt, GREEDY_TOKENS
            )


# Windows in all layers or in some, shorter than a page and longer than two; states.
@pytest.mark.sweep(variant=["mistral", "lfm2"])
@pytest.mark.parametrize(
    ("variant", "size"),
    [("mistral", 7), ("gemma3", 150), ("gemma4-e", 70), ("qwen3.5", 0), ("lfm2", 0),
     ("granite4-h", 0)],
)  # fmt: skip
def test_answers_are_those_with_all_pages(models: Models, variant: str, size: int) -> None:
    """One after another and side by side.

    With few pages; then several chunks of a prompt go through each layer at once.
    """
    layers, requests = models(variant, size), long_requests()
    expected = layers.alone(requests)
    for few, chunks in ((6, 1), (9, 4)) if layers.has_states else ((2, 1), (1, 4)):
        with layers.system(few, chunks) as (system, driver):
            pages = layers.pages(system)
            for own in pages:
                own[:] = np.nan  # what warmed it up
            assert [answer(driver, request) for request in requests] == expected
            assert at_once(driver, requests) == expected
            assert all_pages_are_free(driver)
            count = driver._pool.num_pages[1]
            written = [(~np.isnan(own)).reshape(len(own), -1).any(axis=1) for own in pages]
            assert np.flatnonzero(np.any(written, axis=0)).max() < count < _CONTEXT // PAGE


def test_a_prompt_is_found_after_a_long_answer(layers: Layers) -> None:
    """The end of its prompt is still there when the answer has left it behind."""
    with layers.system(layers.few) as (_, driver):
        ids = answer(driver, greedy(_IDS[:300], 250)).ids
        later = request_of([*_IDS[:300], *ids, 7, 8, 9])
        found = answer(driver, later)
        assert found.num_cached >= 256
    assert [found] == layers.alone([later])


def test_preempted_for_the_pages_of_such_layers(layers: Layers, expected: list[Answer]) -> None:
    """Someone else takes free pages now and then."""
    with layers.system(layers.few, kv_positions=8 * _CONTEXT) as (_, driver):
        scheduler, group = driver._scheduler, driver._pool._groups[1]
        advance, preempt = scheduler.advance, scheduler._preempt
        taken: list[int] = []
        num_steps, num_preempted = 0, 0

        def advancing() -> None:
            nonlocal num_steps
            num_steps += 1
            while taken:
                group.release(taken.pop())
            while num_steps % 20 < 8 and group.num_free:
                taken.append(group.take())
            advance()

        def preempting(request: ActiveRequest) -> None:
            nonlocal num_preempted
            num_preempted += 1
            preempt(request)

        scheduler.advance = advancing
        scheduler._preempt = preempting
        assert at_once(driver, long_requests()) == expected
        assert num_preempted


def test_the_cache_is_lost(layers: Layers, expected: list[Answer]) -> None:
    with layers.system(layers.few) as (system, driver):
        run, calls = driver.engine.run_layer, 0

        def losing(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls % 9 == 5 and calls < 60:
                arrays = attention_arrays_of(system)
                for lost in (arrays.keys.items, arrays.values.items, arrays.recurrent_pages):
                    lost[:] = np.nan
                raise CacheLost("lost")
            run(*arguments)

        driver.engine.run_layer = losing
        assert at_once(driver, long_requests()) == expected
        assert calls > 60 and all_pages_are_free(driver)


def test_a_file_has_the_pages_of_all_kinds_of_layers(layers: Layers, tmp_path: Path) -> None:
    requests = [request_of(ids) for ids in (_IDS[:700], _EDITED[:600], _IDS[:400])]
    expected = layers.alone(requests)
    for is_later in (False, True):
        with layers.system(folder=tmp_path, max_tokens=128) as (_, driver):
            found = [answer(driver, request) for request in requests]
            pages_on_file(driver)
            assert found == expected and all_pages_are_free(driver)
            assert not is_later or [one.num_cached for one in found] == [640, 576, 384]


def test_a_gpu_has_memory_for_windows_alone(models: Models) -> None:
    """An index beyond the pages of a layer with a window would fail.

    One after another: the stand-in's products of a step depend on the step's size.
    """
    layers, requests = models("gemma3", 70), long_requests()[:3]
    options: dict[str, Any] = {"kind": CudaInProcess, "hot": a_third, "max_tokens": 64}
    with layers.system(shares=False, **options) as (_, driver):
        expected = [answer(driver, request) for request in requests]
    options["num_window_pages"] = 2 * Window(70, 64).num_pages
    with layers.system(2, **options) as (_, driver):
        assert driver._pool.num_pages[WINDOWED] == options["num_window_pages"]
        assert [answer(driver, request) for request in requests] == expected
        at_once(driver, requests)
        assert all_pages_are_free(driver)


def test_scores_of_a_long_text(layers: Layers) -> None:
    found = []
    for few in (0, 5 if layers.has_states else 1):
        with layers.system(few) as (_, driver):
            found.append(driver.score_window(_IDS, 5, False).nll)
    np.testing.assert_array_equal(*found)


def test_profiles_do_not_depend_on_chunks(models: Models) -> None:
    """A profile computes a long text by itself, with the bos token before it."""
    found = []
    for size in (64, 320):
        with models("qwen3.5", 0).system(5, max_tokens=size) as (_, driver):
            found.append(driver.profile_window(_IDS[:500], list(range(0, 500, 7))))
    np.testing.assert_array_equal(*found)


def test_waiting_for_states_of_others(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come to the ends of their pages at once are not preempted for lack of them."""
    requests = [greedy(_IDS[n : n + 10], 60, str(n)) for n in range(5)]
    num_waits, lacks = 0, KvPool.lacks_states_alone

    def counted(*arguments: Any) -> bool:
        nonlocal num_waits
        num_waits += 1
        return lacks(*arguments)

    monkeypatch.setattr(KvPool, "lacks_states_alone", counted)
    layers = models("qwen3.5", 0)
    with layers.system(9) as (_, driver):
        monkeypatch.setattr(driver._scheduler, "_preempt", None)
        assert at_once(driver, requests) == layers.alone(requests)
        assert num_waits and all_pages_are_free(driver)
