"""The browser and the page over a stand-in that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.browser import running_browser
from tests.e2e.page_server import served_page
from tests.e2e.stand_in import StandIn


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    yield from running_browser()


@pytest.fixture(scope="package")
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture(scope="package")
def address(stand_in: StandIn) -> Iterator[str]:
    """Of a page over a stand-in; tests over a real system have another."""
    with served_page({"demo": stand_in}) as found:
        yield found


@pytest.fixture
def book(stand_in: StandIn) -> Iterator[StandIn]:
    """The stand-in, with its short answer of before whatever a test makes of it."""
    stand_in.reset()
    yield stand_in
    stand_in.reset()
