"""Ollama's routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request

from hotcold.ui.api.backend import Backend
from hotcold.ui.api.errors import ApiError
from hotcold.ui.api.ollama import models as facts
from hotcold.ui.api.ollama.answer import chat, generate
from hotcold.ui.api.ollama.embed import embed_text, embed_texts
from hotcold.ui.api.ollama.schemas import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaModel,
    OllamaShow,
)
from hotcold.ui.api.routes import Route, add_routes
from hotcold.ui.api.served_models import ServedModels

_VERSION = "0.32.15"  # of Ollama's API: clients check it before they use newer parts
ROUTES = (
    Route("/api/generate", OllamaGenerate, generate),
    Route("/api/chat", OllamaChat, chat),
    Route("/api/embed", OllamaEmbed, embed_texts),
    Route("/api/embeddings", OllamaEmbeddings, embed_text),
    Route("/api/show", OllamaShow, facts.show),
)


def add_ollama(app: FastAPI, models: ServedModels) -> None:
    """Add the routes to `app`."""
    add_routes(app, ROUTES, lambda request, body: _choose(models, request, body))

    @app.get("/api/version")
    async def version() -> dict[str, Any]:
        """The version of Ollama whose API this is."""
        return {"version": _VERSION}

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """The models that are served, loaded or not."""
        return await facts.listed(models.backends)

    @app.get("/api/ps")
    async def running() -> dict[str, Any]:
        """The models that are loaded."""
        return await facts.running(models.backends)


def _choose(models: ServedModels, request: Request, body: OllamaModel) -> Backend:
    """The model of a request; its name may have the tag that Ollama adds.

    Errors:  ApiError 400 and 404
    """
    names, name = {backend.name for backend in models.backends}, body.wanted
    plain = name if name in names else name.removesuffix(facts.TAG)
    if plain not in names:
        raise ApiError(404, f"model {name[:100]!a} not found", code="model_not_found")
    return models.choose(request, plain)
