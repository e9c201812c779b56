"""The chat: conversations on one side, the open one in the middle with the field to ask in.

A task reads each answer (`ui.page.conversations`); what a visitor sees is painted from the open
conversation several times a second, whichever answers are under way.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from hotcold.model.errors import HotcoldError
from hotcold.model.files.locate import DEMO_DIRECTORY
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.cached import client
from hotcold.ui.fair_share import first_to_leave
from hotcold.ui.gate import given_key
from hotcold.ui.keys import client_of, network_of
from hotcold.ui.page import asset, script
from hotcold.ui.page.chat_settings import ChatSettings
from hotcold.ui.page.conversation_list import act, listed
from hotcold.ui.page.conversations import ChatHistory, Conversation
from hotcold.ui.page.maths import DELIMITERS
from hotcold.ui.page.thread import shown_messages, suggestions, thread_state

_PAINT_S = 0.1
MAX_VISITORS = 200  # whose conversations the server holds; browsers keep them too
_SECRET = "hotcold"  # of localStorage; it protects nothing from readers of the page


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
        """The list of conversations."""
        self._list = gr.HTML(
            listed(ChatHistory()), html_template=asset("list.html"),
            js_on_load=script("list.js"), elem_id="conversations",
            apply_default_css=False,
        )  # fmt: skip
        self._saved = gr.BrowserState([], storage_key="hotcold-conversations", secret=_SECRET)

    def chat_column(self) -> None:
        """The open conversation, and the field below it."""
        self._chatbot = gr.Chatbot(
            label="Conversation", show_label=False, container=False, height="100%",
            elem_id="chat", buttons=[], feedback_options=None, latex_delimiters=DELIMITERS,
        )  # fmt: skip
        heading, *questions = self._suggestions
        with gr.Column(elem_id="welcome"):
            gr.HTML(f"<h2>{heading}</h2>", apply_default_css=False)
            with gr.Row():
                self._suggested = [gr.Button(question, min_width=180) for question in questions]
        with gr.Row(elem_id="ask"):
            _round_button("Add files of text", "attach")
            self._question = gr.Textbox(
                show_label=False, label="Question", container=False, max_lines=10, scale=8,
                placeholder="Ask something" if self._is_chat else "A text to go on with",
                autofocus=True, min_width=100, elem_id="question",
            )  # fmt: skip
            self._send = _round_button("Send", "send")
            self._stop = _round_button("Stop", "stop")
        self._state = gr.HTML(
            thread_state(Conversation()), html_template="<p></p>",
            js_on_load=script("thread.js"), elem_id="status",
            apply_default_css=False,
        )  # fmt: skip

    def connect(self, page: gr.Blocks, settings: ChatSettings) -> None:
        """Say what happens at each event."""
        self._settings = settings
        outputs = [self._chatbot, self._list, self._state]
        kept = [self._saved, self._state]  # of a page that has outlived its server
        own = [*kept, *settings.inputs]
        private: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        # All that is shown comes through the queue's one stream: an older view, such as that of a
        # page that has just been made, would else follow the one of a question, and take its place.
        quick = private | {
            "outputs": outputs,
            "concurrency_limit": None,
            "trigger_mode": "multiple",
        }
        answers = quick | {"outputs": [*outputs, self._question]}
        asked = [
            gr.on(
                [self._question.submit, self._send.click],
                self._ask, [self._question, *own], **answers,
            ),
            *(each.click(self._ask, [each, *own], **answers) for each in self._suggested),
            self._state.again(self._again, own, **answers),
        ]  # fmt: skip
        changed = [
            self._state.step(self._step, kept, **quick),
            self._list.act(self._act, kept, **quick),
        ]
        for event in [*asked, *changed]:
            event.then(self._save, self._saved, self._saved, **private)
        self._stop.click(self._end_answer, None, None, **private | {"queue": False})
        page.load(self._restore, self._saved, **quick)
        page.unload(self._leave)

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

    def _resumed(self, request: gr.Request, saved: Any, state: Any) -> ChatHistory:
        """The visitor's, which a server that was started meanwhile has from the open page."""
        history = self._history(request)
        history.take_over(saved, str(state.get("id", "")) if isinstance(state, dict) else "")
        return history

    def _view(self, history: ChatHistory) -> tuple[Any, ...]:
        """The thread, the list of conversations, the state."""
        shown = history.open
        return shown_messages(shown), listed(history), thread_state(shown)

    async def _follow(
        self, history: ChatHistory, followed: Conversation
    ) -> AsyncIterator[tuple[Any, ...]]:
        """Paint the open conversation until `followed` has its answer, when something changes."""
        painted = None
        while followed.is_answering:
            shown = history.open
            content = shown.messages[-1].content if shown.messages else ""
            now = (shown.id, len(shown.messages), len(content), shown.is_answering)
            if now != painted:
                painted = now
                yield self._view(history)
            await asyncio.sleep(_PAINT_S)
        yield self._view(history)

    async def _answer(
        self,
        history: ChatHistory,
        conversation: Conversation,
        question: str | None,
        settings: tuple[Any, ...],
        at: int | None = None,
    ) -> AsyncIterator[tuple[Any, ...]]:
        """Ask, and paint; `question` and `at` as `Conversation.ask` has them."""  # fmt: skip
        try:
            system_prompt, sampling = self._settings.read(settings)
            history.require_space(question or "")
        except HotcoldError as error:
            is_below = question is not None and conversation is history.open
            conversation.refuse(error, is_below=is_below)
            yield *self._view(history), question if is_below else gr.skip()
            return
        conversation.ask(self._backend, question, sampling, system_prompt, self._is_chat, at)
        history.forget_oldest()
        yield *self._view(history), "" if at is None else gr.skip()
        async for view in self._follow(history, conversation):
            yield *view, gr.skip()

    async def _ask(
        self, request: gr.Request, question: str, saved: Any, state: Any, *settings: Any
    ) -> AsyncIterator[tuple[Any, ...]]:
        history = self._resumed(request, saved, state)
        if not question.strip() or history.open.is_answering:
            yield *self._view(history), gr.skip()
            return
        async for view in self._answer(history, history.open, question.strip(), settings):
            yield view

    async def _again(
        self, event: gr.EventData, request: gr.Request, saved: Any, state: Any, *settings: Any
    ) -> AsyncIterator[tuple[Any, ...]]:
        """Answer a message again, or another text in its place; an answer is only rewritten.

        event: "id" of the conversation, "index" of the message, "text" of what is in its place, or
        None
        """
        history, index, text = self._resumed(request, saved, state), int(event.index), event.text
        shown = history.find(str(event.id))
        if shown is None or shown.is_answering or not 0 <= index < len(shown.messages):
            yield *self._view(history), gr.skip()
            return
        is_answer = shown.messages[index].role == "assistant"
        if text is not None and is_answer:
            unwritten: Any = gr.skip()
            try:
                history.require_space(str(text))
                shown.write(index, str(text))
            except HotcoldError as error:
                shown.refuse(error)
                unwritten = str(text)
            yield *self._view(history), unwritten
            return
        question = None if text is None else str(text)
        at = index + 1 if text is None and not is_answer else index
        async for view in self._answer(history, shown, question, settings, at):
            yield view

    async def _step(
        self, event: gr.EventData, request: gr.Request, saved: Any, state: Any
    ) -> tuple[Any, ...]:
        """Show another branch of conversation "id": that of number "place" at message "index"."""
        history = self._resumed(request, saved, state)
        found, index = history.find(str(event.id)), int(event.index)
        if found is not None and not found.is_answering and 0 <= index < len(found.messages):
            found.step(index, int(event.place))
        return self._view(history)

    async def _end_answer(self, request: gr.Request) -> None:
        self._history(request).open.stop()

    async def _restore(self, saved: Any, request: gr.Request) -> tuple[Any, ...]:
        history = self._history(request)
        history.take_over(saved)
        return self._view(history)

    async def _act(
        self, event: gr.EventData, request: gr.Request, saved: Any, state: Any
    ) -> tuple[Any, ...]:
        """What a visitor did in the list of conversations."""
        history = self._resumed(request, saved, state)
        reply = act(history, event._data)
        if note := reply.pop("note", ""):
            gr.Info(note)
        messages, rows, state = self._view(history)
        return messages, rows | reply, state

    async def _save(self, saved: Any, request: gr.Request) -> list[dict[str, Any]]:
        """What the browser stores; an open page may have outlived the server's conversations."""
        history = self._history(request)
        history.take_over(saved)
        return history.saved()

    async def _leave(self, request: gr.Request) -> None:
        """Stop all answers: the page is closed or disconnected, and may come back."""
        history = self._histories.get(str(request.session_hash))
        if history is not None:
            history.stop_all()


def _round_button(label: str, name: str) -> gr.Button:
    """A button that shows the icon of that name."""
    return gr.Button(label, scale=0, min_width=36, elem_id=name, elem_classes=f"glyph-{name}")
