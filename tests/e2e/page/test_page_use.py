"""What a visitor does with the chat page, over a system that answers by the book."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from hotcold.model.errors import ServiceError
from hotcold.model.sampling import SamplingParams
from hotcold.ui.page.chat import Chat
from tests.e2e.page.test_page_looks import violations
from tests.e2e.page_server import served_page
from tests.e2e.page_visit import (
    OTHER,
    QUESTION,
    TIMEOUT_MS,
    ask,
    begin_anew,
    choose_files,
    ids_of,
    kept,
    read_answer,
    set_numbers,
    until,
    wait_for_answer,
)
from tests.e2e.stand_in import StandIn


def rows(page) -> list[str]:
    """The titles in the list of conversations."""
    return page.locator("#rows label").all_inner_texts()


def wait_for_rows(page, *titles: str) -> None:
    page.wait_for_function(
        "titles => JSON.stringify([...document.querySelectorAll('#rows label')]"
        ".map(row => row.innerText.trim())) == JSON.stringify(titles)",
        arg=list(titles),
    )


def open_row(page, question: str) -> None:
    """Open a conversation of one question, again where the click was of no use.

    Where answers to several acts are under way, a busy browser may show an older view for a moment:
    the row is chosen in it already.
    """
    asked = page.locator("#chat .message.user")

    def is_open() -> bool:
        page.locator("#rows label", has_text=question).click()
        for _ in range(20):
            if [text.strip() for text in asked.all_inner_texts()] == [question]:
                return True
            page.wait_for_timeout(100)
        return False

    until(is_open)


def wake_the_panel(page) -> None:
    """It asks when a visitor moves, long after it asked last."""
    page.evaluate("{ const now = performance.now(); performance.now = () => now + 60000; }")
    page.keyboard.press("Shift")


def test_settings_reach_the_request(open_page, book) -> None:
    page = open_page()
    settings = {"temperature": "0.7", "top-k": "5", "top-p": "0.5", "min-p": "0.1"}
    page.get_by_role("tab", name="Settings").click()
    for heading in ("Repetition", "Other ways to choose"):
        page.locator("#settings .label-wrap", has_text=heading).click()
    set_numbers(page, {**settings, "max-tokens": "3", "repeat-penalty": "1.5"})
    page.fill("#stop-texts textarea", "a\nb c")
    page.fill("#system-prompt textarea", "Be brief.")
    page.fill("#seed textarea, #seed input", "42")
    page.get_by_role("tab", name="Live").click()
    ask(page, QUESTION)
    wait_for_answer(page)
    request = book.requests[-1]
    assert request.sampling == SamplingParams(
        3, 0.7, 5, 0.5, 0.1, seed=42, repeat_penalty=1.5, stop=("a", "b c")
    )
    told = {"role": "system", "content": "Be brief."}
    assert request.prompt_ids == ids_of(told, {"role": "user", "content": QUESTION})
    asked = len(book.requests)
    page.get_by_role("tab", name="Settings").click()
    page.fill("#seed textarea, #seed input", "no number")
    page.fill("#question textarea", OTHER)
    page.press("#question textarea", "Enter")
    page.wait_for_selector("body[data-state=error]")
    assert "seed is 'no number'" in page.inner_text("#status")
    assert page.input_value("#question textarea") == OTHER
    assert page.locator("#bar .state").inner_text() == "Error"
    page.fill("#seed textarea, #seed input", "7")
    ask(page, OTHER)
    wait_for_answer(page)
    assert len(book.requests) == asked + 1


def test_what_comes_late_takes_no_place_of_a_question(open_page, book) -> None:
    """A slow browser hears of the first state after the question that was asked meanwhile."""
    page = open_page(
        first="""
            const ask = window.fetch;
            window.late = 0;
            window.fetch = async (address, ...more) => {
                const answer = await ask(address, ...more);
                if (!String(address.url ?? address).includes("/gradio_api/run/")) return answer;
                window.late++;
                await new Promise((go) => setTimeout(go, 3000));
                window.late--;
                return answer;
            };
        """
    )
    ask(page, QUESTION)
    wait_for_answer(page)
    page.wait_for_function("window.late == 0")
    page.wait_for_timeout(500)
    assert page.locator("#chat .message-row").count() == 2
    assert "tokens at" in page.inner_text("#status")


def test_a_suggested_question_is_asked_and_the_panel_watches_it_at_once(open_page, book) -> None:
    """Also where it had stopped looking, because nothing ran; no key and no pointer wakes it."""
    page = open_page()
    page.wait_for_selector("#live [data-polling=no]")
    book.held_at = 0
    questions = page.locator("#welcome button").all_inner_texts()
    assert len(questions) == 3 and QUESTION in questions  # of the demo, which knows Python
    page.evaluate("document.querySelectorAll('#welcome button')[1].click()")
    page.locator("#live [data-polling=yes] [data-show=requests]", has_text="1 running").wait_for()
    page.wait_for_selector("#welcome", state="hidden")
    page.locator("#chat .message.user", has_text=questions[1]).wait_for()
    assert book.requests[-1].prompt_ids == ids_of({"role": "user", "content": questions[1]})
    page.click("#ask .stop-button")
    page.wait_for_selector("body[data-chat=ready] #live [data-polling=no]")


def test_an_error_stands_in_the_thread_until_retry_succeeds(open_page, book) -> None:
    page = open_page()
    book.num_tokens, book.error = 0, ServiceError("the cpu0 service died <b>twice</b>")
    ask(page, QUESTION)
    page.wait_for_selector("body[data-state=error] #chat .problem")
    problem = page.locator("#chat .problem")
    assert "No answer: the cpu0 service died <b>twice</b>." in problem.inner_text()
    assert "press Retry" in problem.inner_text()
    assert page.locator("#bar .state").inner_text() == "Error"
    page.mouse.move(5, 5)
    assert page.get_by_role("button", name="Retry").is_visible()  # though nobody points at it
    book.num_tokens = 5
    until(lambda: QUESTION in kept(page))
    page.get_by_role("button", name="Retry").click()
    problem.filter(has_text="broke off").wait_for()
    page.locator("#chat .message.bot", has_text="textwrap.dedent removes").wait_for()
    book.error = None
    until(lambda: "removes the" in kept(page))
    page.get_by_role("button", name="Retry").click()
    wait_for_answer(page)
    assert problem.count() == 0
    assert page.locator("#bar .state").inner_text() == "Ready"


def test_send_becomes_stop_and_the_state_says_what_happens(open_page, book) -> None:
    page = open_page()
    book.held_at = 0
    cursors = """[...document.querySelectorAll('#chat .md, #chat .md *')].filter(
        each => getComputedStyle(each, '::after').animationName == 'pulse').length"""
    ask(page, QUESTION)
    page.wait_for_function(f"document.body.dataset.chat == 'waiting' && {cursors} == 1")
    assert page.locator("#bar .state").inner_text() == "Reading the question"
    assert page.is_visible("#ask .stop-button") and not page.is_visible("#ask .submit-button")
    book.held_at = 3  # an answer is shown as it comes
    page.locator("#chat .message.bot", has_text="textwrap.dedent removes the").wait_for()
    assert "whitespace" not in page.inner_text("#chat .message.bot")
    page.wait_for_function(f"document.body.dataset.chat == 'answering' && {cursors} == 1")
    assert page.locator("#bar .state").inner_text() == "Answering"
    page.locator("#rows label", has_text="●").wait_for()
    page.click("#ask .stop-button")
    wait_for_answer(page)
    assert "stopped" in page.inner_text("#status")
    assert page.locator("#bar .state").inner_text() == "Ready"
    assert page.is_visible("#ask .submit-button") and not page.is_visible("#ask .stop-button")
    assert page.evaluate(cursors) == 0
    page.locator("#rows label", has_text="●").wait_for(state="detached")


def test_a_conversation_goes_on_at_the_next_server(browser, monkeypatch) -> None:
    """Of a page that stays open. A server that ends in the midst of an answer is not waited for."""
    from gradio.context import Context

    page = browser.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    streams: set[Any] = set()  # Gradio loads the page again where one of these breaks off
    page.on("request", lambda one: streams.update({one} if "queue/data" in one.url else ()))
    for end in ("requestfinished", "requestfailed"):
        page.on(end, lambda one: streams.discard(one))
    monkeypatch.setattr(Context, "id", 0)  # of components, as in a process of its own
    with served_page({"demo": StandIn(num_tokens=5)}) as url:
        page.goto(url)
        page.wait_for_selector("body[data-state=ready] #question textarea")
        ask(page, QUESTION)
        wait_for_answer(page)
        while QUESTION not in kept(page) or streams:
            page.wait_for_timeout(50)
    wake_the_panel(page)
    page.wait_for_selector("body[data-state=lost]")
    assert "has ended or cannot be reached" in page.inner_text("#status")
    assert not page.locator(".toast-wrap").is_visible()
    monkeypatch.setattr(Context, "id", 0)
    port = int(url.rstrip("/").rpartition(":")[2])
    with served_page({"demo": StandIn(held_at=3)}, port=port):
        page.wait_for_selector("body[data-state=ready] #question textarea")
        ask(page, OTHER)
        wait_for_rows(page, f"● {QUESTION}")
        page.get_by_role("button", name="Neurons", exact=True).click()
        page.wait_for_selector("body[data-chat=answering]")
        assert not page.is_visible("#live")  # it asks nevertheless
    page.wait_for_selector("body[data-chat=error][data-state=lost]")
    assert "the answer broke off" in page.inner_text("#status")
    assert page.locator("#bar .state").inner_text() == "No connection"
    assert not page.is_visible("#ask .stop-button")
    asked = page.locator("#chat .message.user").all_inner_texts()
    assert [text.strip() for text in asked] == [QUESTION, OTHER]
    page.close()


def test_two_conversations_stay_apart_and_end_with_their_visitor(open_page, book) -> None:
    page = open_page()
    book.num_tokens, book.held_at = 5, 3
    for question in (QUESTION, OTHER):
        begin_anew(page)
        ask(page, question)
    wait_for_rows(page, f"● {OTHER}", f"● {QUESTION}")
    for held_at in (3, None):
        book.held_at = held_at
        for question in (QUESTION, OTHER):
            open_row(page, question)
    wait_for_answer(page)
    wait_for_rows(page, OTHER, QUESTION)
    asked = [request.prompt_ids for request in book.requests[-2:]]
    assert asked == [ids_of({"role": "user", "content": q}) for q in (QUESTION, OTHER)]
    book.held_at = 3
    ask(page, "And then?")
    until(lambda: book.num_running == 1)
    page.context.close()
    until(lambda: book.num_running == 0)


def test_conversations_are_named_found_deleted_and_brought_back(open_page, book) -> None:
    page = open_page()
    for question in (QUESTION, OTHER):
        begin_anew(page)
        ask(page, question)
        wait_for_answer(page)
    wait_for_rows(page, OTHER, QUESTION)
    field = page.locator("#name input")
    for what, end in (("Lines", lambda: page.keyboard.press("Enter")), ("Margins", field.blur)):
        # It is of the row that is chosen, before that is shown, too.
        page.evaluate(
            "for (const one of document.querySelectorAll("
            "'#rows label:last-child, #acts button:first-child')) one.click()"
        )
        field.wait_for()
        assert violations(page) == []
        field.fill(what)
        end()
        field.wait_for(state="detached")
        wait_for_rows(page, OTHER, what)
    search = page.get_by_label("Search conversations")
    search.fill("MARGINS whitespace")  # a word of its name, and one of the answer
    wait_for_rows(page, "Margins")
    search.fill("no such words")
    wait_for_rows(page)
    search.fill("")
    wait_for_rows(page, OTHER, "Margins")
    page.get_by_role("button", name="Delete").click()
    wait_for_rows(page, OTHER)
    page.get_by_role("status").filter(has_text="“Margins” is deleted.").wait_for()
    until(lambda: "Margins" not in kept(page))
    undo = page.get_by_role("button", name="Undo")
    undo.click()
    wait_for_rows(page, OTHER, "Margins")
    page.locator("#rows label.selected", has_text="Margins").wait_for()
    page.locator("#acts button:disabled", has_text="Undo").wait_for()
    until(lambda: "Margins" in kept(page))
    page.reload()
    wait_for_rows(page, OTHER, "Margins")


def test_a_name_is_typed_while_an_answer_comes(open_page, book, monkeypatch) -> None:
    views = Chat._views

    async def later_views(*arguments: Any) -> AsyncIterator[dict]:
        num_views = 0
        async for view in views(*arguments):
            num_views += 1
            if num_views == 2:
                await asyncio.sleep(0.5)  # by then something is typed
            yield view

    monkeypatch.setattr(Chat, "_views", later_views)
    page = open_page()
    book.held_at = 3
    ask(page, QUESTION)
    page.wait_for_selector("body[data-chat=answering]")
    wait_for_rows(page, f"● {QUESTION}")
    from playwright.sync_api import TimeoutError as NotShown

    field = page.locator("#name input")

    def is_named() -> bool:
        """Once the server has put the name there; a busy browser may lose a press."""
        page.get_by_role("button", name="Rename").click()
        try:
            field.wait_for(timeout=TIMEOUT_MS / 6)
        except NotShown:
            return False
        return bool(field.input_value() == QUESTION)

    until(is_named)
    field.fill("")
    page.keyboard.type("Mar")
    until(lambda: field.input_value() == "Mar")
    book.held_at = None
    wait_for_answer(page)  # of which the list tells, too
    page.keyboard.type("gins")
    page.keyboard.press("Enter")
    wait_for_rows(page, "Margins")


def choose_file(page, file) -> None:
    choose_files(page, page.get_by_role("button", name="Import").click, file)


def test_conversations_go_to_a_file_and_come_back(open_page, book, tmp_path) -> None:
    page = open_page()
    ask(page, QUESTION)
    answer = read_answer(page)
    with page.expect_download() as downloaded:
        page.get_by_role("button", name="Export").click()
    file = tmp_path / "conversations.json"
    downloaded.value.save_as(file)
    (kept,) = json.loads(file.read_text())
    assert [message["role"] for message in kept["messages"]] == ["user", "assistant"]
    other = open_page()
    choose_file(other, file)
    wait_for_rows(other, QUESTION)
    other.get_by_text("1 conversation imported.").wait_for()
    other.locator("#rows label").click()
    other.wait_for_selector("#chat .message.bot")
    other.wait_for_function(
        "answer => document.querySelector('#chat .message.bot').innerText === answer", arg=answer
    )
    file.write_text("no JSON")
    choose_file(other, file)
    other.get_by_text("it is not JSON").wait_for()
    assert rows(other) == [QUESTION]


def test_an_answer_ends_on_the_page_whatever_was_done_meanwhile(open_page, book, tmp_path) -> None:
    turns = [{"role": "user", "content": OTHER}, {"role": "assistant", "content": "It joins."}]
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps([{"id": "a", "messages": turns}]))
    page = open_page()
    book.held_at = 3
    ask(page, QUESTION)
    page.wait_for_selector("body[data-chat=answering]")
    choose_file(page, file)
    wait_for_rows(page, f"● {QUESTION}", OTHER)
    book.held_at = None
    page.wait_for_selector("body[data-chat=ready]")
    assert page.inner_text("#status") == "1 conversation imported."
    assert page.is_visible("#ask .submit-button") and not page.is_visible("#ask .stop-button")
    wait_for_rows(page, QUESTION, OTHER)
