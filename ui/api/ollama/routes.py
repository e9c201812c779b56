"""Ollama's routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from hotcold.ui.api.ollama import models as facts
from hotcold.ui.api.ollama.answer import answer
from hotcold.ui.api.ollama.embed import embed_text, embed_texts
from hotcold.ui.api.ollama.schemas import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaShow,
)
from hotcold.ui.api.routes import Route, add_routes
from hotcold.ui.api.served_models import ServedModels

_VERSION = "0.32.15"  # of Ollama's API: clients check it before they use newer parts
ROUTES = (
    Route("/api/generate", OllamaGenerate, answer),
    Route("/api/chat", OllamaChat, answer),
    Route("/api/embed", OllamaEmbed, embed_texts),
    Route("/api/embeddings", OllamaEmbeddings, embed_text),
    Route("/api/show", OllamaShow, facts.show),
)


def add_ollama(app: FastAPI, models: ServedModels) -> None:
    """Add the routes to `app`."""
    add_routes(app, ROUTES, lambda request, body: models.choose(request, body.wanted))

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
