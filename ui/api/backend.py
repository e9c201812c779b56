"""One model behind the HTTP routes: its system, limits, queue, deadlines and counts."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hotcold.actors.client import AsyncClient, Deliver
from hotcold.actors.driver.prompts import Prompts
from hotcold.actors.protocol.messages import (
    DriverLoad,
    GenerateRequest,
    Generation,
    SystemConfig,
    TokenEvent,
    TokenLogprob,
)
from hotcold.actors.system import System
from hotcold.model.config.build import read_config
from hotcold.model.errors import PromptError, ServiceError
from hotcold.model.sampling import SamplingParams
from hotcold.model.text.call_syntax import CallSyntax
from hotcold.ui.api.cached import of_client
from hotcold.ui.api.errors import LOADING_TOOK, ApiError, timed_out, unavailable
from hotcold.ui.api.logprobs import TokenTexts
from hotcold.ui.api.metrics import Metrics

if TYPE_CHECKING:
    from hotcold.ui.model_loading import ModelLoader

MakeRequests = Callable[[], Awaitable[Sequence[GenerateRequest]]]
_Found = TypeVar("_Found")
_MAX_THREADS = 4
LOADED, LOADING, NOT_LOADED = "loaded", "loading", "not loaded"
_MAX_ANSWERS = 2048  # to one HTTP request
_MAX_LOGPROBS_BYTES = 32 << 20  # of all answers to it; as JSON they take about ten times as much


@dataclass(frozen=True)
class ServerSettings:
    """A server's limits."""

    model_name: str
    max_queue: int = 64  # requests that wait, besides those that run
    max_tokens: int = 1 << 20  # new tokens of one request
    request_timeout_s: float = 600.0
    max_body_bytes: int = 4 << 20


class Client(Protocol):
    """What answers a model's requests: an `AsyncClient` of one system, or who asks several."""

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        """As `AsyncClient.submit`. Errors: also ApiError."""

    def cancel(self, request_id: str) -> None:
        """As `AsyncClient.cancel`."""

    def stop(self, request_id: str) -> None:
        """As `AsyncClient.stop`."""

    async def load(self, with_experts: bool = False) -> DriverLoad:
        """As `AsyncClient.load`."""


class Backend:
    """One model of a server, as the routes use it; its system may not have started."""

    def __init__(
        self,
        config: SystemConfig,
        settings: ServerSettings,
        loader: "ModelLoader | None" = None,
    ) -> None:
        """`config` is the system's, which the `loader` attaches where that is not done before."""
        path = Path(config.model_path)
        model_config = read_config(path)
        self.config = config
        self.settings = settings
        self.prompts = Prompts(path, model_config, config.context_length)
        self.defaults = SamplingParams.defaults(path)
        self.metrics = Metrics(settings.model_name)
        self.created_at = int(time.time())
        self.num_active = 0  # requests that wait or run
        self.num_attending = 0  # clients that keep it loaded without a request
        self.used_at = time.monotonic()  # when the last request or client came or ended
        self.tokens_per_s = 0.0  # of the last answer, after its first token
        self.num_parallel = config.max_batch  # requests that run side by side
        self.capacity = config.max_batch + settings.max_queue
        self.is_loading = False
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "text")
        self._stays = True  # while idle
        self._loader = loader
        self._system: System | None = None
        self._client: Client | None = None

    def attach(self, system: System | None, client: Client | None = None) -> None:
        """Send requests to this system from now on; `client`: one that exists already.

        A client of several systems has none that could be called.
        """
        self._system = system
        self._client = client or (None if system is None else AsyncClient(system))

    def detach(self) -> None:
        """Forget the system: the next request loads the model."""
        self._system = self._client = None

    @property
    def state(self) -> str:
        """LOADED, LOADING or NOT_LOADED."""
        if self.is_loaded:
            return LOADED
        return LOADING if self.is_loading else NOT_LOADED

    @property
    def system(self) -> System:
        """The model's system. Errors: ServiceError where it is not loaded."""
        if self._system is None:
            raise self.absence
        return self._system

    @property
    def client(self) -> Client:
        """The system's client. Errors: those of `system`."""
        if self._client is None:
            raise self.absence
        return self._client

    @property
    def absence(self) -> ServiceError:
        """What is said where it is not loaded."""
        return ServiceError(f"the model {self.name!r} is {self.state} now; try again later")

    async def ready(self) -> Client:
        """The system's client, once it is loaded. Errors: ApiError 503 and 504, HotcoldError."""
        limit_s = self.settings.request_timeout_s
        if self._client is None and self._loader is not None:
            try:
                async with asyncio.timeout(limit_s):
                    await self._loader.load(self)
            except TimeoutError:
                raise timed_out(limit_s, LOADING_TOOK) from None
        return self.client

    def keep(self, stays: bool) -> bool:
        """Set whether the model stays loaded while idle; returns whether it does.

        The only model of a server always stays.
        """
        self._stays = stays
        self.unload_if_idle()
        return not self._may_leave

    def ended(self) -> None:
        """Count the end of a request."""
        self.num_active -= 1
        self.used_at = time.monotonic()
        self.unload_if_idle()

    def attend(self, count: int) -> None:
        """Count clients that keep it loaded without a request: 1 or -1."""
        self.num_attending += count
        self.used_at = time.monotonic()
        self.unload_if_idle()

    def unload_if_idle(self) -> None:
        """Unload the model if it is idle and does not stay."""
        if self._may_leave and self._loader is not None:
            self._loader.unload(self)

    @property
    def _may_leave(self) -> bool:
        return not self._stays and self._loader is not None and self._loader.has_several

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the driver by name. Errors: HotcoldError."""
        return self.system.call(method, *args)

    @property
    def described(self) -> SystemConfig:
        """The config of the system, as it runs if it is loaded. Errors: HotcoldError."""
        found: SystemConfig = self.config if self._system is None else self.call("describe")
        return found

    @property
    def is_loaded(self) -> bool:
        """Whether a system has the model."""
        return self._client is not None

    @property
    def is_idle(self) -> bool:
        """Whether there is no request and no attending client."""
        return not (self.num_active or self.num_attending)

    @property
    def name(self) -> str:
        """The model's name in requests."""
        return self.settings.model_name

    @cached_property
    def texts(self) -> TokenTexts:
        """Texts of the model's tokens."""
        return TokenTexts(self.prompts.tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations are written as the model knows them."""
        tokenizer = self.prompts.tokenizer
        return tokenizer is not None and tokenizer.has_chat_template

    @property
    def thinks(self) -> bool:
        """Whether answers may begin with thoughts."""
        tokenizer = self.prompts.tokenizer
        return tokenizer is not None and tokenizer.thinking is not None

    @property
    def call_syntax(self) -> CallSyntax:
        """The model's syntax of tool calls. Errors: PromptError without a tokenizer."""
        tokenizer = self.prompts.tokenizer
        if tokenizer is None:
            raise PromptError("this model has no tokenizer, so no text; leave tools out")
        return tokenizer.call_syntax

    def limited(self, request: GenerateRequest) -> GenerateRequest:
        """The request with `max_tokens` within the server's limit. Errors: ApiError 400."""
        wanted, most = request.sampling.max_tokens, self.settings.max_tokens
        if wanted is None:
            return replace(request, sampling=replace(request.sampling, max_tokens=most))
        if wanted > most:
            raise ApiError(
                400, f"max_tokens is {wanted}; this server allows {most}", param="max_tokens"
            )
        return request

    async def encoded(self, request: GenerateRequest) -> list[GenerateRequest]:
        """The request with checked token ids in place of its text. Errors: PromptError."""
        return [await self.in_thread(partial(self.prompts.checked, request))]

    async def prompt_ids(self, requests: Sequence[GenerateRequest]) -> list[list[int]]:
        """Token ids of each request, checked. Errors: PromptError."""
        return await self.in_thread(
            lambda unwanted: [self.prompts.ids(one, unwanted) for one in requests]
        )

    async def in_thread(self, work: Callable[[threading.Event], _Found]) -> _Found:
        """Run `work` on texts in one of this model's threads; its event is set once cancelled."""
        unwanted = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, unwanted)
        finally:
            unwanted.set()

    async def start(self, count: int, make: MakeRequests, stays: bool = True) -> "Answers":
        """Make `count` requests of token ids and queue them; API and page answer by this alone.

        At most as many as run at once are submitted; the others wait here, so that other clients'
        requests come between. `stays` as in `keep`.
        Errors:  ApiError 400 for more than the limits, 503 where the queue is full, 504;
                 PromptError, UsageError, ServiceError
        """
        if count > _MAX_ANSWERS:
            raise ApiError(
                400, f"the request asks for {count} answers; send at most {_MAX_ANSWERS} at once"
            )
        if self.num_active + min(count, self.num_parallel) > self.capacity:
            raise unavailable("the queue is full; try again later", "queue_full")
        self._stays = stays
        answers = Answers(self, count)
        try:
            await answers.submit(make)
        except BaseException:
            answers.close()
            raise
        return answers


class Answers:
    """The answers to one HTTP request, as events. `close` cancels what still runs."""

    def __init__(self, backend: Backend, count: int) -> None:
        """Counts as active until all `count` answers have a result, or `close`."""
        self.requests: Sequence[GenerateRequest] = []
        self._backend = backend
        self._started = time.monotonic()
        self._last_at = [self._started] * count
        self._request_ids: dict[int, str] = {}
        self._client: Client | None = None
        self._events: asyncio.Queue[tuple[int, TokenEvent | BaseException]] = asyncio.Queue()
        self._unfinished = set(range(count))
        self._unsubmitted = deque(range(count))
        self._submitting: set[asyncio.Task[None]] = set()
        self._num_places = min(count, backend.num_parallel)
        self._num_unread = count
        self._num_new = 0  # tokens
        self._failure: BaseException | None = None  # before anything else came
        self._is_stopped = False
        self._logprobs_bytes = 0  # of prompts and answers until now
        backend.num_active += self._num_places
        backend.used_at = self._started

    @property
    def deadline(self) -> float:
        """When all must be done and sent, by time.monotonic()."""
        return self._started + self._backend.settings.request_timeout_s

    async def submit(self, make: MakeRequests) -> None:
        """Make the requests, load the model if needed, and queue the first requests.

        Errors:  PromptError, UsageError, ServiceError, ApiError 400 and 504
        """
        try:
            async with asyncio.timeout_at(self.deadline):
                limited = [self._backend.limited(request) for request in await make()]
                self.requests = [replace(one, cache_salt=of_client(one)) for one in limited]
                if len(limited) > 1:
                    self._add_logprobs(sum(map(_prompt_logprobs_bytes, limited)))
                self._client = await self._backend.ready()
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._num_places):
                        group.create_task(self._submit_next(self._client))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        except TimeoutError:
            raise self._timed_out() from None
        if self._failure is not None:
            raise self._failure

    def _timed_out(self) -> ApiError:
        if self._client is None:
            why = LOADING_TOOK
        elif self._num_new:
            why = f"{self._num_new} tokens were written by then; ask for fewer"
        else:
            sizes = [len(request.prompt_ids or ()) for request in self.requests]
            why = (
                f"{sum(sizes)} tokens of prompts had to be read, or other requests came first; "
                "ask again, as what was read may be cached"
            )
        return timed_out(self._backend.settings.request_timeout_s, why)

    async def _submit_next(self, client: Client) -> None:
        """Queue the next request, if there is one. Errors: those of `submit`."""
        if self._unsubmitted:
            index = self._unsubmitted.popleft()
            request = self.requests[index]
            self._request_ids[index] = await client.submit(request, partial(self._deliver, index))
            self._backend.metrics.add_prompt(len(request.prompt_ids or ()), request.use_cache)

    async def _submit_later(self, client: Client) -> None:
        try:
            await self._submit_next(client)
        except Exception as error:
            self._events.put_nowait((0, error))  # ends all answers

    async def events(self) -> AsyncGenerator[tuple[int, TokenEvent], None]:
        """Each event with the index of its request, until all have a result.

        Errors:  ApiError, HotcoldError
        """
        try:
            while self._num_unread:
                try:
                    async with asyncio.timeout_at(self.deadline):
                        index, event = await self._events.get()
                except TimeoutError:
                    raise self._timed_out() from None
                if isinstance(event, BaseException):
                    raise event
                if event.result is not None:
                    self._num_unread -= 1
                    if event.result.finish_reason == "cancelled" and not self._is_stopped:
                        raise unavailable("the server is being stopped")
                yield index, event
        finally:
            self.close()

    def stop(self) -> None:
        """End each answer within a token, with a result whose finish reason is \"cancelled\"."""
        self._is_stopped = True
        while self._unsubmitted:
            nothing = Generation("", [], "cancelled", 0, 0.0, 0.0)
            self._deliver(self._unsubmitted.popleft(), TokenEvent("", nothing))
        if self._client is not None:
            for index in self._unfinished & self._request_ids.keys():
                self._client.stop(self._request_ids[index])

    def close(self) -> None:
        """Cancel the requests without a result. May be called again."""
        self._unsubmitted.clear()
        for task in self._submitting:
            task.cancel()
        for index in list(self._unfinished):
            self._leave(index)
            if self._client is not None and index in self._request_ids:
                self._client.cancel(self._request_ids[index])
                self._backend.metrics.add_abort()

    def _deliver(self, index: int, event: TokenEvent | BaseException) -> None:
        """Take an event of the driver. A request's end frees its place before it is read."""
        if index not in self._unfinished:
            return
        if isinstance(event, BaseException) or event.result is not None:
            self._leave(index)
        if isinstance(event, BaseException):
            if self._events.empty():
                self._failure = event
        else:
            self._num_new += event.num_tokens
            self._count(index, event)
            if event.result is not None and self._unsubmitted and self._client is not None:
                task = asyncio.create_task(self._submit_later(self._client))
                self._submitting.add(task)
                task.add_done_callback(self._submitting.discard)
            try:
                self._add_logprobs(sum(one.num_bytes for one in event.logprobs))
            except ApiError as error:
                event = error
        self._events.put_nowait((index, event))

    def _add_logprobs(self, num_bytes: int) -> None:
        """Count logprobs of several answers. Errors: ApiError 400 for more than are held."""
        self._logprobs_bytes += num_bytes
        if len(self.requests) > 1 and self._logprobs_bytes > _MAX_LOGPROBS_BYTES:
            raise ApiError(
                400,
                "the answers have too many logprobs for one request; send several with fewer "
                "prompts, choices, tokens or logprobs a token",
                param="logprobs",
            )

    def _leave(self, index: int) -> None:
        """Mark one as ended; its place goes to the next one, if one waits."""
        self._unfinished.discard(index)
        if len(self._unfinished) < self._num_places:
            self._num_places -= 1
            self._backend.ended()

    def _count(self, index: int, event: TokenEvent) -> None:
        metrics, now, last = self._backend.metrics, time.monotonic(), self._last_at[index]
        if event.result is not None and event.result.embedding is not None:
            pass  # no tokens, so no first one
        elif last == self._started:
            metrics.add_first(now - last, event.num_tokens)
        else:
            metrics.add_tokens(now - last, event.num_tokens)
        self._last_at[index] = now
        if event.result is not None:
            metrics.add_result(event.result, now - self._started)
            if speed := event.result.decode_tokens_per_s:
                self._backend.tokens_per_s = speed


def _prompt_logprobs_bytes(request: GenerateRequest) -> int:
    if request.num_prompt_logprobs is None:
        return 0
    first = TokenLogprob(0, None, [(0, 0.0)] * request.num_prompt_logprobs)
    return first.num_bytes * len(request.prompt_ids or ())
