"""What tests of commands and pages share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.browser import running_browser
from tests.e2e.page_visit import TIMEOUT_MS
from tests.e2e.server import WAIT_S, Server, serving
from tests.e2e.word_model import make_word_model


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """`hotcold serve` of the demo model, for tests that leave it as it was."""
    with serving("--kv-tokens", "2048", "--max-tokens-limit", "450", "--queue", "4") as running:
        yield running


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are words; its system is called so, too."""
    return make_word_model(tmp_path_factory.mktemp("words") / "words")


@pytest.fixture(scope="session")
def openai() -> Any:
    """OpenAI's package, which takes seconds to import."""
    return importlib.import_module("openai")


@pytest.fixture(scope="session")
def client(openai: Any, server: Server) -> Any:
    """OpenAI's client; its types know the fields of OpenAI alone."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=WAIT_S)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from running_browser()


@pytest.fixture
def open_page(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """open_page(width): a page of a new visitor at `address`. No request may leave 127.0.0.1.

    `first`: a script that runs in it before all others.
    The browser finds no other host (`browser.py`).
    """
    foreign: list[str] = []
    errors: list[str] = []
    contexts: list[Any] = []

    def note(request: Any) -> None:
        is_here = request.url.startswith((address, "data:", "blob:"))
        if not is_here and request.failure != "csp":  # which asked nobody
            foreign.append(f"{request.url}: {request.failure}")

    def make(width: int = 1280, height: int = 900, first: str = "", **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.on("requestfinished", note)
        context.on("requestfailed", note)
        contexts.append(context)
        page = context.new_page()
        page.add_init_script(first)
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_selector("body[data-chat=ready][data-state=ready] #question textarea")
        return page

    yield make
    for context in contexts:
        context.close()
    assert not foreign
    assert not errors
