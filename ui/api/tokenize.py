"""POST /tokenize and /detokenize."""

import threading
from collections.abc import Iterable
from typing import Any

from hotcold.actors.driver.prompts import Prompts
from hotcold.model.errors import PromptError
from hotcold.model.text.tokenizer import Tokenizer
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.schemas import ChatMessage, DetokenizeRequest, Rendered, TokenizeRequest

_MAX_CHARS = 1 << 20  # a tokenizer takes about a second for them


async def tokenize(backend: Backend, body: TokenizeRequest) -> dict[str, Any]:
    """The ids of a text or a rendered conversation, of any length. Errors: PromptError."""
    _tokenizer(backend.prompts)

    def work(unwanted: threading.Event) -> list[Any]:
        ids = _encode(backend.prompts, body, unwanted)
        return [_piece(backend, one) for one in ids] if body.with_pieces else ids

    found = await backend.in_thread(work)
    limit = backend.prompts.context_length
    return {"count": len(found), "max_model_len": limit, "tokens": found}


async def detokenize(backend: Backend, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of ids, special tokens by their names. Errors: PromptError."""
    tokenizer = _tokenizer(backend.prompts)

    def decoded(unwanted: threading.Event) -> str:
        backend.prompts.require_in_vocabulary(body.tokens)
        return tokenizer.decode(body.tokens, False)

    text = await backend.in_thread(decoded)
    return {"prompt": text, "content": text}  # vLLM's name, and llama.cpp's


def rendered(prompts: Prompts, body: Rendered, messages: Iterable[ChatMessage]) -> str:
    """A conversation as its chat template writes it. Errors: PromptError, ConfigError."""
    told = [message.for_template for message in messages]
    tools = [tool.for_template for tool in body.tools or ()] or None
    tokenizer = _tokenizer(prompts)
    return _short(tokenizer.render_chat(told, tools=tools, variables=body.template_variables))


def _encode(prompts: Prompts, body: TokenizeRequest, unwanted: threading.Event) -> list[int]:
    if body.messages is None:
        return prompts.encode(_short(body.text), body.is_special_added, unwanted)
    text = rendered(prompts, body, body.messages)
    return prompts.encode(text, False, unwanted)  # the template writes special tokens


def _piece(backend: Backend, token_id: int) -> dict[str, Any]:
    """A token with its text, or its bytes where these are part of a character; llama.cpp's."""
    found = backend.texts.bytes_of(token_id)
    try:
        return {"id": token_id, "piece": found.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(found)}


def _short(text: str) -> str:
    if len(text) > _MAX_CHARS:
        raise PromptError(f"the text has {len(text)} characters; send at most {_MAX_CHARS}")
    return text


def _tokenizer(prompts: Prompts) -> Tokenizer:
    if prompts.tokenizer is None:
        raise PromptError("this model has no tokenizer, so no text; send token ids")
    return prompts.tokenizer
