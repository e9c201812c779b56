"""`truncation: auto`: a conversation that is too long loses its beginning."""

from hotcold.actors.protocol.messages import GenerateRequest
from hotcold.model.errors import PromptTooLongError
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.requests import chat_ids, chat_requests
from hotcold.ui.api.schemas import ChatRequest

_SHARE = 0.75  # of the context; the rest is for the answer


async def shortened(backend: Backend, chat: ChatRequest) -> list[GenerateRequest]:
    """The request of the most last turns that fit; what the system says stays.

    A turn begins with what a user says. The last one stays whole.
    Errors:  PromptTooLongError where it alone is too long; those of `chat_requests`
    """
    starts = [place for place, one in enumerate(chat.messages) if one.role == "user"][1:]
    if not starts:
        return await chat_requests(backend, chat)
    most = backend.prompts.context_length * _SHARE
    fitting, ids = _from(chat, starts[-1]), None
    first, last = 0, len(starts) - 1
    while first <= last:  # of the starts that may fit, the earliest
        middle = (first + last) // 2
        tried = _from(chat, starts[middle])
        try:
            found = await chat_ids(backend, tried)
        except PromptTooLongError:
            found = None
        if found is not None and len(found) <= most:
            fitting, ids, last = tried, found, middle - 1
        else:
            first = middle + 1
    return await chat_requests(backend, fitting, ids)


def _from(chat: ChatRequest, start: int) -> ChatRequest:
    said = [one for one in chat.messages[:start] if one.role in ("system", "developer")]
    return chat.model_copy(update={"messages": [*said, *chat.messages[start:]]})
