"""What the engine computes next, for all requests that run: continuous batching.

Everything that can go through kernels goes in one step: the next token of every request, and short
prompts as far as they fit. A long prompt goes through matmul, one layer of a chunk at a time, with
steps in between.

Each running request has a slot, and pages of the KV cache as it grows. Where no page is free for
the next token, the request that was admitted last is preempted: its tokens are recomputed once
there are pages, before any waiting request starts. A request is admitted where there are pages for
the next `_AHEAD` tokens of all, so none is preempted more than once in so many.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.batches import Batch, PromptChunks
from hotcold.actors.driver.engine import Engine
from hotcold.actors.protocol.failures import CacheLost, NotFiniteError, RequestError, first_line
from hotcold.actors.protocol.kv_pool import KvPool
from hotcold.actors.telemetry.step_times import StepRecord, StepTimes
from hotcold.model.errors import HotcoldError, ServiceError

_MAX_RECENT = 2048  # steps that are remembered, to say how fast it goes
_AHEAD = 256  # tokens
_IDLE_S = 0.01  # between two looks for requests where nothing can run yet


class Turns:
    """Gives a long prompt and the other requests half of the time each while both need some."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """`clock` returns nanoseconds."""
        self._clock = clock
        self._lead_ns = 0  # of the prompt, since both have wanted time
        self._has_prompt = False

    def is_prompts(self, has_prompt: bool, has_others: bool) -> bool:
        """Whether a layer of the prompt is next, or else a step of the others."""
        self._has_prompt = has_prompt
        if not (has_prompt and has_others):
            self._lead_ns = 0
            return has_prompt
        return self._lead_ns <= 0

    @contextmanager
    def timed(self, is_prompts: bool) -> Iterator[None]:
        """Count the time that one of them takes."""
        started = self._clock()
        yield
        took_ns = self._clock() - started
        if is_prompts:  # alone too: those that come meanwhile have waited for it
            self._lead_ns += took_ns
        elif self._has_prompt:
            self._lead_ns -= took_ns


class Scheduler:
    """Runs requests side by side, all in the engine's thread."""

    def __init__(
        self, engine: Engine, pool: KvPool, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """`pool` has no more slots than a kernel takes tokens."""
        self._engine = engine
        self._pool = pool
        self._running: list[ActiveRequest] = []  # in the order of admission
        self._preempted: deque[ActiveRequest] = deque()  # in the same order
        self._chunk: PromptChunks | None = None
        self._turns = Turns(clock)
        self.recent: deque[StepRecord] = deque(maxlen=_MAX_RECENT)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, or has been preempted."""
        return not (self._running or self._preempted)

    @property
    def num_running(self) -> int:
        """How many requests run."""
        return len(self._running)

    @property
    def num_preempted(self) -> int:
        """How many wait to run again."""
        return len(self._preempted)

    def admit(self, request: ActiveRequest) -> bool:
        """Start a request, if there is a slot and pages for it, and no preempted one waits."""
        return not self._preempted and self._start(request)

    def _start(self, request: ActiveRequest) -> bool:
        num_spare = sum(
            self._pool.num_lacking(one.slot, one.num_positions(_AHEAD)) for one in self._running
        )
        slot = self._pool.allocate(request.num_positions(_AHEAD), num_spare)
        if slot is None:
            return False
        request.start(slot)
        self._running.append(request)
        return True

    def advance(self) -> None:
        """Run one step, or one layer of a long prompt. Errors: ServiceError, which ends all."""
        try:
            self._advance()
        except CacheLost:
            self.recompute_all()

    def restart_chunk(self) -> None:
        """Run a long prompt's chunk again from its first layer."""
        self._chunk = None

    def recompute_all(self) -> None:
        """Recompute all that runs after the KV cache was lost; tokens that were chosen stay."""
        self._chunk = None
        for request in self._running:
            request.recompute()

    def try_replace(self, service: int, cause: str) -> bool:
        """Start a new process for a service (`Exchange.try_replace`)."""
        return self._engine.exchange.try_replace(service, cause)

    def _advance(self) -> None:
        self.end_cancelled()
        while self._preempted and self._start(self._preempted[0]):
            self._preempted.popleft()
        others = [request for request in self._running if not request.chunk_sizes]
        if self._chunk is None:
            long_prompt = next((request for request in self._running if request.chunk_sizes), None)
            # Services may have to load what a long prompt takes: the others go on meanwhile.
            if long_prompt and self._engine.begin_matmul(0.0 if others else _IDLE_S):
                self._chunk = PromptChunks(self._engine, long_prompt)
        chunk = self._chunk
        is_prompts = self._turns.is_prompts(chunk is not None, bool(others))
        with self._turns.timed(is_prompts):
            if chunk is not None and is_prompts:
                self._run_layer(chunk)
            elif others:
                self._run_step(others)

    def end_cancelled(self) -> None:
        """End requests whose readers have cancelled them."""
        for request in [request for request in self._running if request.is_cancelled]:
            request.end("cancelled")
            self._leave(request)
        for request in [request for request in self._preempted if request.is_cancelled]:
            request.end("cancelled")
            self._preempted.remove(request)

    def end_all(self, error: BaseException) -> None:
        """End all that runs with an error."""
        for request in list(self._running):
            request.fail(error)
            self._leave(request)
        while self._preempted:
            self._preempted.popleft().fail(error)

    def _run_layer(self, chunk: PromptChunks) -> None:
        with self._failing([chunk.request]):
            logits = chunk.run_layer()
            if chunk.is_done:
                self._chunk = None
            if logits is not None:
                self._accept(chunk.request, logits)

    def _with_pages(self, requests: list[ActiveRequest]) -> list[ActiveRequest]:
        """Those of `requests` that have pages for all their tokens; others are preempted."""
        for request in requests:
            while request.slot >= 0 and not self._pool.extend(
                request.slot, request.num_positions(0)
            ):
                self._preempt(self._running[-1])
        return [request for request in requests if request.slot >= 0]

    def _preempt(self, request: ActiveRequest) -> None:
        self._leave(request)
        request.slot = -1
        request.recompute()
        self._preempted.appendleft(request)

    def _run_step(self, requests: list[ActiveRequest]) -> None:
        requests = self._with_pages(requests)
        if not requests:
            return
        if self._chunk is not None:
            self._chunk.pause()
        self._engine.times = StepTimes()
        with self._failing(requests):
            engine = self._engine
            max_logits = engine.exchange.buffers.logits.shape[0]
            ends = Batch.of(requests, engine.kernel_tokens, max_logits).step(engine)
            for request, logits in ends:
                if request.has_answered:
                    request.times.include(self._engine.times)
                self._accept(request, logits)
            num_new = sum(not request.embeds for request, _ in ends)
            self.recent.append(StepRecord(time.monotonic(), num_new, self._engine.times))
            self._engine.times = StepTimes()  # layers of prompts may follow

    def _accept(self, request: ActiveRequest, logits: np.ndarray) -> None:
        with self._failing([request]):
            if request.accept(logits):
                self._leave(request)

    @contextmanager
    def _failing(self, requests: list[ActiveRequest]) -> Iterator[None]:
        """End `requests` with an error that is theirs; one that ends the system is raised."""
        try:
            yield
        except ServiceError:
            raise
        except NotFiniteError as error:
            self._recover(error, requests)
        except Exception as error:
            if not isinstance(error, HotcoldError):
                error = RequestError(f"the request failed: {first_line(error)}")
            self._fail(requests, error)

    def _recover(self, error: NotFiniteError, requests: list[ActiveRequest]) -> None:
        """Replace the service that made a NaN, and run the step or chunk again.

        Where it cannot be replaced, end the requests that have a NaN.
        """
        if self._chunk is not None and self._chunk.request in requests:
            self._chunk = None
        if error.service is None or not self.try_replace(error.service, str(error)):
            self._fail([request for request in requests if request.slot in error.slots], error)

    def _fail(self, requests: list[ActiveRequest], error: BaseException) -> None:
        for request in requests:
            request.fail(error)
            self._leave(request)

    def _leave(self, request: ActiveRequest) -> None:
        self._running.remove(request)
        self._pool.free(request.slot)
        if self._chunk is not None and self._chunk.request is request:
            self._chunk = None
