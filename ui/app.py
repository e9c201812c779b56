"""The HTTP server's application: routes of two APIs, health, metrics, and the page."""

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from hotcold.model.errors import HotcoldError
from hotcold.ui.api import sse
from hotcold.ui.api.chat import chat
from hotcold.ui.api.completions import complete
from hotcold.ui.api.embeddings import EmbeddingsRequest, embed
from hotcold.ui.api.errors import ApiError, as_api_error
from hotcold.ui.api.not_served import add_not_served
from hotcold.ui.api.ollama import routes as ollama
from hotcold.ui.api.responses.answer import Responses
from hotcold.ui.api.routes import Route, add_routes
from hotcold.ui.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.api.tokenize import detokenize, tokenize
from hotcold.ui.openapi import add_description
from hotcold.ui.page.late_page import LatePage
from hotcold.ui.page.routes import PageRoutes
from hotcold.ui.system_routes import SystemRoutes

_GONE = (sse.ClientGoneError, ClientDisconnect)  # while it was answered, or sent its request
_CLIENT_GONE = 499  # no client reads it
_ROUTES = (
    Route("/v1/chat/completions", ChatRequest, chat, ("/chat/completions",)),
    Route("/v1/completions", CompletionRequest, complete),
    Route("/v1/embeddings", EmbeddingsRequest, embed),
    Route("/tokenize", TokenizeRequest, tokenize),
    Route("/detokenize", DetokenizeRequest, detokenize),
)


def create_app(
    models: ServedModels,
    pages: Mapping[str, Callable[[], Any]] | None = None,
    system_routes: SystemRoutes | None = None,
) -> FastAPI:
    """The application of some models.

    `pages`: by path, what makes each, a gradio.Blocks; it is called at a page's first view.
    `system_routes`: what this user's commands ask.
    """
    # FastAPI's own pages about routes fetch scripts from elsewhere; `add_description` adds others.
    app = FastAPI(title="hotcold", openapi_url=None, docs_url=None, redoc_url=None)
    _add_error_handlers(app, models)
    responses = Responses()
    routes = (*_ROUTES, *responses.routes)
    add_routes(app, routes, lambda request, body: models.choose(request, body.model))
    responses.add_stored(app)
    _add_models(app, models)
    _add_health(app, models)
    ollama.add_ollama(app, models)
    add_description(app, [route.schema for route in (*routes, *ollama.ROUTES)])
    if system_routes is not None:
        system_routes.add(app)
    add_not_served(app)
    if not pages:
        _add_root(app)
    else:
        for path in sorted(pages, key=len, reverse=True):  # "/" is the last: it takes the rest
            app.mount(path.rstrip("/"), PageRoutes(LatePage(pages[path], path)))
    return app


def _add_error_handlers(app: FastAPI, models: ServedModels) -> None:
    async def as_answer(request: Request, error: Exception) -> Response:
        if isinstance(error, _GONE):
            return Response(status_code=_CLIENT_GONE)
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, str(error.detail))
        answer = as_api_error(error)
        models.of(request).metrics.add_refusal(answer.status)
        body = answer.body_for(request.url.path)
        return JSONResponse(body, answer.status, answer.headers)

    for kind in (ApiError, HTTPException, HotcoldError, ValidationError, *_GONE, Exception):
        app.add_exception_handler(kind, as_answer)


def _add_models(app: FastAPI, models: ServedModels) -> None:
    @app.get("/v1/models")
    @app.get("/v1/models/", include_in_schema=False)
    @app.get("/models", include_in_schema=False)
    async def all_models() -> dict[str, Any]:
        """The models that are served, loaded or not."""
        return {"object": "list", "data": [models.listed(one) for one in models.backends]}

    @app.get("/v1/models/{wanted:path}")
    async def one_model(request: Request, wanted: str) -> dict[str, Any]:
        """The model of that name."""
        return models.listed(models.choose(request, wanted))


def _add_root(app: FastAPI) -> None:
    """The line by which clients of Ollama recognise a server, where there is no page."""

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def root() -> PlainTextResponse:
        return PlainTextResponse("Ollama is running")


def _add_health(app: FastAPI, models: ServedModels) -> None:
    @app.get("/health")
    @app.get("/v1/health", include_in_schema=False)
    async def health() -> Response:
        """Whether all that is loaded answers, and what is loaded."""
        found = await models.health()
        return JSONResponse(found, 200 if found["status"] == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counters and gauges for Prometheus."""
        return Response(await models.metrics_text(), media_type=CONTENT_TYPE_LATEST)
