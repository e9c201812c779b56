"""The local control API, which commands of the same user use at a system's Unix socket.

POST /own/generate and /own/scale, GET /own/state, /own/attend and /own/telemetry. Answers are lines
of JSON.
Other versions' commands use these paths too.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, create_model
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hotcold.actors.protocol.messages import GenerateRequest, Grammar, SystemConfig, TokenEvent
from hotcold.model.errors import HotcoldError
from hotcold.model.sampling import SamplingParams
from hotcold.ui.api import sse
from hotcold.ui.api.backend import Answers, Backend
from hotcold.ui.api.errors import ApiError, as_api_error, unavailable
from hotcold.ui.api.fields import StrictModel
from hotcold.ui.api.logprobs import MIN_LOGPROB
from hotcold.ui.api.schemas import parse
from hotcold.ui.telemetry import telemetry_json

_PREFIX = "/own/"
_ACTORS = ("ray::DriverActor", "ray::ServiceActor")  # their processes' names
_LONGEST_S = 1e9


_MAX_TOP = 1024  # likeliest tokens beside a logprob

# The fields of `SamplingParams`, all required; it checks their values.
_SAMPLING_FIELDS: Any = {name: (hint, ...) for name, hint in get_type_hints(SamplingParams).items()}
ControlSampling: Any = create_model("ControlSampling", __base__=StrictModel, **_SAMPLING_FIELDS)


class ControlGrammar(StrictModel):
    """The fields of `Grammar`."""

    kind: Literal["json_schema", "regex", "lark", "calls"]
    text: str


class ControlPrompt(StrictModel):
    """The fields of `GenerateRequest`: one of a text, a conversation and token ids."""

    sampling: ControlSampling
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_ids: list[int] | None = None
    is_chat: bool = False
    tools: list[dict[str, Any]] | None = None
    template_variables: dict[str, Any] | None = None
    grammar: ControlGrammar | None = None
    num_logprobs: Annotated[int, Field(ge=0, le=_MAX_TOP)] | None = None
    num_prompt_logprobs: Annotated[int, Field(ge=0, le=_MAX_TOP)] | None = None
    wants_embedding: bool = False
    use_cache: bool = True
    cache_salt: str = ""

    def request(self) -> GenerateRequest:
        """The request of the system. Errors: ApiError 400, UsageError."""
        given = (self.prompt, self.messages, self.prompt_ids)
        if sum(one is not None for one in given) != 1:
            raise ApiError(400, "give one of prompt, messages and prompt_ids")
        sampling = SamplingParams(**self.sampling.model_dump())
        grammar = None if self.grammar is None else Grammar(**self.grammar.model_dump())
        others = {name: getattr(self, name) for name in ControlPrompt.model_fields}
        return GenerateRequest(**others | {"sampling": sampling, "grammar": grammar})


class ControlRequest(StrictModel):
    """POST /own/generate."""

    request: ControlPrompt
    # Seconds that the system stays after it; less than 0: for ever; None: unchanged.
    keep_s: Annotated[float, Field(allow_inf_nan=False)] | None = None


class ControlScale(StrictModel):
    """POST /own/scale."""

    num_cpu_actors: Annotated[int, Field(ge=1)]


class IdleTimer:
    """How long an idle system stays: one of `hotcold serve` for ever, a kept one `keep_s`."""

    def __init__(self, backend: Backend, keep_s: float | None) -> None:
        """`keep_s`: seconds, less than 0 for ever; None: the server ends it."""
        self.keep_s = keep_s
        self._backend = backend
        self._attended_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last request or attending client."""
        if not self._backend.is_idle:
            return 0.0
        return time.monotonic() - max(self._attended_at, self._backend.used_at)

    @property
    def left_s(self) -> float | None:
        """Seconds that it stays if no request comes; None: for ever."""
        if self.keep_s is None or self.keep_s < 0:
            return None
        return max(0.0, self.keep_s - self.idle_s)

    def extend(self, keep_s: float | None) -> None:
        """Let the system stay so long after each request from now on."""
        if keep_s is not None and self.keep_s is not None:
            self.keep_s = min(keep_s, _LONGEST_S)

    def attend(self, count: int) -> None:
        """Count clients that attend without a request: 1 when one comes, -1 when one leaves."""
        self._backend.attend(count)
        self._attended_at = time.monotonic()


class ControlRouter:
    """The Unix socket's application: the control API below /own, and `app` for all other paths."""

    def __init__(self, app: ASGIApp, state: Callable[[], dict[str, Any]]) -> None:
        """`state` gives the state until `use` is called."""
        self._app = app
        self._state = state
        self._control: ASGIApp | None = None

    def use(self, control: ASGIApp) -> None:
        """Answer with the routes of `create_control_app` from now on."""
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        if scope["type"] != "http" or not scope["path"].startswith(_PREFIX):
            await self._app(scope, receive, send)
        elif self._control is not None:
            await self._control(scope, receive, send)
        elif scope["path"] == f"{_PREFIX}state":
            await _Line({"status": "loading", **self._state()})(scope, receive, send)
        else:
            error = unavailable("the model is loading; try again soon", "loading")
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)


def create_control_app(
    backend: Backend,
    timer: IdleTimer,
    facts: dict[str, Any],
    on_change: Callable[[SystemConfig], object] = lambda system: None,
) -> Starlette:
    """The routes of a system that has loaded; `facts` are the first keys of its state.

    `on_change` is called in another thread with the system as it then runs.
    """

    async def generate(request: Request) -> Response:
        body = parse(ControlRequest, await request.body())
        request.state.model = backend.name  # for the access log
        timer.extend(body.keep_s)
        return await sse.unless_gone(request.receive, _answer(backend, body.request.request()))

    async def state(request: Request) -> Response:
        memory = await asyncio.to_thread(memory_bytes, backend)
        is_compiling = False
        with suppress(HotcoldError):  # of a model that is not loaded, or has failed
            is_compiling = (await backend.client.load()).is_compiling
        return _Line(
            {
                "status": "ready",
                **facts,
                "has_chat_template": _has_template(backend),
                "context_length": backend.prompts.context_length,
                "max_positions": backend.prompts.config.max_positions,
                "memory_bytes": memory,
                "tokens_per_s": backend.tokens_per_s,
                "num_active": backend.num_active,
                "is_compiling": is_compiling,
                "idle_s": timer.idle_s,
                "left_s": timer.left_s,
            }
        )

    async def attend(request: Request) -> Response:
        async def held() -> AsyncGenerator[bytes, None]:
            yield sse.line({})  # the client reads no more
            await asyncio.Event().wait()

        timer.attend(1)
        return sse.LineStream(held(), at_end=lambda: timer.attend(-1))

    async def telemetry(request: Request) -> Response:
        try:
            found = await asyncio.to_thread(backend.call, "telemetry")
        except Exception as error:
            raise as_api_error(error) from error
        return _Line(telemetry_json(found))

    def changed(num_cpu_actors: int) -> dict[str, int]:
        before = backend.described.num_cpu_actors
        system: SystemConfig = backend.call("scale", num_cpu_actors)
        on_change(system)
        return {
            "num_cpu_actors": system.num_cpu_actors,
            "num_cpu_actors_before": before,
            "num_threads": system.num_threads,
        }

    async def scale(request: Request) -> Response:
        body = parse(ControlScale, await request.body())
        try:
            return _Line(await asyncio.to_thread(changed, body.num_cpu_actors))
        except Exception as error:
            raise as_api_error(error) from error

    async def as_answer(request: Request, error: Exception) -> Response:
        answer = as_api_error(error)
        return JSONResponse(answer.body, answer.status, answer.headers)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # the client has disconnected

    return Starlette(
        routes=[
            Route("/own/generate", generate, methods=["POST"]),
            Route("/own/state", state),
            Route("/own/attend", attend),
            Route("/own/telemetry", telemetry),
            Route("/own/scale", scale, methods=["POST"]),
        ],
        exception_handlers={
            sse.ClientGoneError: gone,
            ClientDisconnect: gone,
            ApiError: as_answer,
            Exception: as_answer,
        },
    )


class _Line(Response):
    """One line of JSON."""

    media_type = "application/x-ndjson"

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(sse.line(content))


async def _answer(backend: Backend, request: GenerateRequest) -> Response:
    """The answer, once it has begun. Errors: ApiError."""
    try:
        answers = await backend.start(1, lambda: backend.encoded(request))
        events = await _first_then_rest(answers)
    except Exception as error:
        raise as_api_error(error) from error

    async def pieces() -> AsyncGenerator[bytes, None]:
        try:
            async for _, event in events:
                line = _line(event)
                if event.result is not None:
                    about = await asyncio.to_thread(_about, backend)
                    line |= {"result": asdict(event.result), "about": about}
                yield sse.line(line)
        except Exception as error:
            yield sse.line(as_api_error(error).body)

    return sse.LineStream(pieces(), answers.deadline, answers.close)


async def _first_then_rest(answers: Answers) -> AsyncIterator[tuple[int, TokenEvent]]:
    """All events, once the first has come: an error before it can still be an HTTP status.

    Errors:  ApiError, HotcoldError
    """
    events = answers.events()
    try:
        first = await anext(events)
    except BaseException:
        answers.close()
        raise

    async def all_events() -> AsyncGenerator[tuple[int, TokenEvent], None]:
        async with aclosing(events):
            yield first
            async for later in events:
                yield later

    return all_events()


def _line(event: TokenEvent) -> dict[str, Any]:
    """An event as JSON, without its result."""
    line: dict[str, Any] = {
        "text": event.text,
        "num_tokens": event.num_tokens,
        "token_ids": event.token_ids,
        "num_prompt_tokens": event.num_prompt_tokens,
        "thought": event.thought,
        "said_at": event.said_at,
    }
    for name in ("logprobs", "prompt_logprobs"):
        if scored := getattr(event, name):
            line[name] = [
                (one.token_id, _finite(one.logprob), [(i, _finite(x)) for i, x in one.top], one.at)
                for one in scored
            ]
    return line


def _finite(logprob: float | None) -> float | None:
    """JSON has no minus infinity."""
    return None if logprob is None else max(logprob, MIN_LOGPROB)


def _about(backend: Backend) -> dict[str, Any]:
    """Facts about the system behind an answer, which `hotcold generate` shows."""
    system = backend.described  # with --mode auto, the mode chosen
    config = backend.prompts.config
    return {
        "system": asdict(system),
        "num_neurons": config.num_neurons,
        "max_positions": config.max_positions,
        "has_text": backend.prompts.tokenizer is not None,
    }


def _has_template(backend: Backend) -> bool:
    tokenizer = backend.prompts.tokenizer
    return tokenizer is not None and tokenizer.has_chat_template


def memory_bytes(backend: Backend) -> int:
    """Memory of this process and its descendants, without other models' services.

    Units:  bytes; shared pages count once
    """
    import psutil

    services, own = backend.call("processes").values(), psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        try:
            is_service = "".join(process.cmdline()).startswith(_ACTORS)
            if process.pid in services or not is_service:
                total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total
