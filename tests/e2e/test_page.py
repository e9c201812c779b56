"""The chat page in a real browser, which may reach nothing but this machine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.driver.text.prompts import Prompts
from actors.protocol.messages import GenerateRequest, Generation, SystemConfig
from actors.system import System
from model import reference
from model.config.build import read_config
from model.sampling import SamplingParams
from tests.e2e.page_server import LongWinded, served_page

pytestmark = pytest.mark.timeout(300)
DEMO = Path(__file__).resolve().parents[2] / "demo"
UI = DEMO.parent / "ui" / "page"
QUESTION = "What does textwrap.dedent do?"
OTHER = "What does os.path.join do?"
PATIENCE_MS = 120_000


@pytest.fixture(scope="module")
def system(local_ray: None) -> Iterator[LongWinded]:
    config = SystemConfig(str(DEMO), num_cpu_actors=2, num_threads=2, context_length=1024)
    with System.start(config) as running:
        yield LongWinded(running)


@pytest.fixture(scope="module")
def address(system: LongWinded) -> Iterator[str]:
    with served_page(system, "demo") as found:
        yield found


@pytest.fixture
def open_page(browser, address) -> Iterator[Callable[..., Any]]:
    """open_page(width): a page of a new visitor. No request may leave 127.0.0.1."""
    foreign: list[str] = []
    errors: list[str] = []
    contexts: list[Any] = []

    def only_here(route: Any) -> None:
        if route.request.url.startswith((address, "data:", "blob:")):
            route.continue_()
        else:
            foreign.append(route.request.url)
            route.abort()

    def make(width: int = 1280, height: int = 900, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.route("**/*", only_here)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_selector("#conversations input:checked")
        return page

    yield make
    for context in contexts:
        context.close()
    assert not foreign
    assert not errors


def ask(page: Any, question: str) -> None:
    """Ask, again where the page has just been painted and lost what was in its field."""
    from playwright.sync_api import TimeoutError as NotShown

    count = page.locator("#chat .message").count()
    for patience_ms in (30_000, 30_000, 60_000):
        page.fill("#question textarea", question)
        page.press("#question textarea", "Enter")
        try:
            page.wait_for_function(
                "n => document.querySelectorAll('#chat .message').length > n",
                arg=count,
                timeout=patience_ms,
            )
            return
        except NotShown:
            continue
    raise AssertionError(f"the page does not show the question {question!r}")


def set_numbers(page: Any, values: dict[str, str]) -> None:
    """Fill fields, again where the page has just been made and overwrites one."""

    def are_set() -> bool:
        wrong = [name for name in values if page.input_value(f"#{name} input") != values[name]]
        for name in wrong:
            page.fill(f"#{name} input", values[name])
        return not wrong

    page.get_by_role("button", name="Settings").click()
    until(are_set)


def wait_for_answer(page: Any) -> str:
    """The last answer, once its figures stand below it."""
    page.wait_for_function("document.querySelector('#status').innerText.includes('tokens at')")
    return str(page.locator("#chat .message.bot").last.inner_text())


def plain(text: str) -> str:
    """Letters and digits: what Markdown leaves of a text."""
    return re.sub(r"[\W_]+", "", text)


def completed(system: LongWinded, question: str, max_tokens: int = 512) -> Generation:
    sampling = replace(SamplingParams.defaults(DEMO), max_tokens=max_tokens)
    messages = [{"role": "user", "content": question}]
    return system.system.complete(GenerateRequest(sampling, messages=messages))


def ids_of(*messages: dict[str, str]) -> list[int]:
    """The prompt of a conversation."""
    prompts = Prompts(DEMO, read_config(DEMO), 1024)
    return prompts.ids(GenerateRequest(SamplingParams(), messages=list(messages)))


@pytest.fixture
def long_winded(system: LongWinded) -> Iterator[None]:
    system.is_on = True
    yield
    system.is_on = False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_answer_equals_the_systems(open_page, system) -> None:
    page = open_page()
    ask(page, QUESTION)
    assert plain(wait_for_answer(page)) == plain(completed(system, QUESTION).text)
    assert page.locator("#chat .message.user").count() == 1
    assert page.input_value("#question textarea") == ""


def test_an_answer_comes_in_a_stream(open_page, system, long_winded) -> None:
    page = open_page()
    page.evaluate(
        """() => {
            window.lengths = new Set();
            new MutationObserver(() => {
                const said = document.querySelector('#chat .message.bot');
                if (said) window.lengths.add(said.innerText.length);
            }).observe(document.querySelector('#chat'), {subtree: true, childList: true,
                                                         characterData: true});
        }"""
    )
    ask(page, QUESTION)
    page.wait_for_function("window.lengths.size >= 4")
    wait_for_answer(page)


def test_stop_ends_an_answer(open_page, system, long_winded) -> None:
    """A thousand tokens take less than a second: where the click came too late, once more."""
    from playwright.sync_api import TimeoutError as TooLate

    for _ in range(10):
        page = open_page()
        set_numbers(page, {"max-tokens": "1000"})
        ask(page, QUESTION)
        page.wait_for_selector("#chat .message.bot")
        with suppress(TooLate):
            page.click("#stop button, button#stop", timeout=2000)
        wait_for_answer(page)
        status = page.inner_text("#status")
        if "stopped" in status:
            break
    assert "stopped" in status
    assert 0 < int(status.split()[0]) < 1000
    until(lambda: system.call("telemetry").num_running == 0)
    assert not page.is_enabled("button#stop")


def test_retry_repeats_and_undo_takes_back(open_page, system) -> None:
    page = open_page()
    ask(page, QUESTION)
    first, asked = wait_for_answer(page), len(system.requests)
    wait_until_kept(page)  # the event has ended: no button is put in another's place any more
    page.get_by_role("button", name="Retry").click()
    until(lambda: len(system.requests) == asked + 1)
    page.wait_for_function(
        "text => [...document.querySelectorAll('#chat .message.bot')].at(-1)?.innerText == text"
        " && document.querySelector('#status').innerText.includes('tokens at')",
        arg=first,
    )
    assert system.requests[-1].prompt_ids == ids_of({"role": "user", "content": QUESTION})
    assert page.locator("#chat .message.user").count() == 1
    wait_until_kept(page)
    page.get_by_role("button", name="Undo").click()
    page.wait_for_function("document.querySelectorAll('#chat .message.user').length == 0")
    assert page.input_value("#question textarea") == QUESTION


def test_settings_reach_the_request(open_page, system) -> None:
    page = open_page()
    settings = {"temperature": "0.7", "top-k": "5", "top-p": "0.5", "min-p": "0.1"}
    set_numbers(page, {**settings, "max-tokens": "3"})
    page.fill("#system-prompt textarea", "Be brief.")
    page.fill("#seed textarea, #seed input", "42")
    ask(page, QUESTION)
    wait_for_answer(page)
    request = system.requests[-1]
    assert request.sampling == SamplingParams(3, 0.7, 5, 0.5, 0.1, seed=42)
    told = {"role": "system", "content": "Be brief."}
    assert request.prompt_ids == ids_of(told, {"role": "user", "content": QUESTION})
    page.fill("#seed textarea, #seed input", "no number")
    page.fill("#question textarea", OTHER)
    page.press("#question textarea", "Enter")
    page.wait_for_function("document.querySelector('#status').innerText.includes('seed is')")
    assert page.input_value("#question textarea") == OTHER


def wait_until_kept(page) -> None:
    """Until the browser has kept the same for a second: what is asked is kept bit by bit."""
    before, num_equal = None, 0
    for _ in range(100):
        kept = page.evaluate("localStorage.getItem('hotcold-conversations')")
        num_equal = num_equal + 1 if kept == before else 0
        if num_equal == 4:
            return
        before = kept
        page.wait_for_timeout(250)
    raise AssertionError("the browser keeps something else all the time")


def test_two_conversations_stay_apart(open_page, system, long_winded) -> None:
    page = open_page()
    set_numbers(page, {"max-tokens": "250"})
    ask(page, QUESTION)
    page.wait_for_selector("#chat .message.bot")
    page.click("button#new")
    page.wait_for_function("document.querySelectorAll('#chat .message').length == 0")
    ask(page, OTHER)
    both = [page.locator("#conversations label").filter(has_text=q) for q in (QUESTION, OTHER)]
    for label, question in zip(both, (QUESTION, OTHER), strict=True):
        label.click()
        for _ in range(2):  # the second time with its whole answer
            page.wait_for_function(
                "q => [...document.querySelectorAll('#chat .message.user')]"
                ".map(message => message.innerText.trim()).join() == q",
                arg=question,
            )
            wait_for_answer(page)
    asked = [request.prompt_ids for request in system.requests[-2:]]
    assert asked == [ids_of({"role": "user", "content": q}) for q in (QUESTION, OTHER)]
    kept = page.evaluate("localStorage.getItem('hotcold-conversations')")
    page.click("button#delete")
    page.wait_for_function("document.querySelectorAll('#conversations label').length == 1")
    page.wait_for_function("k => localStorage.getItem('hotcold-conversations') != k", arg=kept)
    wait_until_kept(page)
    page.reload()
    page.wait_for_function(
        "q => document.querySelector('#conversations')?.innerText.includes(q)", arg=QUESTION
    )
    assert OTHER not in page.inner_text("#conversations")


def fired_neurons(monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> int:
    """Of all layers, for the last of `ids`, by the float64 reference."""
    found: list[int] = []
    compute = reference._ffn

    def counting(config, weights, layer, x, thresholds):
        part = slice(int(weights.offsets[layer]), int(weights.offsets[layer + 1]))
        gates = reference._linear(x[-1:], weights.gate[part], weights.gate_bias[part])
        found.append(int((gates > 0).sum()))
        return compute(config, weights, layer, x, thresholds)

    monkeypatch.setattr(reference, "_ffn", counting)
    reference.reference_logits(DEMO, ids)
    return sum(found)


def test_the_tab_shows_hotcolds_own_sign(open_page, address) -> None:
    found = open_page().request.get(f"{address}favicon.ico")  # browsers ask for it unasked
    assert found.body() == (UI / "favicon.svg").read_bytes()
    assert found.headers["content-type"].startswith("image/svg")


def test_the_map_shows_who_was_computed(open_page, system, monkeypatch) -> None:
    page = open_page()
    ask(page, QUESTION)
    wait_for_answer(page)
    page.wait_for_function(
        "document.querySelector('#live [data-polling]')?.dataset.polling == 'no'"
    )
    shown = {
        kind: int(page.inner_text(f'#live [data-count="{kind}"]').replace(",", ""))
        for kind in ("hot", "computed", "gate", "skipped")
    }
    answer = completed(system, QUESTION)
    prompt = system.requests[-1].prompt_ids
    # The last token was chosen, and not computed any more.
    expected = fired_neurons(monkeypatch, [*prompt, *answer.ids[:-1]])
    assert shown["computed"] == pytest.approx(expected, rel=0.01)  # gates about zero, in float32
    told = system.call("telemetry").neurons
    if told.num_steps:  # the same watch still lasts
        assert shown["computed"] == told.last_computed.sum()
    assert shown["hot"] == shown["skipped"] == 0
    assert sum(shown.values()) == told.num_neurons.sum()
    page.focus("#live canvas")
    page.keyboard.press("ArrowRight")
    assert "layer 0, neurons 30–59" in page.inner_text('#live [data-show="where"]')
    page.get_by_label("running mean").check()
    page.wait_for_function(
        "document.querySelector('#live canvas').ariaLabel.includes('mean token')"
    )
    mean = page.inner_text('#live [data-count="computed"]').replace(",", "")
    assert "." in mean  # tenths, whatever the mean is
    assert float(mean) > 0
    for name in ("driver", "gpu", "cpu0", "cpu1"):  # silent while the machine is busy
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


def test_a_picture_in_a_text_is_not_fetched(open_page) -> None:
    page = open_page()
    blocked = []
    page.on("console", lambda message: blocked.append(message.text))
    ask(page, "![a](http://example.com/a.png)")
    wait_for_answer(page)
    until(lambda: any("example.com/a.png" in text for text in blocked))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(open_page, scheme) -> None:
    page = open_page(390, 844, color_scheme=scheme)
    ask(page, "What is a_very_long_name_" + "x" * 200 + "?")
    wait_for_answer(page)
    page.get_by_role("button", name="Settings").click()
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) <= 390
    page.get_by_role("tab", name="Placement").click()
    page.wait_for_selector("#placement svg")
    assert page.evaluate(width) <= 390


def test_the_placement_tab_tells_who_holds_what(open_page) -> None:
    page = open_page()
    page.get_by_role("tab", name="Placement").click()
    page.wait_for_selector("#placement svg")
    text = page.inner_text("#placement")
    assert "hotcold plan" in text
    rows = [line.split("\t") for line in text.splitlines() if line.startswith("cpu")]
    assert [row[:3] for row in rows] == [[f"cpu{i}", "3,840", "50.0%"] for i in range(2)]
    assert np.sum([float(row[3].rstrip("%")) for row in rows]) == pytest.approx(100, abs=0.11)


def test_all_controls_are_reached_by_tab(open_page) -> None:
    page = open_page()
    ask(page, QUESTION)
    wait_for_answer(page)
    page.get_by_role("button", name="Settings").click()
    page.wait_for_selector("#min-p input")
    page.evaluate("document.activeElement.blur()")
    describe = """() => {
        const found = document.activeElement;
        const named = found.closest('#new, #delete, #conversations, #chat, #question, #send,' +
            ' #system-prompt, #temperature, #top-k, #top-p, #min-p, #seed, #max-tokens, #live');
        return [named?.id || '', found.tagName, found.getAttribute('aria-label') || '',
                found.innerText?.trim() || ''];
    }"""
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        name, tag, label, text = page.evaluate(describe)
        reached |= {name, f"{name} {tag}", label, text}
    wanted = "new delete conversations question send temperature top-k top-p min-p seed max-tokens"
    missing = {*wanted.split(), "system-prompt", "live CANVAS", "live INPUT", "Retry", "Undo"}
    assert not missing - reached
    assert "Chat" in reached  # the tabs; arrow keys go on to the next


def test_a_visitor_who_leaves_frees_the_slot(open_page, system, long_winded) -> None:
    page = open_page()
    set_numbers(page, {"max-tokens": "1000"})
    ask(page, QUESTION)
    page.wait_for_selector("#chat .message.bot")
    page.context.close()
    until(lambda: system.call("telemetry").num_running == 0)
