"""What is not served: other methods of a route, known routes of other servers, all else."""

from collections.abc import Collection

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from hotcold.ui.api.errors import ApiError

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"))
_TEXT_ALONE = "models are given text alone here, and answer with text"
_NO_RANKS = "texts are not ranked here; /v1/embeddings gives their vectors"
# Ollama's routes that change models.
_CHANGING = {
    ("POST", "/api/pull"): "models are not fetched here: use `hotcold pull`, then `hotcold serve`",
    ("POST", "/api/push"): "models are not sent anywhere from here",
    ("POST", "/api/create"): "models are not made here",
    ("POST", "/api/copy"): "models are not copied here",
    ("DELETE", "/api/delete"): "models are not deleted here: use `hotcold rm`",
    ("POST", "/api/blobs/{digest}"): "files are not kept here",
}
# Routes of other servers, each with what to use instead.
_ELSEWHERE = {
    "/v1/messages": "Anthropic's API is not served here; use /v1/chat/completions",
    "/v1/messages/count_tokens": "Anthropic's API is not served here; use /tokenize",
    "/v1/batches": "files of requests are answered by jobs: docs/running.md, docs/fleet.md",
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
    for (method, path), text in _CHANGING.items():
        _refuse(app, path, [method], 403, text)
    methods: dict[str, set[str]] = {}
    for route in app.routes:
        if isinstance(route, APIRoute):
            served = route.methods or set()
            if "GET" in served:
                served.add("HEAD")  # monitors use it
            methods.setdefault(route.path, set()).update(served)
    for path, text in _ELSEWHERE.items():
        _refuse(app, path, _METHODS, 404, f"there is no {{path}} here: {text}")
    for path, known in methods.items():
        wanted = " or ".join(sorted(known - {"HEAD"}))
        text = f"{{method}} is not for {{path}}; send {wanted}"
        _refuse(app, path, _METHODS - known, 405, text, {"Allow": ", ".join(sorted(known))})
    for path in ("/v1/{rest:path}", "/api/{rest:path}"):
        _refuse(app, path, _METHODS, 404, "there is no {method} {path} here")


def _refuse(
    app: FastAPI,
    path: str,
    methods: Collection[str],
    status: int,
    text: str,
    headers: dict[str, str] | None = None,
) -> None:
    """Refuse these methods of a path; `text` may hold the request's {method} and {path}."""

    async def refuse(request: Request) -> Response:
        shown = ascii(request.url.path)[1:-1]
        told = text.format(method=request.method, path=shown)
        raise ApiError(status, told, headers=headers)

    if methods:
        app.add_api_route(path, refuse, methods=sorted(methods), include_in_schema=False)
