"""POST /tokenize and /detokenize."""

import threading
from typing import Any

from hotcold.actors.driver.prompts import Prompts
from hotcold.model.errors import PromptError
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.schemas import DetokenizeRequest, TokenizeRequest

_MAX_CHARS = 1 << 20  # a tokenizer takes about a second for them


async def tokenize(backend: Backend, body: TokenizeRequest) -> dict[str, Any]:
    """The ids of a text or a rendered conversation, of any length. Errors: PromptError."""
    _tokenizer(backend.prompts)
    ids = await backend.in_thread(lambda unwanted: _encode(backend.prompts, body, unwanted))
    limit = backend.prompts.context_length
    return {"count": len(ids), "max_model_len": limit, "tokens": ids}


async def detokenize(backend: Backend, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of ids, special tokens by their names. Errors: PromptError."""
    tokenizer = _tokenizer(backend.prompts)

    def decoded(unwanted: threading.Event) -> str:
        backend.prompts.require_in_vocabulary(body.tokens)
        return tokenizer.decode(body.tokens, False)

    return {"prompt": await backend.in_thread(decoded)}


def _encode(prompts: Prompts, body: TokenizeRequest, unwanted: threading.Event) -> list[int]:
    if body.messages is None:
        return prompts.encode(_short(body.prompt or ""), body.add_special_tokens, unwanted)
    messages = [message.for_template for message in body.messages]
    tools = [tool.for_template for tool in body.tools or ()] or None
    text = _tokenizer(prompts).render_chat(messages, tools=tools, variables=body.template_variables)
    return prompts.encode(_short(text), False, unwanted)  # the template writes special tokens


def _short(text: str) -> str:
    if len(text) > _MAX_CHARS:
        raise PromptError(f"the text has {len(text)} characters; send at most {_MAX_CHARS}")
    return text


def _tokenizer(prompts: Prompts) -> Tokenizer:
    if prompts.tokenizer is None:
        raise PromptError("this model has no tokenizer, so no text; send token ids")
    return prompts.tokenizer
