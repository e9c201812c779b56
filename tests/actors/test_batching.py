"""Many requests at once: each gets what it would get alone, bit for bit, and its fair turn."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hotcold.actors.driver import sampler
from hotcold.actors.driver.batches import Turns
from hotcold.actors.driver.driver import Driver
from hotcold.actors.driver.scheduler import Scheduler
from hotcold.actors.protocol.failures import NotFiniteError, RequestError
from hotcold.actors.protocol.messages import GenerateRequest, Generation
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS, MATRIX_TOKENS
from hotcold.model.errors import PromptError, ServiceError, UsageError
from hotcold.model.sampling import SamplingParams
from tests.actors.batching import (
    CONTEXT,
    Background,
    all_pages_are_free,
    batching,
    complete,
    greedy,
    random_request,
    start,
)
from tests.reference import relative_difference
from tests.tiny_checkpoint import Tiny, TinyCheckpoint
from tests.tiny_models import VOCAB_SIZE

# Of a system with a context that takes longer to fill than any test, on a busy machine too.
ENDLESS: dict[str, Any] = {"context": 40_000, "num_slots": 1, "kv_positions": 40_000}


# --- the same tokens in any batch ----------------------------------------------------------


@pytest.mark.sweep(variant=["llama-relu", "qwen3.5-moe"])
@pytest.mark.parametrize(
    ("variant", "mode", "copying"),
    [
        ("llama-gqa", "exact", False),
        ("llama-relu", "sign", True),
        ("llama-silu", "threshold", False),
        ("qwen3.5-moe", "dense", False),
    ],
)
def test_tokens_do_not_depend_on_company(
    tiny: Tiny, variant: str, mode: str, copying: bool
) -> None:
    """The pool is too small for all, so some wait; some are cancelled on their way."""
    requests = [random_request(seed) for seed in range(14)]
    options = {"copying": copying, "kv_positions": 3 * CONTEXT}
    with batching(tiny(variant), mode, **options) as (_, driver):
        alone = [complete(driver, request).ids for request in requests]
        random = np.random.default_rng(3)
        for turn in range(2):
            order = random.permutation(len(requests)).tolist()
            cancelled = set(random.choice(order, 5, replace=False).tolist())
            names = [f"{number} in turn {turn}" for number in range(len(requests))]
            running = {}
            for number in order:
                request = replace(requests[number], request_id=names[number])
                running[number] = start(driver, request)
                threading.Event().wait(float(random.exponential(0.004)))
                for other in cancelled & set(running):
                    driver.cancel(names[other])
            results = {number: one.end() for number, one in running.items()}
            for number, result in results.items():
                assert isinstance(result, Generation), result
                if number in cancelled:
                    assert result.ids == alone[number][: len(result.ids)]
                else:
                    assert result.ids == alone[number], number
        assert all_pages_are_free(driver)


@pytest.mark.sweep(mode=["lowrank"])
@pytest.mark.parametrize("mode", ["dense", "lowrank"])
def test_logits_do_not_depend_on_company(tiny: Tiny, mode: str) -> None:
    """Steps of 1 to 32 tokens of several sequences: the same bits as one token a step."""
    checkpoint = tiny("llama-relu")
    with batching(checkpoint, mode, num_slots=4) as (system, driver):
        engine, random = driver.engine, np.random.default_rng(4)
        system.exchange.buffers.page_tables[:] = random.permutation(24).reshape(1, 4, 6)
        sequences = random.integers(0, 101, (4, 90))
        alone = [
            [engine.step([token], [at], [slot])[0].copy() for at, token in enumerate(sequence)]
            for slot, sequence in enumerate(sequences.tolist())
        ]
        done = [0] * 4
        while min(done) < 90:
            size = int(random.integers(1, KERNEL_TOKENS + 1))
            tokens: list[tuple[int, int]] = []
            for slot in random.permutation(4).tolist():
                count = min(size - len(tokens), int(random.integers(0, 20)), 90 - done[slot])
                tokens += [(slot, at) for at in range(done[slot], done[slot] + count)]
                done[slot] += count
            if tokens:
                slots, positions = zip(*tokens, strict=True)
                ids = [int(sequences[place]) for place in tokens]
                for (slot, at), row in zip(
                    tokens, engine.step(ids, positions, slots, len(ids)), strict=True
                ):
                    np.testing.assert_array_equal(row, alone[slot][at])


# --- waiting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_slots", "kv_positions"), [(8, CONTEXT), (2, 8 * CONTEXT)])
def test_those_for_whom_there_is_no_room_wait(
    tiny: Tiny, num_slots: int, kv_positions: int
) -> None:
    """Of pages, or of slots: two run at once, in the order in which they came."""
    with batching(tiny("llama-gqa"), num_slots=num_slots, kv_positions=kv_positions) as (_, driver):
        most, most_together = CONTEXT // 2, 0
        requests = [greedy([number], most - 1) for number in range(1, 6)]
        alone = complete(driver, requests[0])
        starts: list[int] = []
        admit = Scheduler.admit

        def counted(self: Scheduler, run: object) -> bool:
            nonlocal most_together
            admitted = admit(self, run)  # type: ignore[arg-type]
            most_together = max(most_together, len(self._running))
            if admitted:
                starts.append(run.tokens[0])  # type: ignore[attr-defined]
            return admitted

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Scheduler, "admit", counted)
            running = []
            for request in requests:
                running.append(start(driver, request))
                while len(starts) + driver._scheduler.num_waiting < len(running):
                    pass
            results = [one.end() for one in running]
        assert most_together == 2
        assert starts == [1, 2, 3, 4, 5]
        assert results[0].ids == alone.ids and len(alone.ids) == most - 1
        assert results[4].queued_s > 0
        assert all_pages_are_free(driver)


def test_cancelled_before_it_comes_and_while_it_waits(tiny: Tiny) -> None:
    with batching(tiny("llama-gqa"), **ENDLESS) as (_, driver):
        driver.cancel("early")  # the two calls of a client may overtake each other
        reasons = [complete(driver, greedy([1], 5, "early")).finish_reason for _ in range(2)]
        assert reasons == ["cancelled", "length"]
        running = endless(driver)
        waiting = start(driver, greedy([2], 5, "waits"))
        await_waiting(driver, 1)
        with pytest.raises(PromptError):
            next(driver.generate(greedy([], 5)))
        driver.cancel("waits")
        result = waiting.end()
        assert (result.finish_reason, result.ids) == ("cancelled", [])
        assert (driver.load().num_running, driver.load().num_waiting) == (1, 0)
        driver.cancel("endless")
        assert running.end().finish_reason == "cancelled"
        assert all_pages_are_free(driver) and not driver._streams


def endless(driver: Driver) -> Background:
    """A request that takes many seconds, once it runs."""
    running = start(driver, greedy([1], ENDLESS["context"] - 2, "endless"))
    while not driver.load().num_running:
        threading.Event().wait(0.001)
    return running


def await_waiting(driver: Driver, number: int) -> None:
    while driver.load().num_waiting < number:
        threading.Event().wait(0.001)


def test_close_does_not_wait_for_a_long_request(tiny: Tiny) -> None:
    with batching(tiny("llama-gqa"), **ENDLESS) as (_, driver):
        running, waiting = endless(driver), start(driver, greedy([2], 5))
        await_waiting(driver, 1)
        driver.close()
        result, stopped = running.end(), waiting.end()
        assert result.finish_reason == "cancelled" and len(result.ids) < ENDLESS["context"] - 10
        assert isinstance(stopped, ServiceError) and "stopped" in str(stopped)


def test_an_answer_ends_with_the_context(tiny: Tiny) -> None:
    """What it gave up to there is what a larger context gives, alone and in a batch.

    So it does where nothing else ends it.
    """
    with batching(tiny("llama-gqa"), context=96) as (_, driver):
        limits = [(1, 200), (40, 200), (95, 200), (40, None)]
        requests = [greedy(list(range(3, 3 + length)), most) for length, most in limits]
        running = [start(driver, request) for request in requests]
        found = [one.end() for one in running]
        assert all_pages_are_free(driver)
    assert [len(one.ids) for one in found] == [95, 56, 1, 56]
    assert {one.finish_reason for one in found} == {"length"}
    with batching(tiny("llama-gqa")) as (_, driver):
        for request, one in zip(requests[:3], found, strict=False):
            assert complete(driver, request).ids[: len(one.ids)] == one.ids


def test_a_job_runs_alone_and_those_behind_it_wait(tiny: Tiny) -> None:
    checkpoint = tiny("llama-gqa")
    window = checkpoint.ids.tolist()
    with batching(checkpoint) as (_, driver):
        expected = driver.score_window(window, 5, False)
        free = driver._pool.num_free_pages.tolist()
        endless = [start(driver, greedy([n], CONTEXT, f"endless {n}")) for n in (1, 2, 3)]
        while len(driver._scheduler._running) < 3:
            pass
        job = Background(lambda: driver.score_window(window, 5, False))
        while driver._scheduler.num_waiting < 1:
            pass
        late = start(driver, greedy([5], 3))
        while driver._scheduler.num_waiting < 2:
            pass
        driver.cancel("endless 1")
        assert endless[0].end().finish_reason == "cancelled"
        assert driver._scheduler.num_waiting == 2  # two run still, a slot is free
        driver.cancel("endless 2")
        driver.cancel("endless 3")
        np.testing.assert_array_equal(job.end().nll, expected.nll)
        assert len(late.end().ids) == 3
        assert [run.end().finish_reason for run in endless[1:]] == ["cancelled"] * 2
        assert all_pages_are_free(driver) and driver._pool.num_free_pages.tolist() == free


# --- what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "length"), [("exact", 3), ("lowrank", 50)])
def test_a_nan_ends_its_own_request(tiny: Tiny, mode: str, length: int) -> None:
    """Other requests stay as they are, those too that get its pages later."""
    checkpoint = tiny("llama-gqa")
    good = [greedy(checkpoint.ids[: 9 * n].tolist(), 30) for n in range(1, 5)]
    with batching(checkpoint, mode) as (_, driver):
        alone = [complete(driver, request).ids for request in good]
        used = {*checkpoint.ids.tolist(), *(token for ids in alone for token in ids)}
        nan_id = max(set(range(VOCAB_SIZE)) - used)
        bad = greedy([5] * (length - 1) + [nan_id], 30)
        spoil(driver, nan_id)
        running = [start(driver, request) for request in (good[0], bad, *good[1:], bad)]
        outcomes = [one.end() for one in running]
        for error in (outcomes.pop(1), outcomes.pop()):
            assert isinstance(error, NotFiniteError), error
            assert "not finite in its token embeddings" in str(error)
        assert [outcome.ids for outcome in outcomes] == alone
        assert complete(driver, good[3]).ids == alone[3]
        assert all_pages_are_free(driver)


def spoil(driver: Driver, token_id: int) -> None:
    """Make one token's embedding NaN."""
    lookup = driver.engine.embedding.lookup

    def spoiled(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        rows = lookup(ids, positions).copy()
        rows[ids == token_id] = np.nan
        return rows

    object.__setattr__(driver.engine.embedding, "lookup", spoiled)


def test_cancelled_in_the_prompt(tiny: Tiny) -> None:
    checkpoint = tiny("llama-gqa")
    with batching(checkpoint) as (_, driver):
        other = complete(driver, greedy([3], 20))
        run_layer, reached, go_on = driver.engine.run_layer, threading.Event(), threading.Event()
        num_layers = 0

        def stopping(layer: int, num_tokens: int, *others: Any) -> None:
            nonlocal num_layers
            if num_tokens >= MATRIX_TOKENS:
                num_layers += 1
                if num_layers == 8:
                    reached.set()
                    assert go_on.wait(100)
            run_layer(layer, num_tokens, *others)

        driver.engine.run_layer = stopping  # type: ignore[assignment]
        long = start(driver, greedy([1] * 300, 9, "long"))
        assert reached.wait(100)
        short = start(driver, greedy([3], 20))
        driver.cancel("long")
        go_on.set()
        result = long.end()
        assert (result.finish_reason, result.ids) == ("cancelled", [])
        assert num_layers == 8
        assert short.end().ids == other.ids
        assert all_pages_are_free(driver)


def test_a_failed_chunk_ends_its_own_request(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with batching(tiny("llama-gqa")) as (system, driver):
        expected = complete(driver, greedy([3], 200)).ids

        def fail(*arguments: object) -> None:
            raise MemoryError("no room")

        service = system.services[1]
        monkeypatch.setattr(service, "is_for_prompts", lambda: False)  # they are left to Python
        monkeypatch.setattr(service, "answer_in_python", fail)
        going = start(driver, greedy([3], 200))
        error = start(driver, greedy([1] * 100, 9)).end()
        assert isinstance(error, RequestError) and "no room" in str(error)
        assert going.end().ids == expected
        assert all_pages_are_free(driver)


@pytest.mark.parametrize(
    ("place", "raised", "told"),
    [
        ("engine", RequestError("the cpu0 service failed: once"), "the cpu0 service failed: once"),
        (
            "sampler",
            ValueError("the logits hold a NaN\nand more"),
            "the request failed: ValueError: the logits hold a NaN",
        ),
    ],
)
def test_a_failed_step_ends_those_that_stood_in_it(
    tiny: Tiny, place: str, raised: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a service, or a mistake of the driver's own; who comes later is answered."""
    with batching(tiny("llama-gqa")) as (_, driver):
        owner, name = (driver.engine, "step") if place == "engine" else (sampler, "sample")
        call, fails = getattr(owner, name), threading.Event()

        def failing(*arguments: Any, **options: Any) -> Any:
            if fails.is_set():
                raise raised
            return call(*arguments, **options)

        monkeypatch.setattr(owner, name, failing)
        running = [start(driver, greedy([n], CONTEXT - 2)) for n in (1, 2)]
        while len(driver._scheduler._running) < 2:
            pass
        fails.set()
        for one in running:
            error = one.end()
            assert type(error) is RequestError and str(error) == told
        fails.clear()
        assert len(complete(driver, greedy([1], 5)).ids) == 5
        assert all_pages_are_free(driver)


@pytest.mark.parametrize("place", ["admit", "_end_cancelled", ""])
def test_whatever_ends_the_engine_is_told(
    tiny: Tiny, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs, waits, comes later, or asks whether it lives; a service, or a mistake."""

    def fail(*arguments: object) -> None:
        if place:
            raise RuntimeError("no such slot\nand more")
        raise ServiceError("the gpu service failed: RuntimeError: lost")

    with batching(tiny("llama-gqa"), **ENDLESS | {"num_slots": 2}) as (_, driver):
        driver.require_alive()
        running = endless(driver)
        monkeypatch.setattr(driver._scheduler, place or "advance", fail)
        expected = "the driver failed: RuntimeError: no such slot; start again"
        expected = expected if place else "the gpu service failed: RuntimeError: lost"
        for one in (running, start(driver, greedy([1], 5))):
            error = one.end()
            assert isinstance(error, ServiceError) and str(error) == expected
        driver._scheduler._thread.join(100)
        for call in (driver.require_alive, driver.load, lambda: driver.between_requests(lambda: 1)):
            with pytest.raises(ServiceError, match=expected):
                call()
        driver.close()
        driver.require_alive()  # it is closed in good order
        assert not driver._streams


# --- what a request costs the others ----------------------------------------------------------

LONG = [7, 3, 9, 1, 4] * 60


@pytest.mark.parametrize("chunks_at_once", [1, 4])
def test_a_step_of_the_others_between_any_two_layers(
    tiny: Tiny, chunks_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both take the same time; also where chunks go through each layer side by side."""
    with batching(tiny("llama-gqa")) as (system, driver):
        engine, ticks, going = driver.engine, itertools.count(), threading.Event()
        engine.chunks_at_once = chunks_at_once
        driver._scheduler._turns = Turns(lambda: next(ticks))
        order: list[str] = []

        def noted(name: str, is_of_prompt: Callable[..., bool] = lambda *given: True) -> None:
            """Note each call of a prompt's layers, or of steps, once all are to go."""
            call = getattr(engine, name)

            def noting(*given: Any, **named: Any) -> Any:
                assert going.wait(60)
                if is_of_prompt(*given):
                    order.append(name)
                return call(*given, **named)

            monkeypatch.setattr(engine, name, noting)

        noted("step")
        noted("run_layer", lambda layer, num_tokens, *rest: num_tokens >= MATRIX_TOKENS)
        first = start(driver, greedy([5, 6], 60))
        while driver.load().num_running == 0:
            pass
        second = start(driver, greedy(LONG, 60))
        while driver.load().num_waiting == 0:
            pass
        going.set()
        answers = [first.end().ids, second.end().ids]
        num_layers = -(-len(LONG) // system.max_tokens) * system.config.num_layers
        assert order.count("run_layer") >= num_layers - system.config.num_layers
        places = [at for at, what in enumerate(order) if what == "run_layer"]
        while_both = order[places[0] : places[-1] + 1]
        assert ("run_layer", "run_layer") not in set(itertools.pairwise(while_both))
        alone = [complete(driver, greedy(ids, 60)).ids for ids in ([5, 6], LONG)]
        assert answers == alone


def embedding_of(ids: Any, request_id: str = "") -> GenerateRequest:
    prompt = np.asarray(ids).tolist()
    return GenerateRequest(
        SamplingParams(), prompt_ids=prompt, request_id=request_id, wants_embedding=True
    )


def prompt_of(length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(length).integers(0, VOCAB_SIZE, length).tolist()
    return ids


def expected_mean(checkpoint: TinyCheckpoint) -> np.ndarray:
    """The mean of transformers' hidden states of `ids`, not projected to another width."""

    def compute() -> np.ndarray:
        import torch

        base = checkpoint._model(torch.float32).base_model
        if hasattr(base, "decoder"):
            base.decoder.project_out = None
        with torch.no_grad():
            states = base(torch.tensor(checkpoint.ids)[None]).last_hidden_state[0]
        found: np.ndarray = states.double().mean(0).numpy()
        return found

    return checkpoint._kept("mean state", checkpoint.ids, compute)


@pytest.mark.parametrize("variant", ["opt-postnorm", "gemma2", "gemma4"])
def test_an_embedding_is_the_mean_of_transformers_states(tiny: Tiny, variant: str) -> None:
    checkpoint = tiny(variant)
    with batching(checkpoint, "dense", context=64) as (_, driver):
        result = complete(driver, embedding_of(checkpoint.ids))
    assert (result.ids, result.text, result.finish_reason) == ([], "", "stop")
    assert result.num_prompt_tokens == len(checkpoint.ids)
    found = np.array(result.embedding)
    np.testing.assert_array_equal(found, found.astype(np.float32))
    assert relative_difference(found, expected_mean(checkpoint)) < 1e-5


def test_models_whose_layers_end_in_the_head_embed_no_texts(tiny: Tiny) -> None:
    refused = pytest.raises(UsageError, match="computes no embeddings of texts")
    with batching(tiny("gemma4-e"), "dense") as (_, driver), refused:
        complete(driver, embedding_of([1]))


@pytest.mark.sweep(mode=["exact"])
@pytest.mark.parametrize(("mode", "copying"), [("sign", False), ("exact", True)])
def test_embeddings_have_the_same_bits_in_any_company(tiny: Tiny, mode: str, copying: bool) -> None:
    """Alone, beside other prompts and answers, and with a KV cache that was lost on the way."""
    prompts = [prompt_of(length) for length in (1, 2, 31, 33, 70, 200)]
    options = {"kv_positions": 4 * CONTEXT, "copying": copying}
    with batching(tiny("llama-relu"), mode, **options) as (_, driver):
        alone = [complete(driver, embedding_of(ids)).embedding for ids in prompts]
        assert len({tuple(found or ()) for found in alone}) == len(prompts)
        for turn in range(2):
            running = []
            for number, ids in enumerate(prompts):
                running.append(start(driver, random_request(number)))
                running.append(start(driver, embedding_of(ids, f"embedding {number} in {turn}")))
            for _ in range(10 * turn):
                driver._scheduler.between_steps(driver._scheduler.recompute_all)
                threading.Event().wait(0.001)
            results = [one.end() for one in running]
            assert [result.embedding for result in results[1::2]] == alone
            assert [result.embedding for result in results[::2]] == [None] * len(prompts)
