"""What tests of commands and pages share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.browser import chromium, find_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        find_chromium()
    except RuntimeError as error:
        pytest.skip(str(error))
    with chromium() as found:
        yield found
