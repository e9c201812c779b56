"""The messages of a conversation: what is made of their text, their buttons, and branches."""

from __future__ import annotations

from typing import Any

import pytest

from hotcold.model.byte_sizes import size_text
from hotcold.model.config.build import read_config
from hotcold.model.errors import ServiceError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.model.weights.sizes import attention_bytes, head_bytes
from tests.e2e.page.test_page_looks import PHONE, violations
from tests.e2e.page_visit import (
    OTHER,
    QUESTION,
    ask,
    choose_files,
    ids_of,
    kept,
    until,
    wait_for_answer,
)

EVERYTHING = r"""| Name | Size | Layers | Neurons computed of all | Notes about the memory |
|---|---|---|---|---|
| Small | 135 M | 30 | 8.9% | fits every machine |

- [x] done already
- [ ] still to do

Inline \( E = mc^2 \) and $a < b$, which costs $5 or $10. Then \[ \int_0^1 x^2\,dx \] and $$ n^2 $$

```python
value = "$a$ \( b \)"  # {LONG}
```

```mermaid
graph TD; A[Driver]-->B[Attention];
```

![a diagram](http://example.com/a.png)

""".replace("{LONG}", "a line that is long, " * 6)


def answered(page: Any, book: Any, text: str) -> None:
    book.text, book.num_tokens = text, len(text.split(" "))
    ask(page, QUESTION)
    wait_for_answer(page)


def row(page: Any, number: int) -> Any:
    return page.locator("#chat .message-row").nth(number)


def press(page: Any, number: int, what: str) -> None:
    """A button of Gradio's below a message."""
    buttons = page.locator("#chat .message-buttons").nth(number)
    buttons.get_by_role("button", name=what).click()


def wait_for_texts(page: Any, *texts: str) -> None:
    """Until these are the messages, by their beginnings."""
    page.wait_for_function(
        "texts => { const shown = [...document.querySelectorAll('#chat .message-row')];"
        " return shown.length == texts.length && document.body.dataset.chat == 'ready' &&"
        " shown.every((row, i) => row.querySelector('.message .md').innerText.trim()"
        ".startsWith(texts[i])) }",
        arg=list(texts),
    )


@pytest.mark.parametrize(
    "view",
    [
        pytest.param({}, id="light", marks=pytest.mark.thorough),
        pytest.param({"color_scheme": "dark", **PHONE}, id="dark"),
    ],
)
def test_a_text_of_everything_is_shown_whole(open_page, book, view) -> None:
    page = open_page(**view)
    answered(page, book, EVERYTHING)
    page.wait_for_selector("#chat .mermaid .node rect")
    page.wait_for_selector("#chat .mermaid .nodeLabel")
    page.wait_for_function("document.querySelectorAll('#chat .bot .katex').length == 4")
    assert page.locator("#chat .bot .katex-display").count() == 2
    assert page.locator("#chat .bot annotation").nth(1).text_content() == "a < b"
    assert "which costs $5 or $10." in page.locator("#chat .bot").first.inner_text()
    code = page.locator("#chat .code_wrap")
    assert code.get_attribute("data-language") == "python"
    assert r'"$a$ \( b \)"' in code.inner_text()
    pre = code.locator("pre")
    assert pre.evaluate("one => getComputedStyle(one).overflowX") == "auto"
    assert pre.evaluate("one => one.scrollWidth > one.clientWidth")
    # No word is broken: each fits into its cell.
    heads = page.locator("#chat th").evaluate_all(
        "all => all.map(one => one.innerText.split(' ').every(word => {"
        " const drawn = document.createElement('span'); drawn.textContent = word;"
        " drawn.style.cssText = 'position: absolute; white-space: nowrap'; one.append(drawn);"
        " const width = drawn.offsetWidth; drawn.remove();"
        " const { paddingLeft, paddingRight } = getComputedStyle(one);"
        " return width <= one.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight) + 1"
        "}))"
    )
    assert heads == [True] * 5
    boxes = page.locator("#chat input[type=checkbox]")
    grounds = boxes.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundImage)")
    assert "svg" in grounds[0] and grounds[1] == "none"
    text, ground = page.evaluate(
        "['#chat .mermaid .nodeLabel', '#chat .mermaid .node rect'].map((name, i) =>"
        " getComputedStyle(document.querySelector(name))[i ? 'fill' : 'color'])"
    )
    assert (sum(map(int, text[4:-1].split(","))) > 380) == ("color_scheme" in view)
    assert (sum(map(int, ground[4:-1].split(","))) < 380) == ("color_scheme" in view)
    assert page.locator("#chat img").is_visible()  # by its description
    assert page.locator("#chat img").evaluate("one => one.naturalWidth") == 0
    assert violations(page) == []


def test_any_message_is_answered_again_and_both_answers_stay(open_page, book) -> None:
    page = open_page()
    for number, question in enumerate((QUESTION, OTHER)):
        book.text, book.num_tokens = f"answer{number} ", 1
        ask(page, question)
        wait_for_answer(page)
    wait_for_texts(page, QUESTION, "answer0", OTHER, "answer1")
    book.text = "another "
    press(page, 0, "Edit")
    page.keyboard.press("Enter")  # sent as it was, a question is answered again
    wait_for_texts(page, QUESTION, "another")
    assert book.requests[-1].prompt_ids == ids_of({"role": "user", "content": QUESTION})
    assert row(page, 1).locator(".branches span").inner_text() == "2/2"
    assert row(page, 1).get_by_role("button", name="Later branch").is_disabled()
    until(lambda: "another" in kept(page))
    page.reload()
    page.wait_for_selector("body[data-chat=ready][data-state=ready] #question textarea")
    page.locator("#rows label").click()
    wait_for_texts(page, QUESTION, "another")
    row(page, 1).get_by_role("button", name="Earlier branch").click()
    wait_for_texts(page, QUESTION, "answer0", OTHER, "answer1")
    row(page, 1).locator(".branches span", has_text="1/2").wait_for()


def test_an_edit_is_sent_by_enter_and_ended_by_escape(open_page, book) -> None:
    page = open_page()
    book.text, book.num_tokens = "first ", 1
    ask(page, QUESTION)
    wait_for_answer(page)
    asked = len(book.requests)
    press(page, 0, "Edit")
    field = page.get_by_label("Edit the message")
    assert field.input_value() == QUESTION
    assert violations(page) == []
    page.keyboard.press("Escape")
    field.wait_for(state="detached")
    assert len(book.requests) == asked
    press(page, 0, "Edit")
    field.fill("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    book.text = "second "
    page.keyboard.press("Enter")
    wait_for_texts(page, "one", "second")
    assert book.requests[-1].prompt_ids == ids_of({"role": "user", "content": "one\ntwo"})
    press(page, 1, "Edit")
    field.fill("third")
    press(page, 1, "Submit")
    wait_for_texts(page, "one", "third")
    assert len(book.requests) == asked + 1  # an answer that is written needs none
    row(page, 0).get_by_role("button", name="Earlier branch").click()
    wait_for_texts(page, QUESTION, "first")


def test_a_branch_that_fails_says_so_and_the_other_is_there(open_page, book) -> None:
    page = open_page()
    answered(page, book, "first ")
    book.num_tokens, book.error = 0, ServiceError("the cpu0 service died")
    press(page, 1, "Retry")
    page.locator("#chat .problem").wait_for()
    assert "No answer" in page.inner_text("#chat .problem")
    row(page, 1).get_by_role("button", name="Earlier branch").click()
    wait_for_texts(page, QUESTION, "first")
    page.locator("#chat .problem").wait_for(state="detached")


def test_keys_stop_search_and_begin_anew(open_page, book) -> None:
    """Whatever HTML the texts have, which stands for nothing of the page."""
    page = open_page()
    html = '<p class="message-row" id="stop">mine</p>\n<div class="code_wrap">empty</div>'
    answered(page, book, f"{html}\n\nend")
    page.wait_for_selector("body[data-state=ready] #chat .code_wrap")
    book.text, book.num_tokens, book.held_at = "word", 9, 3
    ask(page, OTHER)
    page.wait_for_selector("body[data-chat=answering]")
    page.keyboard.press("Escape")
    wait_for_answer(page)
    assert "stopped" in page.inner_text("#status")
    page.get_by_role("button", name="Conversations").click()  # closed
    page.keyboard.press("Control+k")
    assert page.evaluate("document.activeElement.closest('#search') != null")
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector("#welcome h2")
    page.keyboard.type("x")
    assert page.input_value("#question textarea") == "x"


DROP = """([name, bytes]) => {
    const data = new DataTransfer();
    data.items.add(new File([new Uint8Array(bytes)], name));
    const options = { dataTransfer: data, bubbles: true, cancelable: true };
    const place = document.querySelector('#main');
    place.dispatchEvent(new DragEvent('dragover', options));
    return !place.dispatchEvent(new DragEvent('drop', options));
}"""


def test_dropped_text_is_put_into_the_question(open_page, book) -> None:
    page = open_page()
    page.fill("#question textarea", "What is this?")
    assert page.evaluate(DROP, ["notes.md", [*b"a ```b``` c\n"]])
    wanted = "What is this?\n\nnotes.md:\n````\na ```b``` c\n````\n"
    until(lambda: page.input_value("#question textarea") == wanted)
    assert page.evaluate(DROP, ["picture.png", [137, 80, 78, 71, 0, 255]])
    page.wait_for_function(
        "document.querySelector('#status').innerText == 'picture.png holds no text.'"
    )
    page.press("#question textarea", "Enter")
    wait_for_answer(page)
    assert book.requests[-1].prompt_ids == ids_of({"role": "user", "content": wanted.strip()})


def test_files_of_text_are_chosen_by_a_button(open_page, book, tmp_path) -> None:
    page = open_page(**PHONE)
    files = [tmp_path / name for name in ("notes.md", "large.txt", "empty.py")]
    for file, text in zip(files, ("one\n", "x" * (256 * 1024 + 1), "print()"), strict=True):
        file.write_text(text)
    add = page.get_by_role("button", name="Add files of text")

    def is_reached() -> bool:
        page.focus("#question textarea")
        page.keyboard.press("Shift+Tab")
        return bool(add.evaluate("one => one === document.activeElement"))

    def press_it() -> None:
        until(is_reached)
        page.keyboard.press("Enter")

    choose_files(page, press_it, files)
    wanted = "notes.md:\n```\none\n```\n\nempty.py:\n```\nprint()\n```\n"
    until(lambda: page.input_value("#question textarea") == wanted)
    assert "large.txt is larger than 256 kB." in page.inner_text("#status")
    assert page.evaluate("document.activeElement.closest('#question') != null")
    choose_files(page, add.tap, files[0])  # the same file again
    until(lambda: page.input_value("#question textarea") == f"{wanted}\nnotes.md:\n```\none\n```\n")
    assert violations(page) == []
    page.press("#question textarea", "Enter")
    wait_for_answer(page)
    said = f"{wanted}\nnotes.md:\n```\none\n```"
    assert book.requests[-1].prompt_ids == ids_of({"role": "user", "content": said})


@pytest.mark.parametrize(
    "view",
    [pytest.param({}, id="wide", marks=pytest.mark.thorough), pytest.param(PHONE, id="phone")],
)
def test_the_way_back_to_the_end_covers_no_text(open_page, book, view) -> None:
    page = open_page(**view)
    answered(page, book, "a paragraph\n\n" * 60)
    page.evaluate("document.querySelector('#chat .bubble-wrap').scrollTop = 0")
    arrow = page.get_by_role("button", name="Scroll down")
    arrow.wait_for()
    box = arrow.bounding_box()
    for name in ("#chat .bubble-wrap", "#ask"):
        other = page.locator(name).bounding_box()
        assert box["y"] >= other["y"] + other["height"]
    words = page.evaluate(
        "() => { const range = document.createRange();"
        " range.selectNodeContents(document.querySelector('#status p'));"
        " return range.getBoundingClientRect().left }"
    )
    assert box["x"] + box["width"] <= words
    arrow.click()
    page.wait_for_function(
        "(() => { const one = document.querySelector('#chat .bubble-wrap');"
        " return one.scrollHeight - one.scrollTop - one.clientHeight < 5 })()"
    )


def in_megabytes(text: str) -> float:
    size, unit = text.split()
    return float(size) * {"GB": 1000, "MB": 1, "kB": 0.001}[unit]


def test_the_panel_tells_bytes_and_times(open_page, book) -> None:
    """As the program tells them; of a dense model it has no map."""
    book.mode = "dense"
    book.reads = {"bytes_read": 4_560_000, "hit_rate": 0.5, "wait_share": 0.25}
    page = open_page()
    ask(page, QUESTION)
    wait_for_answer(page)
    page.wait_for_selector("#live [data-show=parts] tr")
    assert not page.is_visible("#live canvas") and not page.is_visible("#live [data-show=share]")
    lines = [line.split("\t") for line in page.inner_text("#live [data-show=parts]").splitlines()]
    assert [line[0] for line in lines] == ["attention", "FFN", "head", "exchange", "Python"]
    for name, time, read, rate in lines[:3]:
        megabytes, seconds = in_megabytes(read), float(time.split()[0]) / 1000
        assert float(rate.split()[0]) == pytest.approx(megabytes / 1000 / seconds, rel=0.03), name
    config = read_config(DEMO_DIRECTORY)
    assert lines[0][2] == size_text(attention_bytes(config))
    assert lines[2][2] == size_text(head_bytes(config))
    assert page.inner_text("#live [data-actor=cpu0]").split("\t")[-1] == "300.0 MiB"
    used = "This machine: 9.00 GiB of 24.00 GiB in use"
    assert page.inner_text("#live [data-show=memory]").startswith(used)
    caches = page.inner_text("#live [data-show=caches]")
    assert "read from storage\t4.6 MB a step" in caches and "prompts, found again" in caches
    assert violations(page) == []
