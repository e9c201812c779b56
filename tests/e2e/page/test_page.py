"""The chat page over a real system, in a browser that may reach nothing but this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hotcold.actors.protocol.messages import GenerateRequest, Generation, SystemConfig
from hotcold.actors.system import System
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import SamplingParams
from tests import reference
from tests.e2e.page_server import served_page
from tests.e2e.page_visit import QUESTION, ask, ids_of, plain, read_answer

MESSAGE = {"role": "user", "content": QUESTION}


@pytest.fixture(scope="module")
def system(local_ray: None) -> Iterator[System]:
    config = SystemConfig(str(DEMO_DIRECTORY), num_cpu_actors=2, num_threads=2, context_length=1024)
    with System.start(config) as running:
        yield running


@pytest.fixture(scope="module")
def address(system: System) -> Iterator[str]:
    with served_page({"demo": system}) as found:
        yield found


def completed(system: System) -> Generation:
    sampling = replace(SamplingParams.defaults(DEMO_DIRECTORY), max_tokens=512)
    return system.complete(GenerateRequest(sampling, messages=[MESSAGE]))


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
    reference.reference_logits(DEMO_DIRECTORY, ids)
    return sum(found)


def count(page: Any, kind: str) -> str:
    text: str = page.inner_text(f'#live [data-count="{kind}"]')
    return text.replace(",", "")


def test_the_answer_is_the_systems_and_the_map_shows_who_was_computed(
    open_page, system, monkeypatch
) -> None:
    page = open_page()
    ask(page, QUESTION)
    shown = read_answer(page)
    answer = completed(system)
    assert plain(shown) == plain(answer.text)
    assert page.locator("#chat .message.user").count() == 1
    assert page.input_value("#question textarea") == ""
    page.wait_for_selector("#live [data-polling=no]")
    counts = {kind: int(count(page, kind)) for kind in ("computed", "gate", "skipped")}
    # The last token was chosen, and not computed any more.
    expected = fired_neurons(monkeypatch, [*ids_of(MESSAGE), *answer.ids[:-1]])
    assert counts["computed"] == pytest.approx(expected, rel=0.01)  # gates about zero, in float32
    assert counts["skipped"] == 0
    assert sum(counts.values()) == system.call("telemetry").neurons.num_neurons.sum()
    page.focus("#live canvas")
    page.keyboard.press("ArrowRight")
    assert "layer 0, neurons 30–59" in page.inner_text('#live [data-show="where"]')
    page.select_option("#live select", "mean")
    page.wait_for_function(
        "document.querySelector('#live canvas').ariaLabel.includes('mean token')"
    )
    mean = count(page, "computed")
    assert "." in mean and float(mean) > 0  # tenths, whatever the mean is
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
    page.keyboard.press("Shift")
    page.wait_for_function("window.polling.includes('yes') && window.polling.at(-1) == 'no'")
    assert count(page, "computed") == mean  # a finished answer's stay
    for name in ("driver", "attention", "cpu0", "cpu1"):  # silent while the machine is busy
        page.wait_for_function(
            "t => document.querySelector('#live [data-show=actors]').innerText.includes(t)",
            arg=f"{name}\t● alive",
        )
