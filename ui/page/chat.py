"""The chat: conversations on one side, the open one in the middle with the field to ask in.

A task reads each answer (`ui.page.conversations`); what a visitor sees is painted from the open
conversation several times a second, whichever answers are under way.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from hotcold.model.errors import HotcoldError, UsageError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.cached import client
from hotcold.ui.fair_share import first_to_leave
from hotcold.ui.gate import given_key
from hotcold.ui.keys import client_of, network_of
from hotcold.ui.page import asset
from hotcold.ui.page.chat_settings import ChatSettings
from hotcold.ui.page.conversations import ChatHistory, Conversation
from hotcold.ui.page.maths import DELIMITERS, with_formulas, without_marks
from hotcold.ui.page.thread import shown_messages, suggestions, thread_state

_PAINT_S = 0.1
_LONGEST_QUERY = 200
MAX_VISITORS = 200  # whose conversations the server holds; browsers keep them too
_SECRET = "hotcold"  # of localStorage; it protects nothing from readers of the page
_EXPORT = """(saved) => {
  const file = new Blob([JSON.stringify(saved, null, 1)], { type: "application/json" });
  const link = document.createElement("a");
  Object.assign(link, { href: URL.createObjectURL(file), download: "hotcold-conversations.json" });
  link.click();
}"""


Updates = dict[Any, Any]  # of components, by themselves
Act = Callable[..., Updates | None]


@dataclass
class Visit:
    """What a visitor does: the event, and whose it is."""

    history: ChatHistory
    shown: Conversation | None  # on the page; another may be open once the server hears of it
    event: gr.EventData
    asked: Conversation | None = None  # whose answer is to be painted
    unsent: str | None = None  # what goes back into the field where it is refused

    @property
    def index(self) -> int | None:
        """The message that the event is of, if there is one and nothing answers."""
        found = self.event.index
        index = int(found[0] if isinstance(found, list | tuple) else found)
        shown = self.shown
        is_there = shown and not shown.is_answering and 0 <= index < len(shown.messages)
        return index if is_there else None

    def of_row(self, row: Any) -> Conversation:
        """The conversation of the chosen row; without one, as for an empty one, what is shown."""
        return self.history.find(str(row)) or self.shown or self.history.open


class Chat:
    """Components and what happens at their events; made inside a `gr.Blocks`."""

    def __init__(self, backend: Backend, model_path: str, is_chat: bool) -> None:
        """`is_chat` False: the model has no chat template, so it continues texts."""
        self._backend = backend
        self._is_chat = is_chat
        is_demo = model_path == str(DEMO_DIRECTORY)
        self._suggestions = suggestions(is_demo, is_chat)
        self._histories: dict[str, ChatHistory] = {}  # by Gradio's session
        self._clients: OrderedDict[str, tuple[str, str]] = OrderedDict()  # whose each of them is

    def list_column(self) -> None:
        """The list of conversations; what is done with one is done with the open one."""
        self._new = _button("New conversation", "plus", "new")
        self._search = gr.Textbox(
            placeholder="Search", label="Search conversations", show_label=False, max_lines=1,
            elem_id="search",
        )  # fmt: skip
        self._rows = gr.Radio(
            [], label="Conversations", show_label=False, container=False, interactive=True,
            elem_id="rows",
        )  # fmt: skip
        self._name = gr.Textbox(
            label="Name of the conversation", visible=False, autofocus=True, max_lines=1,
            elem_id="name",
        )  # fmt: skip
        with gr.Row(elem_id="acts"):
            self._rename = gr.Button("Rename", min_width=0)
            self._delete = gr.Button("Delete", min_width=0)
            self._undo = gr.Button("Undo", interactive=False, min_width=0)
            self._export = gr.Button("Export", min_width=0)
            gr.Button("Import", elem_id="import", min_width=0)
        self._saved = gr.BrowserState([], storage_key="hotcold-conversations", secret=_SECRET)

    def chat_column(self) -> None:
        """The open conversation, and the field below it."""
        self._chatbot = gr.Chatbot(
            label="Conversation", show_label=False, container=False, height="100%",
            elem_id="chat", buttons=["copy"], editable="all", feedback_options=None,
            latex_delimiters=DELIMITERS, group_consecutive_messages=False,
        )  # fmt: skip
        heading, *questions = self._suggestions
        with gr.Column(elem_id="welcome"):
            gr.HTML(f"<h2>{heading}</h2>", apply_default_css=False)
            with gr.Row():
                self._suggested = [gr.Button(question, min_width=180) for question in questions]
        with gr.Row(elem_id="ask"):
            _button("Add files of text", "attach", "attach")
            self._question = gr.Textbox(
                show_label=False, label="Question", container=False, max_lines=10,
                placeholder="Ask something" if self._is_chat else "A text to go on with",
                min_width=100, elem_id="question", submit_btn="Send", stop_btn="Stop",
            )  # fmt: skip
        self._state = gr.HTML(
            thread_state(Conversation(), {}), html_template='<p role="status"></p>',
            js_on_load=asset("page.js"), elem_id="status", apply_default_css=False,
        )  # fmt: skip

    def connect(self, page: gr.Blocks, settings: ChatSettings) -> None:
        """Say what happens at each event."""
        self._settings = settings
        private: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        # All that is shown comes through the queue's one stream: an older view, such as that of a
        # page that has just been made, would else follow the one of a question, and take its place.
        shown = [
            self._saved, self._chatbot, self._rows, self._state, self._undo, self._question,
            self._name,
        ]  # fmt: skip
        kept = [self._saved, self._state]  # of a page that has outlived its server
        quick = private | {"outputs": shown, "concurrency_limit": None}
        sampling = settings.inputs

        def on(event: Any, act: Act, given: Sequence[Any] = (), **more: Any) -> None:
            options = quick | {"trigger_mode": "multiple"} | more
            event(self._handler(act), [*kept, *given], **options)

        on(self._question.submit, self._ask, [self._question, *sampling])
        for each in self._suggested:
            on(each.click, self._ask, [each, *sampling])
        on(self._question.stop, lambda visit: visit.history.open.stop())
        on(self._chatbot.retry, self._retry, sampling)
        on(self._chatbot.edit, self._edit, sampling)
        on(self._state.step, _step)
        on(self._state.take, _import)
        on(self._rows.select, lambda visit: visit.history.show(str(visit.event.value)))
        on(self._new.click, lambda visit: visit.history.start_new())
        # The row that is chosen, which is shown a moment later; Gradio would refuse one that was
        # listed by a server before this one.
        chosen: dict[str, Any] = {"given": [self._rows], "preprocess": False}
        on(self._delete.click, _delete, **chosen)
        on(self._rename.click, self._begin_naming, **chosen)
        on(self._undo.click, lambda visit: visit.history.undo_remove())
        on(self._search.change, _search, [self._search], trigger_mode="always_last")
        on(self._name.blur, self._end_naming, [self._name])  # Enter leaves the field, too
        on(page.load, lambda visit: None)
        self._export.click(None, self._saved, None, js=_EXPORT, **private)
        page.unload(self._leave)

    def _handler(self, act: Act) -> Callable[..., Any]:
        """Has `act` done, and paints until what it asked is answered; then the browser keeps it."""

        async def handle(
            event: gr.EventData, request: gr.Request, saved: Any, state: Any, *given: Any
        ) -> AsyncIterator[Updates]:
            visit, updates = self._do(act, event, request, saved, state, given)
            async for view in self._views(visit):
                yield view | updates
                updates = {}
            yield {self._undo: gr.skip()}  # Gradio shows an event's last view once more at its end

        return handle

    def _do(
        self, act: Act, event: gr.EventData, request: gr.Request, saved: Any, state: Any,
        given: Sequence[Any],
    ) -> tuple[Visit, Updates]:  # fmt: skip
        """Have `act` done; the visit, and what else it changes on the page."""
        history = self._history(request)
        known = str(state.get("id", "")) if isinstance(state, dict) else ""
        history.take_over(saved, known)
        visit = Visit(history, history.find(known), event)
        history.notice = {}
        history.num_acts += 1
        try:
            return visit, act(visit, *given) or {}
        except HotcoldError as error:
            history.notice = {"text": f"Not done: {error}.", "state": "error"}
            return visit, {} if visit.unsent is None else {self._question: visit.unsent}

    def _history(self, request: gr.Request) -> ChatHistory:
        client.set(client_of(given_key(request.headers)))  # Gradio's tasks are not the request's
        key = str(request.session_hash)  # which the client chooses
        history = self._histories.setdefault(key, ChatHistory())
        address = request.client.host if request.client else ""
        self._clients[key] = client.get(), network_of(address)
        self._clients.move_to_end(key)
        if len(self._clients) > MAX_VISITORS:
            left = first_to_leave(self._clients)
            del self._clients[left]
            self._histories.pop(left).stop_all()
        return history

    def _view(self, history: ChatHistory) -> Updates:
        """The thread, its state, the list of conversations, whether one can be brought back."""
        shown, listed, open_id = history.open, history.listed(), history.open_id
        rows = [(f"● {one.title}" if one.is_answering else one.title, one.id) for one in listed]
        chosen = open_id if any(one.id == open_id for one in listed) else None
        return {
            self._chatbot: shown_messages(shown),
            self._state: thread_state(shown, history.notice),
            self._rows: gr.Radio(rows, value=chosen),
            self._undo: gr.Button(interactive=history.removed is not None),
        }

    async def _views(self, visit: Visit) -> AsyncIterator[Updates]:
        """What is shown, until what was asked is answered; then also what the browser keeps.

        All is painted each time. Gradio sends the difference to what was sent before, and applies
        it there where the browser, if it is busy, has yet to show that. What another act changes
        before a view is sent is painted after it: that act's own view may have come first.
        """
        history, painted = visit.history, None
        while True:
            is_answering = visit.asked is not None and visit.asked.is_answering
            shown = history.open
            content = shown.messages[-1].content if shown.messages else ""
            now = (history.num_acts, len(content), shown.is_answering, is_answering)
            if now != painted:
                painted = now
                kept = {} if is_answering else {self._saved: history.saved()}
                yield self._view(history) | kept
            elif not is_answering:
                return
            if is_answering:
                await asyncio.sleep(_PAINT_S)

    def _begin(
        self, visit: Visit, conversation: Conversation, question: str | None, settings: Any,
        at: int | None = None,
    ) -> None:  # fmt: skip
        """Ask; `question` and `at` as `Conversation.ask` has them."""
        visit.unsent = question
        system_prompt, sampling = self._settings.read(settings)
        visit.history.require_space(question or "")
        conversation.ask(self._backend, question, sampling, system_prompt, self._is_chat, at)
        visit.history.forget_oldest()
        visit.asked = conversation

    def _ask(self, visit: Visit, question: str, *settings: Any) -> Updates:
        shown = visit.history.open
        if not question.strip() or shown.is_answering:
            return {}
        self._begin(visit, shown, question.strip(), settings)
        return {self._question: ""}

    def _retry(self, visit: Visit, *settings: Any) -> None:
        """Answer the last question again."""
        if (index := visit.index) is not None and visit.shown:
            self._begin(visit, visit.shown, None, settings, index + 1)

    def _edit(self, visit: Visit, *settings: Any) -> None:
        """Ask what is written in a question's place; an answer is only rewritten."""
        shown, index, text = visit.shown, visit.index, without_marks(str(visit.event.value)).strip()
        if shown is None or index is None or not text:
            return
        message = shown.messages[index]
        is_same = text == without_marks(with_formulas(message.content)).strip()
        if message.role == "user":
            # What is sent as it was is answered again: a question is no branch of itself.
            question, at = (None, index + 1) if is_same else (text, index)
            self._begin(visit, shown, question, settings, at)
        elif not is_same:
            visit.unsent = text
            visit.history.require_space(text)
            shown.write(index, text)

    def _begin_naming(self, visit: Visit, row: Any) -> Updates:
        named = visit.of_row(row)
        visit.history.named_id = named.id
        return {self._name: gr.Textbox(named.name or named.title, visible=True)}

    def _end_naming(self, visit: Visit, name: str) -> Updates:
        visit.history.rename(name)
        return {self._name: gr.Textbox(visible=False)}

    async def _leave(self, request: gr.Request) -> None:
        """Stop all answers: the page is closed or disconnected, and may come back."""
        history = self._histories.get(str(request.session_hash))
        if history is not None:
            history.stop_all()


def _step(visit: Visit) -> None:
    """Show another branch: that of number "place" at message "index"."""
    if (index := visit.index) is not None and visit.shown:
        visit.shown.step(index, int(visit.event.place))


def _delete(visit: Visit, row: Any) -> None:
    gone = visit.of_row(row)
    visit.history.remove(gone.id)
    if visit.history.removed is not None:
        visit.history.notice = {"text": f"“{gone.title}” is deleted. Undo brings it back."}


def _search(visit: Visit, query: str) -> None:
    visit.history.query = query[:_LONGEST_QUERY]


def _import(visit: Visit) -> None:
    """Take over the conversations of a file, whose "text" `page.js` has read."""
    try:
        count = visit.history.restore(json.loads(str(visit.event.text)))
    except (ValueError, RecursionError):
        raise UsageError("this is no file of conversations: it is not JSON") from None
    if not count:
        raise UsageError("nothing imported: no conversation is new, or there is no room")
    told = f"{count} conversation{'s' if count > 1 else ''} imported."
    visit.history.notice = {"text": told}


def _button(label: str, icon: str, name: str) -> gr.Button:
    """A button with the icon of that name."""
    return gr.Button(label, scale=0, min_width=0, elem_id=name, elem_classes=f"glyph-{icon}")
