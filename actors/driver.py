"""The driver: owns the engine, takes requests, streams their tokens.

Requests wait in one queue; a single thread runs the engine, so a slow reader of one stream never
holds the model.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from actors.engine import Engine
from actors.exchange import Exchange
from actors.failures import RequestError, first_line
from actors.generation import Generator
from actors.messages import PREDICTED_MODES, GenerateRequest, SystemConfig, TokenEvent
from actors.profiling import ProfilingEngine
from actors.scoring import WindowScores, score_window
from model.artifact import ModelIdentity
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.errors import HotcoldError, ServiceError
from model.weights import load_embedding
from predictors.predictor import NeuronPredictor
from predictors.predictor_file import read_predictors

_Result = TypeVar("_Result")


@dataclass(eq=False)
class _Stream:
    """A request that waits or runs."""

    request_id: str
    events: "queue.Queue[TokenEvent | BaseException]" = field(default_factory=queue.Queue)
    cancelled: threading.Event = field(default_factory=threading.Event)


class Driver:
    """Runs requests on services that an exchange reaches."""

    def __init__(
        self, system: SystemConfig, exchange: Exchange, shards: Sequence[Sequence[np.ndarray]] = ()
    ) -> None:
        """shards[s][l]: the neurons of layer l that CPU service s holds, in its loading order.

        Only the predicted modes ask for them.
        Errors:  CheckpointError, ConfigError, ArtifactError
        """
        path = Path(system.model_path)
        config = ModelConfig.from_directory(path)
        embedding = load_embedding(Checkpoint(path), config)
        predictor = _load_predictor(system, config, shards)
        engine = Engine(config, embedding, exchange, system.mode, predictor)
        self.engine = engine
        self.generator = Generator(path, config, engine, system.context_length)
        opening_id = self.generator.prompts.opening_id
        self._profiling = ProfilingEngine(config, embedding, exchange, opening_id)
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

    def score_window(self, ids: list[int], first: int, audit: bool) -> WindowScores:
        """Score a window between requests; see `actors.scoring.score_window`.

        Errors:  RequestError, also for a window longer than the context; ServiceError
        """
        room = self.generator.context_length
        if len(ids) > room:
            raise RequestError(f"a window of {len(ids)} tokens does not fit in a context of {room}")
        return self.between_requests(
            lambda: score_window(self.engine, ids, first, audit, self._require_whole)
        )

    def profile_window(self, ids: list[int], recorded: list[int]) -> np.ndarray:
        """Count who fires in a window, between requests; see `ProfilingEngine.profile_window`.

        Errors:  RequestError, also for a window longer than the context; ServiceError
        """
        length, room = self._profiling.num_opening + len(ids), self.generator.context_length
        if length > room:
            raise RequestError(f"a window of {length} tokens does not fit in a context of {room}")
        return self.between_requests(
            lambda: self._profiling.profile_window(ids, recorded, self._require_whole)
        )

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


def _load_predictor(
    system: SystemConfig, config: ModelConfig, shards: Sequence[Sequence[np.ndarray]]
) -> NeuronPredictor | None:
    if system.mode not in PREDICTED_MODES:
        return None
    identity = ModelIdentity.of(system.model_path)
    return read_predictors(Path(system.predictors_path), identity, config).arranged(shards)
