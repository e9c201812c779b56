"""Which values the list of conversations shows: `list.js` alone in a browser, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from hotcold.ui.page import asset, script
from hotcold.ui.page.branches import restored
from hotcold.ui.page.conversation_list import listed
from hotcold.ui.page.conversations import ChatHistory, Conversation

pytestmark = pytest.mark.timeout(300)

# What Gradio gives a part of the page: its element, its value, and what is called with a new one.
_START = """
([html, code, value]) => {
  document.body.innerHTML = html;
  window.props = { value };
  const watch = (name, changed) => (window.change = (newer) => {
    window.props.value = newer;
    changed();
  });
  new Function("element", "props", "trigger", "watch", code)(
    document.body, window.props, () => {}, watch,
  );
}
"""


def told(*questions: str) -> dict[str, Any]:
    """What the server says now of conversations that begin with these questions."""
    history = ChatHistory()
    history.conversations = [
        Conversation(restored([{"role": "user", "content": question}])) for question in questions
    ]
    return listed(history)


@pytest.fixture
def page(browser: Any) -> Any:
    found = browser.new_page()
    yield found
    found.close()


def rows(page: Any, value: dict[str, Any] | None = None) -> list[str]:
    """What is shown, after `value` came."""
    if value is not None:
        page.evaluate("value => window.change(value)", value)
    found: list[str] = page.locator(".open").all_inner_texts()
    return found


def test_an_older_value_that_comes_later_is_dropped(page: Any) -> None:
    first, second, third = told("one"), told("one", "two"), told("one", "two", "three")
    page.evaluate(_START, [asset("list.html"), script("list.js"), first])
    assert rows(page) == ["one"]
    assert rows(page, third) == ["one", "two", "three"]
    assert rows(page, second) == ["one", "two", "three"]
    assert rows(page, told("four")) == ["four"]


def test_another_servers_values_are_taken_whatever_their_numbers(page: Any) -> None:
    page.evaluate(_START, [asset("list.html"), script("list.js"), told("one")])
    restarted = [told("two") | {"server": "another", "at": at} for at in (0, -1)]
    assert rows(page, restarted[0]) == ["two"]
    assert rows(page, restarted[1] | {"rows": []}) == ["two"]  # its own are in order
    assert rows(page, told("three")) == ["three"]


def test_rows_stay_while_an_answer_is_painted(page: Any) -> None:
    """A click whose row is replaced before the button is let go would be lost."""
    value = told("one", "two")
    page.evaluate(_START, [asset("list.html"), script("list.js"), value])
    page.evaluate("window.first = document.querySelector('.open')")
    assert rows(page, value | {"at": value["at"] + 1}) == ["one", "two"]
    assert page.evaluate("window.first.isConnected")
    assert rows(page, value | {"at": value["at"] + 2, "removed": "three"}) == ["one", "two"]
    assert page.inner_text("[role=status]") == "“three” is deleted."
