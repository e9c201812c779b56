"""How the chat page looks and is operated: widths, themes, keyboard, screen readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from hotcold.model.errors import ServiceError
from tests.e2e.commands import CHECKOUT
from tests.e2e.page_visit import (
    QUESTION,
    ask,
    set_numbers,
    until,
    wait_for_answer,
)

PHONE = {"width": 390, "height": 844, "has_touch": True, "is_mobile": True}


def violations(page: Any, rules: Sequence[str] = ()) -> list[str]:
    """What axe finds wrong once all parts are there, by rule and place; `rules` instead of all."""
    from axe_playwright_python.sync_playwright import Axe

    page.wait_for_selector("p.loading", state="detached")  # of a part that is not there yet
    options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
    found = Axe().run(page, options=options).response["violations"]
    return [f"{rule['id']}: {node['html'][:200]}" for rule in found for node in rule["nodes"]]


def settled(page: Any) -> None:
    """Until nothing fades in or out, whose colours axe would take for the last ones."""
    page.wait_for_function(
        "document.getAnimations().every(each => each.playState == 'finished'"
        " || each.effect.getTiming().iterations > 1)"
    )


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize(
    ("scheme", "rules"),
    [("light", ()), ("dark", ["color-contrast", "link-in-text-block"])],  # which colours change
)
def test_axe_finds_no_violation(open_page, book, scheme, rules) -> None:
    page = open_page(color_scheme=scheme)
    assert violations(page, rules) == []
    book.held_at = 50
    ask(page, QUESTION)
    page.wait_for_selector("#chat pre")
    assert violations(page, rules) == []
    page.click("#ask .stop-button")
    wait_for_answer(page)
    page.locator("#chat .message.bot").hover()
    settled(page)
    assert violations(page, rules) == []
    set_numbers(page, {"max-tokens": "3"})
    assert violations(page, rules) == []
    page.keyboard.press("Escape")
    book.reset()
    book.num_tokens, book.error = 0, ServiceError("the cpu0 service died")
    ask(page, QUESTION)
    page.wait_for_selector("#chat .problem")
    page.get_by_role("button", name="Delete").click()
    page.locator("#acts button:enabled", has_text="Undo").wait_for()
    page.get_by_role("tab", name="Placement").click()
    page.wait_for_selector("#placement table")
    settled(page)
    assert violations(page, rules) == []


def test_on_a_phone_the_list_is_a_drawer_and_the_panel_takes_the_chats_place(
    open_page, book
) -> None:
    """Nothing has to be scrolled sideways, and a machine without a GPU is told of none."""
    page = open_page(**PHONE)

    def width(name: str) -> int:
        shown = page.locator(name)
        shown.wait_for()
        return shown.evaluate("shown => Math.max(shown.scrollWidth, shown.offsetWidth)")

    assert not page.is_visible("#side") and not page.is_visible("#panel")
    assert violations(page) == []
    ask(page, "What is a_very_long_name_" + "x" * 200 + "?")
    wait_for_answer(page)
    assert width("#chat .bubble-wrap") <= 390
    field = page.locator("#ask").bounding_box()
    assert 844 - 80 < field["y"] + field["height"] < 844  # at the foot, whatever is said above
    page.get_by_role("button", name="Conversations").click()
    assert page.is_visible("#side")
    assert page.evaluate("document.activeElement.closest('#side') != null")
    assert violations(page) == []
    page.locator("#rows label").click()
    page.wait_for_selector("#side", state="hidden")
    page.get_by_role("button", name="Conversations").click()
    page.mouse.click(380, 500)  # on what lies behind it
    page.wait_for_selector("#side", state="hidden")
    page.get_by_role("button", name="Neurons", exact=True).click()
    assert page.is_visible("#live") and not page.is_visible("#question")
    assert page.evaluate("document.activeElement.closest('#panel') != null")
    page.wait_for_selector("#live [data-actor=gpu]")
    assert violations(page) == []
    assert width("#panel") <= 390
    text = page.evaluate("document.body.innerText + document.querySelector('canvas').ariaLabel")
    assert "attention" in text and "computed" in text
    assert not any(word in text.lower() for word in ("gpu", "hot,", "cold,"))
    assert page.input_value("#live select") == "last"
    assert page.locator("#live option[value=chosen]").count() == 0  # it is no mixture
    page.get_by_role("tab", name="Placement").click()
    page.wait_for_selector("#placement table")
    assert width("#panel") <= 390
    page.get_by_role("button", name="Settings", exact=True).click()
    assert width("#settings") <= 390
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("button", name="Neurons", exact=True).click()
    page.wait_for_selector("#question")
    assert not page.is_visible("#live")


def test_theme_and_panel_are_as_they_were_left(open_page) -> None:
    page = open_page(color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Light or dark").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.wait_for_selector("#live [data-actor=driver]")
    assert "Each row is a layer" in page.inner_text("#live")
    page.locator("#live summary").first.click()
    assert not page.is_visible("#live canvas")
    page.get_by_role("button", name="Neurons", exact=True).click()
    assert not page.is_visible("#panel")
    page.reload()
    page.wait_for_selector("body[data-panel=closed] #question textarea")
    page.wait_for_function(f"{ground} == '{dark}'")
    page.get_by_role("button", name="Neurons", exact=True).click()
    page.wait_for_selector("#live [data-actor=driver]")
    page.emulate_media(color_scheme="dark")
    page.emulate_media(color_scheme="light")
    until(lambda: page.evaluate(ground) == dark)


def test_the_tab_shows_hotcolds_own_sign(address) -> None:
    found = httpx.get(f"{address}favicon.ico")  # browsers ask for it unasked
    assert found.content == CHECKOUT.joinpath("ui/page/assets/favicon.svg").read_bytes()
    assert found.headers["content-type"].startswith("image/svg")


def test_a_picture_in_a_text_is_not_fetched(open_page, book) -> None:
    page = open_page()
    blocked: list[str] = []
    page.on("console", lambda message: blocked.append(message.text))
    ask(page, "![a](http://example.com/a.png)")
    wait_for_answer(page)
    until(lambda: page.title() != "" and any("example.com/a.png" in text for text in blocked))


def test_all_controls_are_reached_by_tab(open_page, book) -> None:
    page = open_page()
    ask(page, QUESTION)
    wait_for_answer(page)
    describe = """() => {
        const found = document.activeElement;
        const id = found.closest('[id]:not([id^="component"])')?.id;
        return [id, found.className, found.ariaLabel, found.innerText?.trim()];
    }"""
    reached: set[str] = set()
    for tab in ("Live", "Settings"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_selector("#live canvas" if tab == "Live" else "#min-p input")
        page.evaluate("document.activeElement.blur()")
        for _ in range(80):
            page.keyboard.press("Tab")
            reached.update(page.evaluate(describe))
    names = "new rows question system-prompt temperature top-k top-p min-p seed max-tokens"
    labels = (
        "Retry,Edit,Copy message,Rename,Delete,Export,Import,Send,Conversations,Light or dark,"
        "Neurons,Settings,map,Which step the map shows,Live"  # arrow keys go on to the other tabs
    )
    missing = {*names.split(), *labels.split(",")} - reached
    assert not missing
