"""Layers with a window keep the pages of a window: answers are those of a system that keeps all.

Some tests are of recurrent layers, too, which keep states in pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.driver import Driver
from hotcold.actors.kv_cache.pool import Window
from hotcold.actors.protocol.failures import CacheLost
from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.sampling import SamplingParams
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS as PAGE
from hotcold.numba_kernels.loops.mailbox import WINDOWED
from tests.actors.batching import batching
from tests.actors.cuda_in_process import CudaInProcess, a_third
from tests.actors.in_process import InProcessSystem
from tests.actors.test_prefix_cache import (
    Answer,
    all_are_free,
    answer,
    at_once,
    pages_on_file,
    request_of,
    same,
)
from tests.actors.test_speculation import attention_arrays_of
from tests.conftest import TinyCheckpoint
from tests.tiny_models import VOCAB_SIZE, make_tiny

_CONTEXT = 832
_IDS = np.random.default_rng(5).integers(0, VOCAB_SIZE, _CONTEXT).tolist()
_EDITED = [*_IDS[:350], (_IDS[350] + 1) % VOCAB_SIZE, *_IDS[351:]]
# Models with windows in all layers or in some, shorter than a page and longer than two.
_MODELS = [("mistral", 150), ("gemma3", 7), ("gemma4-e", 70)]


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], TinyCheckpoint]:
    """The tiny model of a variant with a window of so many positions."""
    made: dict[tuple[str, int], Path] = {}

    def make(variant: str, size: int) -> TinyCheckpoint:
        if (variant, size) not in made:
            path = tmp_path_factory.mktemp(f"{variant}-{size}")
            made[variant, size] = path
            make_tiny(variant, path)
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").unlink()
            (path / "config.json").write_text(json.dumps(config | {"sliding_window": size}))
        return TinyCheckpoint(made[variant, size])

    return make


Windowed = Callable[[str, int], TinyCheckpoint]
Tiny = Callable[..., TinyCheckpoint]


def long_requests() -> list[GenerateRequest]:
    """Prompts that begin alike, of one token up to many windows, and answers of several pages."""
    prompts = [_IDS[:500], _IDS[:1], _IDS[:130], _EDITED[:480], _EDITED[:70]]
    return [
        request_of(
            ids,
            request_id=f"request {number}",
            sampling=SamplingParams(
                max_tokens=20 + 25 * number, temperature=0.8, seed=number, ignore_eos=True
            ),
        )
        for number, ids in enumerate(prompts)
    ]


@contextmanager
def system_of(
    checkpoint: TinyCheckpoint, num_windows: int | None = None, chunks: int = 1, **options: Any
) -> Iterator[tuple[InProcessSystem, Driver]]:
    """A system whose windowed layers have pages for so many sequences; None: for all positions."""
    settings: dict[str, Any] = {"context": _CONTEXT, "kv_positions": 2 * _CONTEXT, "shares": True}
    with batching(checkpoint, **(settings | options)) as (system, driver):
        pool, config, engine = driver._pool, system.config, driver.engine
        size, engine.chunks_at_once = max(config.windows), chunks
        step = max(engine.chunks_at_once * engine.max_tokens, engine.kernel_tokens)
        assert chunks > 1 or pool._groups[WINDOWED]._window == Window(size, step)
        if num_windows is None:
            window = Window(_CONTEXT, _CONTEXT)
            count = system.num_pages()
        else:
            window = Window(size, step)
            count = num_windows * window.num_pages
        windows = {WINDOWED: (window, count)}
        pool.__init__(system.num_pages(), pool._page_tables, windows)  # type: ignore[misc]
        yield system, driver


def written(system: InProcessSystem) -> int:
    """Pages that any layer with a window has written."""
    keys = attention_arrays_of(system).keys
    pages = [keys.pages(layer) for layer, size in enumerate(system.config.windows) if size]
    return max(int(np.flatnonzero(own.any(axis=(1, 2, 3))).max()) for own in pages) + 1


@pytest.mark.parametrize(("variant", "size"), _MODELS)
def test_answers_are_those_with_all_pages(windowed: Windowed, variant: str, size: int) -> None:
    """Alone and side by side, with pages for the windows of two sequences, then of one.

    Then several chunks of a prompt go through each layer at once.
    """
    checkpoint, requests = windowed(variant, size), long_requests()
    with system_of(checkpoint, shares=False, kv_positions=8 * _CONTEXT) as (_, driver):
        expected = [answer(driver, request) for request in requests]
    for num_windows, chunks in ((2, 1), (1, 4)):
        with system_of(checkpoint, num_windows, chunks) as (system, driver):
            attention_arrays_of(system).keys.items[:] = 0  # what warmed it up
            same([answer(driver, request) for request in requests], expected)
            same(at_once(driver, requests), expected)
            assert all_are_free(driver)
            count = driver._pool.num_pages[WINDOWED]
            assert count < _CONTEXT // PAGE and written(system) <= count


@dataclass(frozen=True)
class Layers:
    """Layers that keep the pages of a window, or states in pages."""

    system: Callable[..., AbstractContextManager[tuple[InProcessSystem, Driver]]]
    few: int  # pages, so that requests have to wait for them

    def alone(self, requests: list[GenerateRequest]) -> list[Answer]:
        """Each request by itself, of a system that shares nothing."""
        with self.system(shares=False, kv_positions=8 * _CONTEXT) as (_, driver):
            return [answer(driver, request) for request in requests]


@pytest.fixture(scope="module", params=["windows", "states"])
def layers(request: pytest.FixtureRequest, windowed: Windowed, tiny: Tiny) -> Layers:
    if request.param == "windows":
        return Layers(partial(system_of, windowed("gemma3", 150)), 2)
    from tests.actors import test_recurrent_layers  # which takes requests from here

    return Layers(partial(test_recurrent_layers.system_of, tiny("qwen3.5")), 9)


@pytest.fixture(scope="module")
def expected(layers: Layers) -> list[Answer]:
    return layers.alone(long_requests())


def test_a_prompt_is_found_after_a_long_answer(layers: Layers) -> None:
    """The end of its prompt is still there when the answer has left it behind."""
    sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    with layers.system(layers.few) as (_, driver):
        ids, *_ = answer(driver, request_of(_IDS[:300], sampling=sampling))
        later = request_of([*_IDS[:300], *ids, 7, 8, 9])
        found = answer(driver, later)
        assert found[2] >= 256
    same([found], layers.alone([later]))


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

        scheduler.advance = advancing  # type: ignore[method-assign]
        scheduler._preempt = preempting  # type: ignore[method-assign]
        same(at_once(driver, long_requests()), expected)
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

        driver.engine.run_layer = losing  # type: ignore[assignment, method-assign]
        same(at_once(driver, long_requests()), expected)
        assert calls > 60 and all_are_free(driver)


def test_a_file_has_the_pages_of_all_kinds_of_layers(layers: Layers, tmp_path: Path) -> None:
    requests = [request_of(ids) for ids in (_IDS[:700], _EDITED[:600], _IDS[:400])]
    expected = layers.alone(requests)

    def answers() -> list[Answer]:
        with layers.system(folder=tmp_path, max_tokens=128) as (_, driver):
            found = [answer(driver, request) for request in requests]
            pages_on_file(driver)
            assert all_are_free(driver)
        return found

    same(answers(), expected)
    found = answers()
    same(found, expected)
    assert [cached for *_, cached in found] == [640, 576, 384]


@pytest.mark.usefixtures("one_torch_thread")
def test_a_gpu_has_memory_for_windows_alone(windowed: Windowed) -> None:
    """An index beyond the pages of a layer with a window would fail.

    One after another: the stand-in's products of a step depend on the step's size.
    """
    checkpoint, requests = windowed("gemma3", 70), long_requests()[:3]
    window = Window(70, 64)
    options: dict[str, Any] = {"kind": CudaInProcess, "hot": a_third, "max_tokens": 64}
    with system_of(checkpoint, shares=False, **options) as (_, driver):
        expected = [answer(driver, request) for request in requests]
    options["num_window_pages"] = 2 * window.num_pages
    with system_of(checkpoint, 2, **options) as (_, driver):
        assert driver._pool.num_pages[WINDOWED] == 2 * window.num_pages
        same([answer(driver, request) for request in requests], expected)
        at_once(driver, requests)
        assert all_are_free(driver)


def test_scores_of_a_text_longer_than_windows(windowed: Windowed) -> None:
    checkpoint = windowed("gemma3", 70)
    with system_of(checkpoint) as (_, driver):
        expected = driver.score_window(_IDS, 5, False)
    with system_of(checkpoint, 1) as (_, driver):
        found = driver.score_window(_IDS, 5, False)
    np.testing.assert_array_equal(found.nll, expected.nll)
