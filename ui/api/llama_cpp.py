"""Routes of llama.cpp's server besides those that are OpenAI's.

Source:  llama.cpp, tools/server/README.md
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, model_validator

import hotcold
from hotcold.ui.api import fields
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.embeddings import embeddings, prompts_to_embed, unit
from hotcold.ui.api.errors import unavailable
from hotcold.ui.api.llama_completion import LlamaCompletion, LlamaCompletionRoute, settings
from hotcold.ui.api.route import JsonAnswer, answered
from hotcold.ui.api.schemas import Messages, Prompt, Rendered, parse, prompts_of
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.api.tokenize import rendered
from hotcold.ui.openapi import body_of


class ApplyTemplate(Rendered):
    """POST /apply-template: a conversation."""

    messages: Messages
    model: str | None = None


class LlamaEmbedding(fields.Request):
    """POST /embedding: a text, token ids, or several of them, as `content` or `input`."""

    content: Prompt | None = Field(default=None, union_mode="left_to_right")
    input: Prompt | None = Field(default=None, union_mode="left_to_right")
    model: str | None = None
    embd_normalize: Literal[-1, 2] = 2  # as they are, or of length 1

    @model_validator(mode="after")
    def _is_one(self) -> LlamaEmbedding:
        if (self.content is None) == (self.input is None):
            raise ValueError("give either content or input")
        return self


SCHEMAS: list[type[BaseModel]] = [LlamaCompletion, ApplyTemplate, LlamaEmbedding]


def add_llama_cpp(app: FastAPI, models: ServedModels) -> None:
    """Add the routes to `app`."""
    _add_answers(app, models)
    _add_facts(app, models)


def _add_answers(app: FastAPI, models: ServedModels) -> None:
    @app.post("/completion", openapi_extra=body_of(LlamaCompletion))
    @app.post("/completions", openapi_extra=body_of(LlamaCompletion))
    async def complete(request: Request) -> Response:
        """Continue a text, as llama.cpp's server does."""
        body = parse(LlamaCompletion, await request.body())
        route = LlamaCompletionRoute(models.choose(request, body.model))
        if body.stream:
            found: Response = await answered(request, route.stream(body))
            return found
        return JsonAnswer(await answered(request, route.whole(body)))

    @app.post("/apply-template", openapi_extra=body_of(ApplyTemplate))
    async def apply_template(request: Request) -> Response:
        """The prompt of a conversation, for /completion."""
        body = parse(ApplyTemplate, await request.body())
        backend = models.choose(request, body.model)
        return JsonAnswer(await answered(request, _prompt(backend, body), "messages"))

    @app.post("/embedding", openapi_extra=body_of(LlamaEmbedding))
    @app.post("/embeddings", openapi_extra=body_of(LlamaEmbedding))
    async def embed(request: Request) -> Response:
        """A vector for each text, of length 1 unless `embd_normalize` is -1."""
        body = parse(LlamaEmbedding, await request.body())
        backend = models.choose(request, body.model)
        name = "input" if body.content is None else "content"
        return JsonAnswer(await answered(request, _vectors(backend, body), name))


def _add_facts(app: FastAPI, models: ServedModels) -> None:
    @app.get("/props")
    async def props(request: Request, model: str | None = None) -> Response:
        """What the server is set to."""
        return JSONResponse(_props(models.choose(request, model)))

    @app.get("/slots")
    async def slots(
        request: Request, model: str | None = None, fail_on_no_slot: str = ""
    ) -> Response:
        """Whether each of the requests that may run side by side is there."""
        backend = models.choose(request, model)
        if fail_on_no_slot not in ("", "0") and backend.num_active >= backend.num_parallel:
            raise unavailable("no slot available", "no_slot")
        return JSONResponse(
            [
                {
                    "id": number,
                    "n_ctx": backend.prompts.context_length,
                    "is_processing": number < backend.num_active,
                }
                for number in range(backend.num_parallel)
            ]
        )


async def _prompt(backend: Backend, body: ApplyTemplate) -> dict[str, str]:
    """The conversation as text, without the bos that /completion puts before it.

    Errors:  PromptError
    """
    prompts = backend.prompts

    def work(unwanted: threading.Event) -> str:
        text = rendered(prompts, body, body.messages)
        bos = prompts.bos_id
        name = "" if bos is None or prompts.tokenizer is None else _text_of(backend, bos)
        return text.removeprefix(name)

    return {"prompt": await backend.in_thread(work)}


async def _vectors(backend: Backend, body: LlamaEmbedding) -> list[dict[str, Any]]:
    """Errors: ApiError, HotcoldError."""
    given = body.input if body.content is None else body.content
    found = await embeddings(backend, await prompts_to_embed(backend, prompts_of(given)))
    if body.embd_normalize == 2:
        found = await asyncio.to_thread(lambda: list(map(unit, found)))
    return [{"index": index, "embedding": [vector]} for index, vector in enumerate(found)]


def _props(backend: Backend) -> dict[str, Any]:
    tokenizer, config = backend.prompts.tokenizer, backend.prompts.config
    bos, eos = config.bos_token_id, next(iter(config.eos_token_ids), None)
    return {
        "default_generation_settings": {
            "n_ctx": backend.prompts.context_length,
            "params": settings(backend.defaults),
        },
        "total_slots": backend.num_parallel,
        "model_alias": backend.name,
        "model_path": Path(backend.config.model_path).name,  # where it lies is the server's
        "modalities": {"vision": False, "audio": False},
        "chat_template": "" if tokenizer is None else tokenizer.chat_template or "",
        "bos_token": _text_of(backend, bos),
        "eos_token": _text_of(backend, eos),
        "build_info": f"hotcold {hotcold.__version__}",
        "is_sleeping": not backend.is_loaded,
    }


def _text_of(backend: Backend, token_id: int | None) -> str:
    return "" if token_id is None else backend.texts.text_of(token_id)
