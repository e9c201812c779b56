"""/v1/hotcold/…: the system behind a model, for its user's commands and programs.

    POST generate    the events of a request of Python's, with every bit of its numbers
    GET  state       what runs; with `attend` the system does not end while the answer is open
    GET  telemetry   what it does now; services count while somebody asks
    POST scale       another number of CPU services

They answer at the server's Unix socket alone, which only its user can reach.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field, TypeAdapter

import hotcold
from hotcold.actors.protocol.messages import GenerateRequest, SystemConfig
from hotcold.actors.protocol.wire import as_line, event_values, unknown_field
from hotcold.ui.api import sse
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.errors import ApiError, as_api_error
from hotcold.ui.api.fields import StrictModel
from hotcold.ui.api.schemas import parse
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.telemetry import telemetry_json

_ACTORS = ("ray::DriverActor", "ray::ServiceActor")  # their processes' names
_LONGEST_S = 1e9


class GenerateBody(StrictModel):
    """POST /v1/hotcold/generate."""

    model: str | None = None
    request: dict[str, Any]  # the fields of `GenerateRequest`
    # Seconds that the system stays after it; less than 0: for ever; None: unchanged.
    keep_s: Annotated[float, Field(allow_inf_nan=False)] | None = None


class ScaleBody(StrictModel):
    """POST /v1/hotcold/scale."""

    model: str | None = None
    num_cpu_actors: Annotated[int, Field(ge=1)]


class SystemRoutes:
    """The routes of one server, and how long it stays while nobody asks."""

    def __init__(
        self,
        models: ServedModels,
        keep_s: float | None = None,
        on_change: Callable[[Backend, SystemConfig], object] = lambda backend, system: None,
    ) -> None:
        """`keep_s`: seconds, less than 0 for ever; None: the server is ended by signals alone.

        `on_change` is called in another thread with a system that was scaled.
        """
        self._models = models
        self.keep_s = keep_s
        self._on_change = on_change
        self._request: TypeAdapter[GenerateRequest] = TypeAdapter(GenerateRequest)

    @property
    def left_s(self) -> float | None:
        """Seconds that the server stays if no request comes; None: for ever."""
        if self.keep_s is None or self.keep_s < 0:
            return None
        return max(0.0, self.keep_s - min(map(idle_s, self._models.backends)))

    def add(self, app: FastAPI) -> None:
        """Add them to the server's application."""
        for method, name, answer in (
            ("POST", "generate", self._generate),
            ("GET", "state", self._state),
            ("GET", "telemetry", self._telemetry),
            ("POST", "scale", self._scale),
        ):
            path = f"/v1/hotcold/{name}"
            app.add_api_route(path, _local(answer), methods=[method], include_in_schema=False)

    async def _generate(self, request: Request) -> Response:
        body = parse(GenerateBody, await request.body())
        backend = self._models.choose(request, body.model)
        if unknown := unknown_field(body.request):
            raise ApiError(400, f"{unknown!a} is no field of a request here", param="request")
        asked = self._request.validate_python(body.request)
        given = (asked.prompt, asked.messages, asked.prompt_ids)
        if sum(one is not None for one in given) != 1:
            raise ApiError(400, "give one of prompt, messages and prompt_ids")
        if body.keep_s is not None and self.keep_s is not None:
            self.keep_s = min(body.keep_s, _LONGEST_S)
        return await sse.unless_gone(request.receive, _answer(backend, asked))

    async def _state(self, request: Request) -> Response:
        backend = self._models.choose(request, request.query_params.get("model"))
        if "attend" not in request.query_params:
            return _line(await self._found(backend, "memory" in request.query_params))

        async def held() -> AsyncGenerator[bytes, None]:
            yield as_line(await self._found(backend, False))  # the client reads no more
            await asyncio.Event().wait()

        backend.attend(1)
        return sse.LineStream(held(), at_end=lambda: backend.attend(-1))

    async def _found(self, backend: Backend, with_memory: bool) -> dict[str, Any]:
        if not backend.is_loaded:
            return {"status": backend.state}
        load = await backend.client.load()
        system: SystemConfig = await asyncio.to_thread(lambda: backend.described)
        config = backend.prompts.config
        found = {
            "status": "ready",
            "mode": system.mode,
            "device": system.device,
            "context_length": system.context_length,
            "max_positions": config.max_positions,
            "num_neurons": config.num_neurons,
            "has_text": backend.prompts.tokenizer is not None,
            "has_chat_template": backend.has_chat_template,
            "system": asdict(system),
            "tokens_per_s": backend.tokens_per_s,
            "num_active": backend.num_active,
            "is_compiling": load.is_compiling,
            "idle_s": idle_s(backend),
            "left_s": self.left_s,
        }
        if with_memory:
            found["memory_bytes"] = await asyncio.to_thread(memory_bytes, backend)
        return found

    async def _telemetry(self, request: Request) -> Response:
        backend = self._models.choose(request, request.query_params.get("model"))
        return _line(telemetry_json(await asyncio.to_thread(backend.call, "telemetry")))

    async def _scale(self, request: Request) -> Response:
        body = parse(ScaleBody, await request.body())
        backend = self._models.choose(request, body.model)

        def change() -> dict[str, int]:
            before = backend.described.num_cpu_actors
            system: SystemConfig = backend.call("scale", body.num_cpu_actors)
            self._on_change(backend, system)
            return {
                "num_cpu_actors": system.num_cpu_actors,
                "num_cpu_actors_before": before,
                "num_threads": system.num_threads,
            }

        return _line(await asyncio.to_thread(change))


def idle_s(backend: Backend) -> float:
    """Seconds since a model's last request, or since the last client that attended has left."""
    return time.monotonic() - backend.used_at if backend.is_idle else 0.0


def _local(answer: Callable[[Request], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """What answers at the Unix socket, where neither side has a port."""

    async def answered(request: Request) -> Response:
        # A client of a port that has left by then has no address, either.
        _, port = request.scope.get("server") or ("", None)
        if request.client is not None or port is not None:
            raise ApiError(404, "this is answered at the server's Unix socket alone")
        found = await answer(request)
        found.headers["Hotcold-Version"] = hotcold.__version__  # another version's client is told
        return found

    return answered


def _line(content: dict[str, Any]) -> Response:
    return Response(as_line(content), media_type=sse.LineStream.media_type)


async def _answer(backend: Backend, request: GenerateRequest) -> Response:
    """The answer, once it has begun: an error before can be an HTTP status."""
    answers = await backend.start(1, lambda: backend.encoded(request))
    events = answers.events()
    _, first = await anext(events)  # where that fails, it cancels them

    async def lines() -> AsyncGenerator[bytes, None]:
        yield as_line(event_values(first))
        try:
            async with aclosing(events):
                async for _, event in events:
                    yield as_line(event_values(event))
        except Exception as error:
            yield as_line(as_api_error(error).body)

    return sse.LineStream(lines(), answers.deadline, answers.close)


def memory_bytes(backend: Backend) -> int:
    """Memory of this process and its descendants, without other models' services.

    Units:  bytes; shared pages count once
    """
    import psutil

    services, own = backend.call("processes").values(), psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):
            is_service = "".join(process.cmdline()).startswith(_ACTORS)
            if process.pid in services or not is_service:
                total += process.memory_full_info().pss
    return total
