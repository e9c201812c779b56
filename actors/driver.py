"""The driver: owns the engine, takes requests, streams their tokens.

Requests wait in one queue; a single thread runs the engine, so a slow reader of one stream never
holds the model.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from actors.engine import Engine
from actors.exchange import Exchange
from actors.failures import RequestError, first_line
from actors.generation import Generator
from actors.messages import GenerateRequest, SystemConfig, TokenEvent
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.errors import HotcoldError, ServiceError
from model.weights import load_embedding

_Result = TypeVar("_Result")


@dataclass(eq=False)
class _Stream:
    """A request that waits or runs."""

    request_id: str
    events: "queue.Queue[TokenEvent | BaseException]" = field(default_factory=queue.Queue)
    cancelled: threading.Event = field(default_factory=threading.Event)


class Driver:
    """Runs requests on services that an exchange reaches."""

    def __init__(self, system: SystemConfig, exchange: Exchange) -> None:
        """Errors: CheckpointError, ConfigError."""
        path = Path(system.model_path)
        config = ModelConfig.from_directory(path)
        engine = Engine(config, load_embedding(Checkpoint(path), config), exchange, system.mode)
        self.engine = engine
        self.generator = Generator(path, config, engine, system.context_length)
        self.generator.warm_up()
        self._streams: list[_Stream] = []
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._broken: ServiceError | None = None
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)
        self._thread.start()

    def generate(self, request: GenerateRequest) -> Iterator[TokenEvent]:
        """Queue a request and yield its events. Errors: PromptError, RequestError, ServiceError."""
        stream = _Stream(request.request_id)
        self._streams.append(stream)
        try:
            ids = self.generator.prompts.ids(request)
        except BaseException:
            self._streams.remove(stream)
            raise
        checked = replace(request, prompt=None, messages=None, prompt_ids=ids)
        self._jobs.put(lambda: self._answer(checked, stream))
        while True:
            event = stream.events.get()
            if isinstance(event, BaseException):
                raise event
            yield event
            if event.result is not None:
                return

    def cancel(self, request_id: str) -> None:
        """End a request that waits or runs within a token; its reason is then "cancelled"."""
        for stream in list(self._streams):
            if stream.request_id == request_id:
                stream.cancelled.set()

    def between_requests(self, function: Callable[[], _Result]) -> _Result:
        """Call `function` where no request uses the exchange. Errors: its own, ServiceError."""
        future: Future[_Result] = Future()

        def job() -> None:
            try:
                self._require_whole()
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future.result()

    def close(self) -> None:
        """End the engine's thread within a token; the request in progress is cancelled."""
        self._broken = self._broken or ServiceError("the system is being stopped")
        for stream in list(self._streams):  # one that comes later finds `_broken`
            stream.cancelled.set()
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _answer(self, request: GenerateRequest, stream: _Stream) -> None:
        try:
            self._require_whole()
            for event in self.generator.run(request, stream.cancelled.is_set):
                stream.events.put(event)
        except ServiceError as error:
            self._broken = error
            stream.events.put(error)
        except HotcoldError as error:
            stream.events.put(error)
        except Exception as error:
            stream.events.put(RequestError(f"the request failed: {first_line(error)}"))
        self._streams.remove(stream)

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise self._broken
