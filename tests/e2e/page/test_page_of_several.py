"""The pages of a server of several models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.page_server import served_page
from tests.e2e.page_visit import QUESTION, ask, read_answer
from tests.e2e.stand_in import StandIn


@pytest.fixture(scope="module")
def books() -> dict[str, StandIn]:
    return {name: StandIn(text=f"{name} says:", num_tokens=2) for name in ("one", "org/two")}


@pytest.fixture(scope="module")
def address(books: dict[str, StandIn]) -> Iterator[str]:
    with served_page(books) as found:
        yield found


def test_a_model_is_chosen_in_the_bar(
    open_page: Any, address: str, books: dict[str, StandIn]
) -> None:
    page = open_page()
    choice = page.get_by_label("Model", exact=True)
    assert choice.locator("option").all_inner_texts() == ["one", "org/two"]
    for name, place in (("org/two", "model/2-org-two/"), ("one", "")):
        choice.select_option(label=name)
        page.wait_for_url(f"{address}{place}")
        page.wait_for_selector("body[data-chat=ready][data-state=ready] #question textarea")
        assert choice.locator("option:checked").inner_text() == name
        assert page.title() == f"{name} – hotcold"
        page.get_by_role("button", name="New conversation").click()
        ask(page, QUESTION)
        assert read_answer(page).startswith(f"{name} says:")
        assert len(books[name].requests) == 1
