"""What a request costs the others: one layer of one chunk at a time, and little once it is left."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hotcold.actors.driver.batches import Turns
from hotcold.actors.driver.driver import Driver
from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.actors.protocol.step_sizes import MATRIX_TOKENS
from hotcold.model.sampling import SamplingParams
from tests.actors.batching import batching, complete, start
from tests.conftest import TinyCheckpoint

Tiny = Callable[..., TinyCheckpoint]
LONG = [7, 3, 9, 1, 4] * 60


def greedy(ids: list[int], max_tokens: int, name: str) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(sampling, prompt_ids=ids, request_id=name)


class Hooks:
    """Notes layers of prompts and steps, and calls something when they begin."""

    def __init__(self, driver: Driver) -> None:
        self.order: list[str] = []
        self.begins: Callable[[str], None] = lambda what: None
        engine = driver.engine
        step, run_layer = engine.step, engine.run_layer

        def noted_step(*given: Any, **named: Any) -> Any:
            self._note("step")
            return step(*given, **named)

        def noted_layer(
            layer: int, num_tokens: int, next_layer: int, num_wanted: int | None = None
        ) -> None:
            if num_tokens >= MATRIX_TOKENS:
                self._note("layer")
            run_layer(layer, num_tokens, next_layer, num_wanted)

        engine.step = noted_step  # type: ignore[method-assign]
        engine.run_layer = noted_layer  # type: ignore[method-assign]

    def _note(self, what: str) -> None:
        self.begins(what)
        self.order.append(what)

    def count(self, what: str) -> int:
        return self.order.count(what)


@pytest.mark.parametrize("chunks_at_once", [1, 4])
def test_a_step_of_the_others_between_any_two_layers(tiny: Tiny, chunks_at_once: int) -> None:
    """Where both take the same time; also where chunks go through each layer side by side."""
    with batching(tiny("llama-gqa")) as (system, driver):
        driver.engine.chunks_at_once = chunks_at_once
        hooks, ticks, going = Hooks(driver), itertools.count(), threading.Event()
        driver._scheduler._turns = Turns(lambda: next(ticks))
        hooks.begins = lambda what: None if going.wait(60) else pytest.fail("nothing goes")
        first = start(driver, greedy([5, 6], 60, "first"))
        while driver.load().num_running == 0:
            pass
        second = start(driver, greedy(LONG, 60, "second"))
        while driver.load().num_waiting == 0:
            pass
        going.set()
        answers = [first.end().ids, second.end().ids]
        num_layers = -(-len(LONG) // system.max_tokens) * system.config.num_layers
        assert hooks.count("layer") >= num_layers - system.config.num_layers
        places = [at for at, what in enumerate(hooks.order) if what == "layer"]
        while_both = hooks.order[places[0] : places[-1] + 1]
        assert ("layer", "layer") not in set(itertools.pairwise(while_both))
        alone = [complete(driver, greedy(ids, 60, "alone")).ids for ids in ([5, 6], LONG)]
        assert answers == alone


def test_who_waits_and_leaves_is_gone_before_the_next_layer(tiny: Tiny) -> None:
    """Without any layer or step of its own, and without a place that becomes free."""
    with batching(tiny("llama-gqa"), num_slots=1) as (_, driver):
        hooks, reading = Hooks(driver), threading.Event()
        waiting_at: list[int] = []
        may_go_on = threading.Event()

        def hold(what: str) -> None:
            number = hooks.count("layer")
            if number == 2:
                reading.set()
                assert may_go_on.wait(60)
                driver.cancel("waits")
            if number >= 2:
                waiting_at.append(driver.load().num_waiting)

        hooks.begins = hold
        reads = start(driver, greedy(LONG, 1, "reads"))
        assert reading.wait(60)
        waits = start(driver, greedy(LONG, 1, "waits"))
        while driver.load().num_waiting == 0:
            pass
        may_go_on.set()
        result = waits.end()
        assert (result.finish_reason, result.ids, result.prefill_s) == ("cancelled", [], 0.0)
        assert reads.end().finish_reason == "length"
        assert waiting_at[0] == 1 and not any(waiting_at[1:])
        assert hooks.count("layer") < 2 * len(waiting_at)
