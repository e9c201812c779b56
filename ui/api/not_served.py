"""What is not served: other methods of a route, known routes of other servers, all else."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from hotcold.ui.api.errors import ApiError

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"))
_TEXT_ALONE = "models are given text alone here, and answer with text"
_NO_RANKS = "texts are not ranked here; /v1/embeddings gives their vectors"
# Routes of other servers, each with what to use instead.
_ELSEWHERE = {
    "/v1/messages": "Anthropic's API is not served here; use /v1/chat/completions",
    "/v1/messages/count_tokens": "Anthropic's API is not served here; use /tokenize",
    "/v1/batches": "files of requests are answered by a job: docs/running.md",
    "/v1/responses/compact": "no conversation is made shorter here; have the model sum it up",
    "/v1/responses/{response_id}/input_items": "send what you need of them along",
    "/v1/conversations": "no conversations are kept here; /v1/responses has previous_response_id",
    **dict.fromkeys(
        ("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations",
         "/v1/images/generations", "/v1/images/edits", "/v1/videos"),
        _TEXT_ALONE,
    ),
    **dict.fromkeys(
        ("/rerank", "/reranking", "/score", "/v1/rerank", "/v1/reranking", "/v1/score",
         "/v2/rerank"),
        _NO_RANKS,
    ),
    "/generate": "use /v1/completions",
    "/generate_stream": "use /v1/completions with stream true",
    # llama.cpp's own
    **dict.fromkeys(("/completion", "/completions"), "use /v1/completions"),
    **dict.fromkeys(("/embedding", "/embeddings"), "use /v1/embeddings"),
    "/apply-template": "use /v1/chat/completions, or /tokenize with messages",
    "/infill": "text between others is not written here; /v1/completions continues a text",
    "/lora-adapters": "no LoRA adapters are loaded here",
    "/props": "use /v1/models",
    "/slots": "use /metrics",
}  # fmt: skip


def add_not_served(app: FastAPI) -> None:
    """Answer all that no route of `app` answers, below /v1 and /api and at paths of other servers.

    To be called after all its routes are there. What is left is the page's.
    """
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    methods: dict[str, set[str]] = {}
    for route in routes:
        served = route.methods or set()
        if "GET" in served:
            served.add("HEAD")  # monitors use it
        methods.setdefault(route.path, set()).update(served)
    for path, text in _ELSEWHERE.items():
        app.add_api_route(path, _elsewhere(text), methods=sorted(_METHODS), include_in_schema=False)
    for path, known in methods.items():
        if others := sorted(_METHODS - known):
            app.add_api_route(path, _wrong_method(known), methods=others, include_in_schema=False)
    for path in ("/v1/{rest:path}", "/api/{rest:path}"):
        app.add_api_route(path, _unknown, methods=sorted(_METHODS), include_in_schema=False)


_Answering = Callable[[Request], Awaitable[Response]]


def _wrong_method(served: set[str]) -> _Answering:
    allowed = sorted(served)

    async def refuse(request: Request) -> Response:
        wanted = " or ".join(method for method in allowed if method != "HEAD")
        text = f"{request.method} is not for {_path_of(request)}; send {wanted}"
        raise ApiError(405, text, headers={"Allow": ", ".join(allowed)})

    return refuse


def _elsewhere(text: str) -> _Answering:
    async def refuse(request: Request) -> Response:
        raise ApiError(404, f"there is no {_path_of(request)} here: {text}")

    return refuse


async def _unknown(request: Request) -> Response:
    raise ApiError(404, f"there is no {request.method} {_path_of(request)} here")


def _path_of(request: Request) -> str:
    return ascii(request.url.path)[1:-1]
