"""The driver: owns the engine, takes requests, streams their tokens.

Requests wait in one queue; a single thread runs the engine, so a slow reader of one stream never
holds the model.
"""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

from actors.engine import Engine
from actors.exchange import Exchange
from actors.generation import Generator
from actors.messages import GenerateRequest, SystemConfig, TokenEvent
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.errors import ServiceError
from model.weights import load_embedding

_Job = tuple[GenerateRequest, "queue.Queue[TokenEvent | BaseException]"]


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
        self._cancelled: set[str] = set()
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._broken: ServiceError | None = None
        self._current_id = ""
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)
        self._thread.start()

    def generate(self, request: GenerateRequest) -> Iterator[TokenEvent]:
        """Queue a request and yield its events. Errors: PromptError, ServiceError."""
        self.generator.prompts.ids(request)
        events: queue.Queue[TokenEvent | BaseException] = queue.Queue()
        self._jobs.put((request, events))
        while True:
            event = events.get()
            if isinstance(event, BaseException):
                raise event
            yield event
            if event.result is not None:
                return

    def cancel(self, request_id: str) -> None:
        """End a request within a token; it finishes with reason "cancelled"."""
        self._cancelled.add(request_id)

    def close(self) -> None:
        """End the engine's thread within a token; the request in progress is cancelled."""
        self._broken = self._broken or ServiceError("the system is being stopped")
        self._cancelled.add(self._current_id)
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            request, events = job
            self._current_id = request.request_id  # before `_broken` is read: see `close`
            try:
                if self._broken is not None:
                    raise self._broken
                for event in self.generator.run(request, self._cancelled):
                    events.put(event)
            except ServiceError as error:
                self._broken = error
                events.put(error)
            except Exception as error:
                events.put(error)
            self._cancelled.discard(request.request_id)
