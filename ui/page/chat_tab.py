"""The chat: conversations on one side, the open one beside them, the live panel on the other.

A task reads each answer (`ui.page.conversations`); what a visitor sees is painted from the open
conversation a few times a second, whichever answers are under way.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

import gradio as gr

from actors.protocol.messages import Generation
from model.errors import HotcoldError
from ui.api.backend import Backend
from ui.page.chat_settings import ChatSettings, read_settings
from ui.page.conversations import ChatHistory, Conversation

_PAINT_S = 0.15
MOST_VISITORS = 200  # whose conversations the server holds; browsers keep them too
_SECRET = "hotcold"  # of localStorage: it keeps nobody out who can read the page
_TELL_PANEL = "() => { window.dispatchEvent(new Event('hotcold-run')) }"


class ChatTab:
    """Components and what happens at their events; made inside a `gr.Blocks`."""

    def __init__(self, backend: Backend, is_chat: bool) -> None:
        """Not `is_chat`: the model continues texts, because it has no chat template."""
        self._backend = backend
        self._is_chat = is_chat
        self._histories: OrderedDict[str, ChatHistory] = OrderedDict()  # by Gradio's session

    def list_column(self) -> None:
        """The list of conversations."""
        self._new = gr.Button("New conversation", elem_id="new", size="sm")
        self._list = gr.Radio(
            [], label="Conversations", elem_id="conversations", interactive=True, container=False
        )
        self._delete = gr.Button("Delete this conversation", elem_id="delete", size="sm")
        self._saved = gr.BrowserState([], storage_key="hotcold-conversations", secret=_SECRET)

    def chat_column(self, settings: Callable[[], ChatSettings]) -> None:
        """The open conversation, and below it `settings()`."""
        self._chatbot = gr.Chatbot(
            label="Conversation", height="60vh", editable="user", elem_id="chat",
            buttons=["copy"], feedback_options=None, placeholder=self._placeholder(),
        )  # fmt: skip
        with gr.Row(elem_id="ask"):
            self._question = gr.Textbox(
                show_label=False, label="Question", container=False, max_lines=8, scale=8,
                placeholder="Ask something" if self._is_chat else "A text to go on with",
                autofocus=True, min_width=120, elem_id="question",
            )  # fmt: skip
            self._send = gr.Button("Send", variant="primary", scale=1, min_width=60, elem_id="send")
            self._stop = gr.Button("Stop", scale=1, min_width=60, elem_id="stop", interactive=False)
        self._status = gr.Markdown(elem_id="status")
        self._settings = settings()

    def _placeholder(self) -> str:
        if self._is_chat:
            return "Ask something."
        return "This model has no chat template: it goes on with the text that you write."

    def connect(self, page: gr.Blocks) -> None:
        """Say what happens at each event."""
        outputs = [self._chatbot, self._list, self._stop, self._status]
        inputs = [self._question, *self._settings.inputs]
        answers: dict[str, Any] = {
            "outputs": [*outputs, self._question],
            "concurrency_limit": None,
            "trigger_mode": "multiple",
            "show_progress": "hidden",
            "api_visibility": "private",
        }
        quick: dict[str, Any] = answers | {"queue": False}
        own = self._settings.inputs
        events = [
            gr.on([self._question.submit, self._send.click], self._ask, inputs, **answers),
            self._chatbot.retry(self._retry, own, **answers),
            self._chatbot.edit(self._edit, own, **answers),
        ]
        for event in events:
            event.then(self._save, None, self._saved, show_progress="hidden")
        told = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        gr.on(
            [self._question.submit, self._send.click, self._chatbot.retry, self._chatbot.edit],
            None, None, None, js=_TELL_PANEL, **told,
        )  # fmt: skip
        self._stop.click(self._end_answer, None, None, **told)
        page.load(self._restore, self._saved, **quick)
        changes = [
            self._chatbot.undo(self._undo, None, **quick),
            self._new.click(self._start_new, None, **quick),
            self._delete.click(self._remove, None, **quick),
            self._chatbot.clear(self._clear, None, **quick),
        ]
        for event in changes:
            event.then(self._save, None, self._saved, show_progress="hidden")
        self._list.input(self._choose, self._list, **answers)
        page.unload(self._leave)

    def _history(self, request: gr.Request) -> ChatHistory:
        key = str(request.session_hash)
        history = self._histories.setdefault(key, ChatHistory())
        self._histories.move_to_end(key)
        while len(self._histories) > MOST_VISITORS:
            self._histories.popitem(last=False)[1].stop_all()
        return history

    def _view(self, history: ChatHistory, question: Any = None) -> tuple[Any, ...]:
        """Values of `outputs`, and of the question's field where it is to change."""
        shown = history.open
        choices = [(item.title, item.id) for item in history.conversations]
        return (
            [dict(message) for message in shown.messages],
            gr.Radio(choices=choices, value=shown.id),
            gr.Button(interactive=shown.is_answering),
            _status(shown),
            gr.skip() if question is None else question,
        )

    async def _follow(
        self, history: ChatHistory, followed: Conversation
    ) -> AsyncIterator[tuple[Any, ...]]:
        """Paint the open conversation until `followed` has its answer, when something changes."""
        painted = None
        while followed.is_answering:
            shown = history.open
            content = shown.messages[-1]["content"] if shown.messages else ""
            now = (shown.id, len(shown.messages), len(content), shown.is_answering)
            if now != painted:
                painted = now
                yield self._view(history)
            await asyncio.sleep(_PAINT_S)
        yield self._view(history)

    async def _answer(
        self, history: ChatHistory, question: str, settings: tuple[Any, ...]
    ) -> AsyncIterator[tuple[Any, ...]]:
        conversation = history.open
        try:
            system_prompt, sampling = read_settings(settings)
            history.require_room(question)
        except HotcoldError as error:
            conversation.error = str(error)
            yield self._view(history, question)
            return
        conversation.ask(self._backend, question, sampling, system_prompt, self._is_chat)
        yield self._view(history, "")
        async for view in self._follow(history, conversation):
            yield view

    async def _ask(
        self, request: gr.Request, question: str, *settings: Any
    ) -> AsyncIterator[tuple[Any, ...]]:
        history = self._history(request)
        if not question.strip() or history.open.is_answering:
            yield self._view(history)
            return
        async for view in self._answer(history, question.strip(), settings):
            yield view

    async def _retry(
        self, event: gr.RetryData, request: gr.Request, *settings: Any
    ) -> AsyncIterator[tuple[Any, ...]]:
        async for view in self._again(event.index, None, settings, request):
            yield view

    async def _edit(
        self, event: gr.EditData, request: gr.Request, *settings: Any
    ) -> AsyncIterator[tuple[Any, ...]]:
        async for view in self._again(event.index, str(event.value), settings, request):
            yield view

    async def _again(
        self, index: Any, question: str | None, settings: tuple[Any, ...], request: gr.Request
    ) -> AsyncIterator[tuple[Any, ...]]:
        history = self._history(request)
        if history.open.is_answering or not 0 <= int(index) < len(history.open.messages):
            yield self._view(history)
            return
        asked = history.open.cut(int(index))
        async for view in self._answer(history, question or asked, settings):
            yield view

    async def _undo(self, event: gr.UndoData, request: gr.Request) -> tuple[Any, ...]:
        history = self._history(request)
        if history.open.is_answering or not 0 <= int(event.index) < len(history.open.messages):
            return self._view(history)
        return self._view(history, history.open.cut(int(event.index)))

    async def _end_answer(self, request: gr.Request) -> None:
        self._history(request).open.stop()

    async def _restore(self, saved: Any, request: gr.Request) -> tuple[Any, ...]:
        history = self._history(request)
        history.restore(saved)
        return self._view(history)

    async def _start_new(self, request: gr.Request) -> tuple[Any, ...]:
        history = self._history(request)
        history.start_new()
        return self._view(history)

    async def _remove(self, request: gr.Request) -> tuple[Any, ...]:
        history = self._history(request)
        history.remove_open()
        return self._view(history)

    async def _clear(self, request: gr.Request) -> tuple[Any, ...]:
        history = self._history(request)
        history.clear_open()
        return self._view(history)

    async def _choose(self, chosen: str, request: gr.Request) -> AsyncIterator[tuple[Any, ...]]:
        history = self._history(request)
        if history.find(chosen) is not None:
            history.open_id = chosen
        yield self._view(history)

    async def _save(self, request: gr.Request) -> list[dict[str, Any]]:
        return self._history(request).saved()

    async def _leave(self, request: gr.Request) -> None:
        """The visitor has closed the page: nobody reads the answers any more."""
        history = self._histories.pop(str(request.session_hash), None)
        if history is not None:
            history.stop_all()


def _status(conversation: Conversation) -> str:
    if conversation.error:
        return f"**{conversation.error}**"
    if conversation.is_answering:
        return "Answering …"
    return "" if conversation.result is None else _figures(conversation.result)


def _figures(result: Generation) -> str:
    ends = {"stop": "", "length": ", cut at its length", "cancelled": ", stopped"}
    read, reads = "", result.reads
    if reads:
        read = f", {reads['bytes_read'] / 1e6:.1f} MB a token read"
        read += f", {reads['hit_rate']:.1%} found in memory"
    return (
        f"{len(result.ids)} tokens at {result.decode_tokens_per_s:.0f} tokens/s, "
        f"{result.neurons_computed:.1%} of neurons computed{read}"
        f"{ends.get(result.finish_reason, '')}."
    )
