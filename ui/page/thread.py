"""What a visitor is shown of a conversation: its messages, its state, what to do after an error."""

from collections.abc import Mapping
from html import escape
from typing import Any

from hotcold.actors.protocol.messages import Generation
from hotcold.ui.api.errors import ApiError
from hotcold.ui.page.conversations import Conversation
from hotcold.ui.page.maths import with_formulas

# A heading and questions for an empty thread. The embedded demo model knows Python's documentation,
# and little else; a model without a chat template goes on with a text.
_OF_DEMO = (
    "Ask about Python's standard library",
    "What does textwrap.dedent do?",
    "What does os.path.join do?",
    "What does itertools.chain do?",
)
_OF_CHATS = (
    "What do you want to know?",
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about the first snow.",
    "What are good questions to ask before buying a used bicycle?",
)
_OF_TEXTS = (
    "Begin a text, and the model goes on",
    "Once upon a time",
    "The three most important inventions are",
    "def fibonacci(n):",
)
_ALL = 0.9995  # shown as 100.0%: a dense model's neurons


def suggestions(is_demo: bool, is_chat: bool) -> tuple[str, ...]:
    """A heading and three questions for an empty thread."""
    return (_OF_DEMO if is_demo else _OF_CHATS) if is_chat else _OF_TEXTS


def shown_messages(conversation: Conversation) -> list[dict[str, str]]:
    """Its messages, and below them what went wrong and what to do about it, as HTML."""
    messages = [
        {"role": message.role, "content": with_formulas(message.content)}
        for message in conversation.messages
    ]
    problem, last = conversation.problem, conversation.before(-1)
    if problem is not None:
        has_begun = last.role == "assistant" and last.content
        what = "The answer broke off" if has_begun else "No answer"
        text = escape(" ".join(problem.message.split()).rstrip("."))
        told = f"<strong>{what}: {text}.</strong> <span>{escape(remedy(problem))}</span>"
        messages.append({"role": "assistant", "content": f'<div class="problem">{told}</div>'})
    return messages


def remedy(problem: ApiError) -> str:
    """What a visitor can do about an error."""
    if problem.code == "context_length_exceeded":
        return "Start a new conversation, or shorten the question."
    if problem.status == 504:
        return "Ask for a shorter answer (Settings, Max tokens), then press Retry."
    if problem.status == 503:
        return "The question is kept. Wait a moment, then press Retry."
    if problem.status < 500:
        return "Change that under Settings, then press Retry."
    return "Press Retry. If it happens again, the server's log has the cause."


def thread_state(conversation: Conversation, notice: Mapping[str, str]) -> dict[str, Any]:
    """The state that the whole page goes by (`page.js`); `notice` takes its place between answers.

    state: "ready", "waiting" for an answer's first word, "answering" or "error"
    branches: of each message its number among those in its place, and how many these are; [] while
    one is answered
    """
    messages, text = conversation.messages, ""
    if conversation.is_answering:
        state = "answering" if messages[-1].content else "waiting"
        messages = []
    else:
        state = "error" if conversation.problem is not None else "ready"
    if state == "ready" and conversation.result is not None:
        text = _figures(conversation.result)
    before = [conversation.start, *messages]
    return {
        "state": state,
        "text": text,
        **({} if conversation.is_answering else notice),
        "id": conversation.id,
        "empty": not conversation.messages and conversation.problem is None,
        "branches": [[one.place, len(one.replies)] for one in before[: len(messages)]],
    }


def _figures(result: Generation) -> str:
    ends = {"length": ", cut: Max tokens or the context is used up", "cancelled": ", stopped"}
    read, reads = "", result.reads
    if reads:
        read = f", {reads['bytes_read'] / 1e6:.1f} MB a token read"
        read += f", {reads['hit_rate']:.1%} found in memory"
    skips = result.neurons_computed < _ALL
    computed = f", {result.neurons_computed:.1%} of neurons computed" if skips else ""
    return (
        f"{len(result.ids)} tokens at {result.decode_tokens_per_s:.0f} tokens/s{computed}{read}"
        f"{ends.get(result.finish_reason, '')}."
    )
