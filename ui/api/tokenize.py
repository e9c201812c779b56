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
    """The ids of a text, or of a conversation."""
    _tokenizer(backend.prompts)

    def work(unwanted: threading.Event) -> list[int]:
        if body.prompt is not None:
            text = _short(body.prompt)
            return backend.prompts.encode(text, body.add_special_tokens is not False, unwanted)
        text = _rendered(backend.prompts, body)
        return backend.prompts.encode(text, False, unwanted)  # the template writes special tokens

    found = await backend.in_thread(work)
    limit = backend.prompts.context_length
    return {"count": len(found), "max_model_len": limit, "tokens": found}


async def detokenize(backend: Backend, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of ids."""
    tokenizer = _tokenizer(backend.prompts)

    def decoded(unwanted: threading.Event) -> str:
        backend.prompts.require_in_vocabulary(body.tokens)
        return tokenizer.decode(body.tokens, False)

    return {"prompt": await backend.in_thread(decoded)}


def _rendered(prompts: Prompts, body: TokenizeRequest) -> str:
    """A conversation as its chat template writes it. Errors: PromptError, ConfigError."""
    told = [message.for_template for message in body.messages or ()]
    tools = [tool.for_template for tool in body.tools or ()] or None
    tokenizer = _tokenizer(prompts)
    return _short(tokenizer.render_chat(told, tools=tools, variables=body.template_variables))


def _short(text: str) -> str:
    if len(text) > _MAX_CHARS:
        raise PromptError(f"the text has {len(text)} characters; send at most {_MAX_CHARS}")
    return text


def _tokenizer(prompts: Prompts) -> Tokenizer:
    if prompts.tokenizer is None:
        raise PromptError("this model has no tokenizer, so no text; send token ids")
    return prompts.tokenizer
