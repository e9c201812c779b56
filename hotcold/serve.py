"""Models behind Ray Serve LLM's own ingress.

`hotcold.serve:build_openai_app` is `ray.serve.llm:build_openai_app` for hotcold, with the same
arguments, in Python and in a Serve config file:

    llm_configs:
      - model_loading_config: {model_id: qwen3-8b, model_source: org/repo}
        engine_kwargs: {context: 8192, parallel: 4}  # options of `hotcold serve`, without dashes
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from starlette.types import ASGIApp, Message
from typing_extensions import TypedDict

from hotcold.model.errors import UsageError
from hotcold.ui.api.backend import Backend, ServerSettings
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app
from hotcold.ui.fleet.arguments import FleetArgs
from hotcold.ui.fleet.models import fleet_models
from hotcold.ui.fleet.replica import Replica

_ENGINES_TYPES = "sglang.srt.entrypoints.openai.protocol"  # the last that Ray tries
_KINDS = ("ChatCompletion", "Completion", "Embedding", "Scoring", "Tokenize", "Detokenize")


class _Message(TypedDict, total=False):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    content: str | list[Any] | None


class _Fields(BaseModel):
    """A request or an answer with whatever fields; the server checks them."""

    model_config = ConfigDict(extra="allow", ser_json_inf_nan="constants")


class _Request(_Fields):
    model: str | None = None


class _ChatRequest(_Request):
    messages: list[_Message]


@contextmanager
def _request_types() -> Iterator[None]:
    """Types of requests, while Ray imports them, where no engine is there that has some."""
    is_alone = find_spec("vllm") is None and find_spec("sglang") is None
    if is_alone:
        sys.modules[_ENGINES_TYPES] = made = ModuleType(_ENGINES_TYPES)
        for name in _KINDS:
            vars(made)[f"{name}Request"] = _Request
            vars(made)[f"{name}Response"] = vars(made)[f"{name}StreamResponse"] = _Fields
        vars(made)["ChatCompletionRequest"] = _ChatRequest
    try:
        yield
    except ImportError as error:
        needed = "it needs `python -m pip install 'hotcold[fleet]' pyarrow`"
        raise ImportError(f"Ray Serve LLM cannot be imported: {error}; {needed}") from error
    finally:
        if is_alone:
            del sys.modules[_ENGINES_TYPES]


with _request_types():
    from ray import serve
    from ray.llm._internal.serve.core.configs import openai_api_models as types
    from ray.llm._internal.serve.core.ingress import ingress
    from ray.serve import llm
    from ray.serve._private.http_util import make_fastapi_class_based_view


class OpenAiIngress(ingress.OpenAiIngress):
    """Ray's; a process that runs it imports this module first, and so has types of requests."""


# Newer FastAPIs read routes' signatures where these are served, too: they must say what `self` is.
_views = FastAPI()
for _name, _add in ingress.DEFAULT_ENDPOINTS.items():
    _add(_views)(getattr(OpenAiIngress, _name))
make_fastapi_class_based_view(_views, OpenAiIngress)


def _route(path: str, kind: Any) -> Any:
    """A method that answers as the server's route at `path`.

    It yields what the ingress passes on: texts of a stream, else one `kind` or ErrorResponse.
    """

    async def answer(self: HotcoldServer, request: Any, _: Any = None) -> AsyncGenerator[Any, None]:
        given = request.model_dump(mode="json", by_alias=True, exclude_unset=True)
        status, is_stream, body = 0, False, b""
        async with aclosing(_sent(self.app, path, json.dumps(given).encode())) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    is_stream = any(b"event-stream" in value for _, value in message["headers"])
                elif is_stream:
                    yield message["body"].decode()
                else:
                    body += message["body"]
        if status != 200:
            yield types.ErrorResponse(error=json.loads(body)["error"] | {"code": status})
        elif not is_stream:
            yield kind.model_validate_json(body)

    return answer


async def _sent(app: ASGIApp, path: str, body: bytes) -> AsyncGenerator[Message, None]:
    """What `app` sends for a POST of JSON; where this is closed before, the client has left."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    asked: list[Message] = [{"type": "http.request", "body": body}]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}

    async def receive() -> Message:
        return asked.pop() if asked else await asyncio.Future[Message]()

    running = asyncio.ensure_future(app(scope, receive, sent.put))
    running.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        while (message := await sent.get()) is not None:
            yield message
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class HotcoldServer(Replica):
    """One whole system as Ray Serve LLM's `LLMServerProtocol`, as `server_cls` of an LLMConfig."""

    def __init__(self, llm_config: llm.LLMConfig) -> None:
        """Load the model on this node. Errors: HotcoldError."""
        args = _args(llm_config)
        super().__init__(args.models[0], args.system)
        backend = Backend(self._system.call("describe"), ServerSettings(llm_config.model_id))
        backend.attach(self._system, self._client)
        self.app = create_app(ServedModels([backend]))

    async def start(self) -> None:
        """Nothing: the constructor has loaded the model."""

    chat = _route("/v1/chat/completions", types.ChatCompletionResponse)
    completions = _route("/v1/completions", types.CompletionResponse)
    embeddings = _route("/v1/embeddings", types.EmbeddingResponse)
    score = _route("/v1/score", types.ScoreResponse)
    tokenize = _route("/tokenize", types.TokenizeResponse)
    detokenize = _route("/detokenize", types.DetokenizeResponse)

    @classmethod
    def get_deployment_options(cls, llm_config: llm.LLMConfig) -> dict[str, Any]:
        """The config's, with CPUs and memory of its plan, on one node. Errors: HotcoldError."""
        for name in ("placement_group_config", "accelerator_type", "lora_config"):
            if getattr(llm_config, name):
                raise UsageError(f"{name} is for other engines; leave it out, or use engine_kwargs")
        args, given = _args(llm_config), llm_config.deployment_config
        (model,) = fleet_models(args.models, args.system)
        llm_config.update_engine_kwargs(threads=args.system.num_threads)  # as many as it reserves
        actor: dict[str, Any] = {"num_cpus": 0, "runtime_env": llm_config.runtime_env or {}}
        actor |= given.get("ray_actor_options", {})
        return {
            **given, "placement_group_bundles": [model.bundle],
            "placement_group_strategy": "STRICT_PACK", "ray_actor_options": actor,
        }  # fmt: skip


def _args(llm_config: llm.LLMConfig) -> FleetArgs:
    """Its model and the options of its system, as a fleet is given them. Errors: UsageError."""
    source = llm_config.model_loading_config.model_source or llm_config.model_id
    if not isinstance(source, str):
        raise UsageError("model_source must be a path or a name; hotcold fetches from no cloud")
    return FleetArgs(models=[source], options=llm_config.engine_kwargs)


def build_openai_app(llm_serving_args: dict[str, Any]) -> serve.Application:
    """Ray's `build_openai_app`, with hotcold where a config names no other `server_cls`.

    The ingress reserves no CPU, as the model's threads may have all.
    Errors:  ValueError by Ray, HotcoldError
    """
    args = llm.LLMServingArgs.model_validate(llm_serving_args)
    if "ingress_cls" not in args.ingress_cls_config.model_fields_set:
        args.ingress_cls_config.ingress_cls = OpenAiIngress
    args.ingress_deployment_config.setdefault("ray_actor_options", {"num_cpus": 0})
    for config in args.llm_configs:
        config.server_cls = config.server_cls or HotcoldServer
    return llm.build_openai_app(args)
