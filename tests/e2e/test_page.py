"""The chat page over a real system, in a browser that may reach nothing but this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotcold.actors.protocol.messages import GenerateRequest, Generation, SystemConfig
from hotcold.actors.system import System
from hotcold.model.sampling import SamplingParams
from tests import reference
from tests.e2e.page_server import LongWinded, served_page
from tests.e2e.page_visit import (
    OTHER,
    QUESTION,
    ask,
    begin_anew,
    click_in_row,
    ids_of,
    kept,
    plain,
    set_numbers,
    until,
    wait_for_answer,
)

pytestmark = pytest.mark.timeout(300)
DEMO = Path(__file__).resolve().parents[2] / "demo"


@pytest.fixture(scope="module")
def system(local_ray: None) -> Iterator[LongWinded]:
    config = SystemConfig(str(DEMO), num_cpu_actors=2, num_threads=2, context_length=1024)
    with System.start(config) as running:
        yield LongWinded(running)


@pytest.fixture(scope="module")
def address(system: LongWinded) -> Iterator[str]:
    with served_page(system, "demo") as found:
        yield found


def completed(system: LongWinded, question: str, max_tokens: int = 512) -> Generation:
    sampling = replace(SamplingParams.defaults(DEMO), max_tokens=max_tokens)
    messages = [{"role": "user", "content": question}]
    return system.system.complete(GenerateRequest(sampling, messages=messages))


@pytest.fixture
def long_winded(system: LongWinded) -> Iterator[None]:
    system.is_on = True
    yield
    system.is_on = False


def test_an_answer_equals_the_systems(open_page, system) -> None:
    page = open_page()
    ask(page, QUESTION)
    assert plain(wait_for_answer(page)) == plain(completed(system, QUESTION).text)
    assert page.locator("#chat .message.user").count() == 1
    assert page.input_value("#question textarea") == ""


@pytest.mark.thorough
def test_stop_ends_an_answer(open_page, system, long_winded) -> None:
    """A thousand tokens take less than a second: a click before or after them is tried again."""
    from playwright.sync_api import TimeoutError as TooLate

    for _ in range(10):
        page = open_page()
        set_numbers(page, {"max-tokens": "1000"})
        ask(page, QUESTION)
        page.wait_for_function("document.querySelector('#chat .message.bot')?.innerText.trim()")
        with suppress(TooLate):
            page.click("#ask .stop-button", timeout=2000)
        wait_for_answer(page)
        status = page.inner_text("#status")
        if "stopped" in status and not status.startswith("0 "):
            break
    assert "stopped" in status
    assert 0 < int(status.split()[0]) < 1000
    until(lambda: system.call("telemetry").num_running == 0)
    assert page.is_visible("#ask .submit-button") and not page.is_visible("#ask .stop-button")


def test_two_conversations_stay_apart(open_page, system, long_winded) -> None:
    page = open_page()
    set_numbers(page, {"max-tokens": "250"})
    ask(page, QUESTION)
    page.wait_for_selector("#chat .message.bot")
    begin_anew(page)
    ask(page, OTHER)
    both = [page.locator("#rows label").filter(has_text=q) for q in (QUESTION, OTHER)]
    for row, question in zip(both, (QUESTION, OTHER), strict=True):
        row.click()
        for _ in range(2):  # the second time with its whole answer
            page.wait_for_function(
                "q => [...document.querySelectorAll('#chat .message.user')]"
                ".map(message => message.innerText.trim()).join() == q",
                arg=question,
            )
            wait_for_answer(page)
    asked = [request.prompt_ids for request in system.requests[-2:]]
    assert asked == [ids_of({"role": "user", "content": q}) for q in (QUESTION, OTHER)]
    click_in_row(page, OTHER, "Delete", OTHER)
    page.wait_for_function("document.querySelectorAll('#rows label').length == 1")
    until(lambda: QUESTION in kept(page) and OTHER not in kept(page))
    page.reload()
    page.wait_for_function(
        "q => document.querySelector('#rows')?.innerText.includes(q)", arg=QUESTION
    )
    assert OTHER not in page.inner_text("#rows")


def fired_neurons(monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> int:
    """Of all layers, for the last of `ids`, by the float64 reference."""
    found: list[int] = []
    compute = reference._ffn

    def counting(config, weights, layer, x, thresholds):
        part = weights.part(layer)
        gates = reference._linear(x[-1:], weights.gate[part], weights.gate_bias[part])
        found.append(int((gates > 0).sum()))
        return compute(config, weights, layer, x, thresholds)

    monkeypatch.setattr(reference, "_ffn", counting)
    reference.reference_logits(DEMO, ids)
    return sum(found)


def test_the_map_shows_who_was_computed(open_page, system, monkeypatch) -> None:
    page = open_page()
    ask(page, QUESTION)
    wait_for_answer(page)
    page.wait_for_function(
        "document.querySelector('#live [data-polling]')?.dataset.polling == 'no'"
    )
    shown = {
        kind: int(page.inner_text(f'#live [data-count="{kind}"]').replace(",", ""))
        for kind in ("computed", "gate", "skipped")
    }
    answer = completed(system, QUESTION)
    prompt = system.requests[-1].prompt_ids
    # The last token was chosen, and not computed any more.
    expected = fired_neurons(monkeypatch, [*prompt, *answer.ids[:-1]])
    assert shown["computed"] == pytest.approx(expected, rel=0.01)  # gates about zero, in float32
    told = system.call("telemetry").neurons
    if told.num_steps:  # the same watch still lasts
        assert shown["computed"] == told.last_computed.sum()
    assert shown["skipped"] == 0
    assert sum(shown.values()) == told.num_neurons.sum()
    page.focus("#live canvas")
    page.keyboard.press("ArrowRight")
    assert "layer 0, neurons 30–59" in page.inner_text('#live [data-show="where"]')
    page.select_option("#live select", "mean")
    page.wait_for_function(
        "document.querySelector('#live canvas').ariaLabel.includes('mean token')"
    )
    mean = page.inner_text('#live [data-count="computed"]').replace(",", "")
    assert "." in mean  # tenths, whatever the mean is
    assert float(mean) > 0
    for name in ("driver", "attention", "cpu0", "cpu1"):  # silent while the machine is busy
        page.wait_for_function(
            "t => document.querySelector('#live [data-show=actors]').innerText.includes(t)",
            arg=f"{name}\t● alive",
        )


def test_the_map_of_a_finished_answer_stays(open_page, system) -> None:
    page = open_page()
    ask(page, QUESTION)
    wait_for_answer(page)
    page.wait_for_function(
        "document.querySelector('#live [data-polling]')?.dataset.polling == 'no'"
    )
    counted = page.inner_text('#live [data-count="computed"]')
    assert int(counted.replace(",", "")) > 0
    system.call("telemetry", 0.0)  # services count no more, and begin at zero when asked again
    page.evaluate(
        """() => {
            const panel = document.querySelector('#live [data-polling]');
            const now = performance.now();
            performance.now = () => now + 60000;  // long after the last question
            window.polling = [];
            new MutationObserver(() => window.polling.push(panel.dataset.polling))
                .observe(panel, {attributes: true, attributeFilter: ['data-polling']});
        }"""
    )
    page.focus("#live canvas")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("window.polling.includes('yes') && window.polling.at(-1) == 'no'")
    assert page.inner_text('#live [data-count="computed"]') == counted


def test_the_placement_tab_tells_who_holds_what(open_page) -> None:
    page = open_page()
    page.get_by_role("tab", name="Placement").click()
    page.wait_for_selector("#placement table")
    text = page.inner_text("#placement")
    assert "hotcold plan" in text
    rows = [line.split("\t") for line in text.splitlines() if line.startswith("cpu")]
    assert [row[:3] for row in rows] == [[f"cpu{i}", "3,840", "50.0%"] for i in range(2)]
    assert np.sum([float(row[3].rstrip("%")) for row in rows]) == pytest.approx(100, abs=0.11)


def test_a_visitor_who_leaves_frees_the_slot(open_page, system, long_winded) -> None:
    page = open_page()
    set_numbers(page, {"max-tokens": "1000"})
    ask(page, QUESTION)
    page.wait_for_selector("#chat .message.bot")
    page.context.close()
    until(lambda: system.call("telemetry").num_running == 0)
