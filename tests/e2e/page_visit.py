"""What a visitor does with the chat page, for tests in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable
from typing import Any

from hotcold.actors.driver.prompts import Prompts
from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.config.build import read_config
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.sampling import SamplingParams

QUESTION = "What does textwrap.dedent do?"
OTHER = "What does os.path.join do?"
TIMEOUT_MS = 90_000


def ask(page: Any, question: str) -> None:
    """Ask, again where the page has just been painted and lost what was in its field."""
    from playwright.sync_api import TimeoutError as NotShown

    count = page.locator("#chat .message-row").count()
    for patience_ms in (60_000, 60_000):  # what was asked may only be late
        page.fill("#question textarea", question)
        page.press("#question textarea", "Enter")
        try:
            page.wait_for_function(
                "n => document.querySelectorAll('#chat .message-row').length > n",
                arg=count,
                timeout=patience_ms,
            )
            return
        except NotShown:
            continue
    raise AssertionError(f"the page does not show the question {question!r}")


def ids_of(*messages: dict[str, str]) -> list[int]:
    """The prompt of a conversation."""
    prompts = Prompts(DEMO_DIRECTORY, read_config(DEMO_DIRECTORY), 1024)
    return prompts.ids(GenerateRequest(SamplingParams(), messages=list(messages)))


def set_numbers(page: Any, values: dict[str, str]) -> None:
    """Fill fields of the settings, again where the page has just been made and overwrites one."""

    def are_set() -> bool:
        wrong = [name for name in values if page.input_value(f"#{name} input") != values[name]]
        for name in wrong:
            page.fill(f"#{name} input", values[name])
        return not wrong

    page.get_by_role("button", name="Settings", exact=True).click()
    until(are_set)


def choose_files(page: Any, press: Callable[[], None], files: Any) -> None:
    """Choose by the dialog that `press` opens; a busy browser may open none for a press so old."""
    from playwright.sync_api import TimeoutError as NotOpened

    for _ in range(6):
        try:
            with page.expect_file_chooser(timeout=TIMEOUT_MS / 6) as chosen:
                press()
        except NotOpened:
            continue
        chosen.value.set_files(files)
        return
    raise AssertionError("no dialog for files has opened")


def wait_for_answer(page: Any, num_equal: int = 3) -> str:
    """The last answer, once its figures stand below it and what is shown of it stays the same.

    The browser may show the figures before the last words: `read_answer` waits for all of them.
    """
    page.wait_for_function(
        "() => { const rows = document.querySelectorAll('#chat .message-row:not(.message-row *)');"
        " return document.body.dataset.chat == 'ready' &&"
        " [...rows].at(-1)?.matches('.bot-row') &&"
        " document.querySelector('#status').innerText.includes('tokens at') }"
    )
    answer = page.locator("#chat .message.bot").last
    shown, left = answer.inner_text(), num_equal
    while left:
        page.wait_for_timeout(100)
        before, shown = shown, answer.inner_text()
        left = left - 1 if shown == before else num_equal
    return str(shown)


def read_answer(page: Any) -> str:
    """The last answer, once it has been the same for a second."""
    return wait_for_answer(page, num_equal=10)


def begin_anew(page: Any) -> None:
    """An empty conversation: the browser may show that it is one before it has no more messages."""
    page.click("#new")
    page.wait_for_selector("#welcome h2")
    page.wait_for_selector("#chat .message", state="detached")


def kept(page: Any) -> str:
    """What the browser keeps of the conversations, as JSON.

    Gradio has CryptoJS encrypt it, by a passphrase that is the SHA-256 of `BrowserState`'s secret.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    stored = page.evaluate("localStorage.getItem('hotcold-conversations')")
    if stored is None:
        return ""
    content = base64.b64decode(stored.rpartition(":")[2])
    secret = hashlib.sha256(b"hotcold").hexdigest().encode() + content[8:16]  # a salt
    hashes = [b""]
    for _ in range(3):
        hashes.append(hashlib.md5(hashes[-1] + secret).digest())
    cipher = Cipher(algorithms.AES(hashes[1] + hashes[2]), modes.CBC(hashes[3])).decryptor()
    text = cipher.update(content[16:]) + cipher.finalize()
    return text[: -text[-1]].decode()


def plain(text: str) -> str:
    """Letters and digits: what Markdown leaves of a text."""
    return re.sub(r"[\W_]+", "", text)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something outside the browser."""
    deadline = time.monotonic() + TIMEOUT_MS / 1000
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
