"""The HTTP server's application: OpenAI's routes, health and metrics, and the page beside them."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ui.api import sse
from ui.api import text as api_text
from ui.api.backend import Backend
from ui.api.chat import ChatRoute
from ui.api.completions import CompletionRoute
from ui.api.embeddings.route import POOLING, EmbeddingsRoute
from ui.api.embeddings.schemas import EmbeddingsRequest
from ui.api.errors import ApiError, as_api_error
from ui.api.responses.route import ResponsesRoute
from ui.api.responses.schemas import ResponsesRequest
from ui.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse
from ui.api.tokens import TokenTexts
from ui.described import add_description, body_of

_GONE = (sse.ClientGoneError, ClientDisconnect)  # while it was answered, or had half asked
_CLIENT_GONE = 499  # nobody reads it


def create_app(backend: Backend, page: Any = None) -> FastAPI:
    """The application for one running system; `page` is a gradio.Blocks, shown at "/"."""
    # Its own pages about the routes fetch scripts from elsewhere: `add_description` has others.
    app = FastAPI(title="hotcold", openapi_url=None, docs_url=None, redoc_url=None)
    _add_error_handlers(app, backend)
    _add_completions(app, backend)
    _add_models(app, backend)
    _add_tools(app, backend)
    add_description(
        app,
        [
            ChatRequest,
            ResponsesRequest,
            CompletionRequest,
            EmbeddingsRequest,
            TokenizeRequest,
            DetokenizeRequest,
        ],
    )
    _add_unknown(app)
    if page is not None:
        from ui.page.page import mount_page  # Gradio takes seconds to import

        app = mount_page(app, page)
    return app


def _add_error_handlers(app: FastAPI, backend: Backend) -> None:
    async def told(request: Request, error: Exception) -> Response:
        if isinstance(error, _GONE):
            return Response(status_code=_CLIENT_GONE)
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, str(error.detail))
        answer = as_api_error(error)
        backend.metrics.add_refusal(answer.status)
        return JSONResponse(answer.body, answer.status, answer.headers)

    for kind in (ApiError, HTTPException, *_GONE, Exception):
        app.add_exception_handler(kind, told)


def _add_completions(app: FastAPI, backend: Backend) -> None:
    texts = TokenTexts(backend.prompts.tokenizer)
    chats, completions = ChatRoute(backend, texts), CompletionRoute(backend, texts)
    responses, vectors = ResponsesRoute(backend), EmbeddingsRoute(backend)

    @app.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answer a conversation, as OpenAI's chat completions do."""
        body = parse(ChatRequest, await request.body())
        backend.require_model(body.model)
        if body.stream:
            return await _answer(request, chats.stream(body))
        return JSONResponse(await _answer(request, chats.whole(body)))

    @app.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
    async def complete(request: Request) -> Response:
        """Continue a text, as OpenAI's completions do."""
        body = parse(CompletionRequest, await request.body())
        backend.require_model(body.model)
        if body.stream:
            return await _answer(request, completions.stream(body))
        return JSONResponse(await _answer(request, completions.whole(body)))

    @app.post("/v1/responses", openapi_extra=body_of(ResponsesRequest))
    async def respond(request: Request) -> Response:
        """Answer a conversation of items, as OpenAI's responses do; nothing is kept."""
        body = parse(ResponsesRequest, await request.body())
        backend.require_model(body.model)
        if body.stream:
            return await _answer(request, responses.stream(body))
        return JSONResponse(await _answer(request, responses.whole(body)))

    @app.post("/v1/embeddings", openapi_extra=body_of(EmbeddingsRequest))
    async def embed(request: Request) -> Response:
        """A vector for each text: the mean of the model's last hidden states."""
        body = parse(EmbeddingsRequest, await request.body())
        backend.require_model(body.model)
        return JSONResponse(await _answer(request, vectors.whole(body)))


async def _answer(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` returns; what it raises as an ApiError, so that none is taken for a defect."""
    try:
        return await sse.unless_gone(request.receive, work)
    except sse.ClientGoneError:
        raise
    except Exception as error:
        raise as_api_error(error) from error


def _add_models(app: FastAPI, backend: Backend) -> None:
    name = backend.settings.model_name
    model = {
        "id": name,
        "object": "model",
        "created": backend.created_at,
        "owned_by": "hotcold",
        "max_model_len": backend.prompts.context_length,
        "embedding": {"size": backend.prompts.config.hidden_size, "pooling": POOLING},
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{wanted:path}")
    async def one_model(wanted: str) -> dict[str, Any]:
        """The model of that name."""
        backend.require_model(wanted)
        return model


def _add_unknown(app: FastAPI) -> None:
    """What is under /v1 is never the page's."""

    @app.api_route("/v1/{rest:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    async def unknown(request: Request) -> Response:
        raise ApiError(404, f"there is no {request.method} {ascii(request.url.path)[1:-1]} here")


def _add_tools(app: FastAPI, backend: Backend) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Whether the driver answers."""
        try:
            load = await backend.client.load()
        except Exception as error:
            status = {"status": "failed", "reason": as_api_error(error).message}
            return JSONResponse({**status, "model": backend.settings.model_name}, 503)
        found = {"status": "ok", "model": backend.settings.model_name, "device": load.device}
        return JSONResponse(found)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counters and gauges for Prometheus."""
        text = backend.metrics.text(await backend.client.load())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The ids of a text, or of a conversation."""
        body = parse(TokenizeRequest, await request.body())
        return await _tool(backend, body.model, lambda: api_text.tokenize(backend, body))

    @app.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of ids."""
        body = parse(DetokenizeRequest, await request.body())
        return await _tool(backend, body.model, lambda: api_text.detokenize(backend, body))


async def _tool(
    backend: Backend, model: str | None, work: Callable[[], Awaitable[dict[str, Any]]]
) -> Response:
    backend.require_model(model)
    try:
        return JSONResponse(await work())
    except Exception as error:
        raise as_api_error(error) from error
