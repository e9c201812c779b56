"""Ollama's routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from hotcold.ui.api.answer import JsonAnswer, answer_of, answered
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.ollama import models as facts
from hotcold.ui.api.ollama.answer import Body, OllamaAnswer, loaded_or_ended
from hotcold.ui.api.ollama.embed import embed, embed_one
from hotcold.ui.api.ollama.schemas import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaModel,
    OllamaShow,
)
from hotcold.ui.api.schemas import parse
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.openapi import body_of

_VERSION = "0.32.15"  # of Ollama's API: clients check it before they use newer parts
_FORBIDDEN = 403
_ELSEWHERE = {
    ("POST", "/api/pull"): "models are not fetched here: use `hotcold pull`, then `hotcold serve`",
    ("POST", "/api/push"): "models are not sent anywhere from here",
    ("POST", "/api/create"): "models are not made here",
    ("POST", "/api/copy"): "models are not copied here",
    ("DELETE", "/api/delete"): "models are not deleted here: use `hotcold rm`",
    ("POST", "/api/blobs/{digest}"): "files are not kept here",
}


def add_ollama(app: FastAPI, models: ServedModels) -> None:
    """Add the routes to `app`."""
    _add_answers(app, models)
    _add_models(app, models)
    for (method, path), reason in _ELSEWHERE.items():
        app.add_api_route(path, _refusing(reason), methods=[method], include_in_schema=False)


def _add_answers(app: FastAPI, models: ServedModels) -> None:
    async def answer(request: Request, body: Body, is_load: bool) -> Response:
        backend = _choose(models, request, body)

        async def work() -> Response:
            if is_load:
                return JSONResponse(await loaded_or_ended(backend, body))
            return await answer_of(OllamaAnswer(backend, body), body.stream is not False)

        made: Response = await answered(request, work())
        return made

    @app.post("/api/generate", openapi_extra=body_of(OllamaGenerate))
    async def generate(request: Request) -> Response:
        """Answer a prompt, as Ollama does: a line of JSON a piece, unless `stream` is false."""
        body = parse(OllamaGenerate, await request.body())
        return await answer(request, body, not body.prompt)

    @app.post("/api/chat", openapi_extra=body_of(OllamaChat))
    async def chat(request: Request) -> Response:
        """Answer a conversation, as Ollama does: a line of JSON a piece."""
        body = parse(OllamaChat, await request.body())
        return await answer(request, body, not body.messages)

    async def vectors(
        request: Request, schema: type[Any], embedded: Callable[..., Coroutine[Any, Any, Any]]
    ) -> Response:
        body = parse(schema, await request.body())
        backend = _choose(models, request, body)
        found = await answered(request, embedded(backend, body))
        backend.keep(body.stays)
        return JsonAnswer(found)

    @app.post("/api/embed", openapi_extra=body_of(OllamaEmbed))
    async def embed_texts(request: Request) -> Response:
        """A vector of length 1 for each text."""
        return await vectors(request, OllamaEmbed, embed)

    @app.post("/api/embeddings", openapi_extra=body_of(OllamaEmbeddings))
    async def embed_text(request: Request) -> Response:
        """The vector of one text, as older clients of Ollama ask for it."""
        return await vectors(request, OllamaEmbeddings, embed_one)


def _add_models(app: FastAPI, models: ServedModels) -> None:
    @app.get("/api/version")
    async def version() -> dict[str, Any]:
        """The version of Ollama whose API this is."""
        return {"version": _VERSION}

    @app.get("/api/tags")
    async def tags(request: Request) -> dict[str, Any]:
        """The models that are served, loaded or not."""
        return dict(await answered(request, facts.listed(models.backends)))

    @app.get("/api/ps")
    async def running(request: Request) -> dict[str, Any]:
        """The models that are loaded."""
        return dict(await answered(request, facts.running(models.backends)))

    @app.post("/api/show", openapi_extra=body_of(OllamaShow))
    async def show(request: Request) -> dict[str, Any]:
        """What a model is."""
        backend = _choose(models, request, parse(OllamaShow, await request.body()))
        return dict(await answered(request, facts.shown(backend)))


def _refusing(reason: str) -> Callable[[], Awaitable[None]]:
    async def refuse() -> None:
        raise ApiError(_FORBIDDEN, reason)

    return refuse


def _choose(models: ServedModels, request: Request, body: OllamaModel) -> Backend:
    """The model of a request; its name may have the tag that Ollama adds.

    Errors:  ApiError 400 and 404
    """
    names, name = {backend.name for backend in models.backends}, body.wanted
    plain = name if name in names else name.removesuffix(facts.TAG)
    if plain not in names:
        raise ApiError(404, f"model {name[:100]!a} not found", code="model_not_found")
    return models.choose(request, plain)
