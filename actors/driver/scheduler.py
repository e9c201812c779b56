"""What the engine computes next, for all requests that run: continuous batching.

Everything that can go through kernels goes in one step: the next token of every request, and short
prompts as far as they fit. A long prompt goes through matmul, one layer of a chunk at a time, with
steps in between.

A request's prompt begins with what earlier ones have computed of it (`prefix_cache`).

Each running request has a slot, and pages of the KV cache as it grows. Where no page is free for
the next token, the request that was admitted last is preempted: its tokens are recomputed once
there are pages, before any waiting request starts. A request is admitted where there are pages for
the next `_AHEAD` tokens of all, so none is preempted more than once in so many.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.batches import Batch, PromptChunks, StepEnd
from hotcold.actors.driver.drafts import Speculation
from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.prefix_cache import PrefixCache
from hotcold.actors.protocol.failures import CacheLost, NotFiniteError, RequestError, first_line
from hotcold.actors.telemetry.step_times import StepRecord, StepTimes
from hotcold.model.errors import HotcoldError, ServiceError

_MAX_RECENT = 2048  # steps that are remembered, to say how fast it goes
_AHEAD = 256  # tokens
_MOST_NANS = 3  # of a request, at one place: a service's own would come at others
_NOTICED_S = 0.001  # a wait for kernels: more than a look at whether they are there
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
        self,
        engine: Engine,
        prefixes: PrefixCache,
        speculation: Speculation | None = None,
    ) -> None:
        """The pool of `prefixes` has no more slots than a kernel takes tokens."""
        self._engine = engine
        self._prefixes = prefixes
        self._pool = prefixes.pool
        self._running: list[ActiveRequest] = []  # in the order of admission
        self._preempted: deque[ActiveRequest] = deque()  # in the same order
        self._chunk: PromptChunks | None = None
        self._turns = Turns(time.monotonic_ns)
        self.speculation = speculation
        self.recent: deque[StepRecord] = deque(maxlen=_MAX_RECENT)
        # Told before a step whether it gives answers tokens, and that one begins where none runs.
        self.counts_step: Callable[[bool], None] = lambda is_answer: None
        self.begins_answer: Callable[[], None] = lambda: None

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
        num_spare: int | np.ndarray = sum(
            self._pool.num_lacking(one.slot, one.num_positions(_AHEAD)) for one in self._running
        )
        if not self._prefixes.start(request, request.num_positions(_AHEAD), num_spare):
            return False
        if not self._running:
            self.begins_answer()
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
        """Recompute all that runs after the KV cache was lost; tokens that were chosen stay.

        Each starts anew, so that none writes into pages that another has, too.
        """
        self._prefixes.forget()
        for request in reversed(self._running.copy()):
            self._preempt(request)

    def try_replace(self, service: int, cause: str) -> bool:
        """Start a new process for a service that made a NaN (`Exchange.try_replace`)."""
        try:
            return self._engine.exchange.try_replace(service, cause)
        except CacheLost:
            self._prefixes.forget(anew=True)
            raise

    @property
    def is_saving(self) -> bool:
        """Whether `save_pages` is to be called also while nothing runs."""
        return self._prefixes.is_saving

    def save_pages(self) -> None:
        """Go on writing pages of the KV cache to their store."""
        self._prefixes.save()

    def _advance(self) -> None:
        self.save_pages()
        self.end_cancelled()
        while self._preempted and self._start(self._preempted[0]):
            self._preempted.popleft()
        others = [request for request in self._running if not request.chunk_sizes]
        long = self._long_prompt(bool(others))
        is_prompts = self._turns.is_prompts(long is not None, bool(others))
        with self._turns.timed(is_prompts):
            if long is not None and is_prompts:
                self._run_layer(long)
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

    def _long_prompt(self, has_others: bool) -> ActiveRequest | None:
        """The request whose prompt can go on; None where none can yet."""
        if self._chunk is not None:
            return self._chunk.request
        long = next((request for request in self._running if request.chunk_sizes), None)
        # Services may have to load what a long prompt takes: the others go on meanwhile.
        if long is None:
            return None
        began = time.monotonic()
        is_ready = self._engine.begin_matmul(0.0 if has_others else _IDLE_S)
        if not is_ready or time.monotonic() - began > _NOTICED_S:
            long.postpone()
        return long if is_ready else None

    def _run_layer(self, request: ActiveRequest) -> None:
        """Run a layer of the request's chunks, or find what others have computed of the next."""
        with self._failing([request]):
            if self._chunk is None:
                if self._prefixes.extend(request) or not self._with_pages([request]):
                    return
                self._chunk = PromptChunks(self._engine, request)
            chunk = self._chunk
            logits = chunk.run_layer()
            self._prefixes.keep(request)
            if chunk.is_done:
                self._chunk = None
            if logits is not None:
                self._accept(request, [logits])

    def _with_pages(self, requests: list[ActiveRequest]) -> list[ActiveRequest]:
        """Those of `requests` that have pages for their next tokens; others are preempted."""
        for request in requests:
            while request.slot >= 0 and not self._pool.extend(
                request.slot, request.num_positions(0), request.num_done
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
        with self._failing(requests):
            engine = self._engine
            max_logits = engine.exchange.buffers.logits.shape[0]
            batch = self._drafted(Batch.of(requests, engine.kernel_tokens, max_logits), max_logits)
            is_answer = any(request.has_answered for request in requests)
            self.counts_step(is_answer)
            began = time.monotonic_ns()
            ends = self._stepped(batch)
            ended = time.monotonic_ns()
            num_new = num_accepted = 0
            for end in ends:
                request, num_before = end.request, len(end.request.tokens)
                num_accepted -= request.drafts.num_accepted
                had_answered = request.has_answered
                if had_answered:
                    request.times.include(engine.times)
                self._accept(request, end.rows, end.draft)
                num_new += (len(request.tokens) - num_before) * had_answered
                num_accepted += request.drafts.num_accepted
            if self.speculation is not None:
                self.speculation.learn(ended - began, time.monotonic_ns() - ended)
            num_drafted = sum(len(end.draft) for end in ends)
            if is_answer:
                self.recent.append(
                    StepRecord(time.monotonic(), num_new, engine.times, num_drafted, num_accepted)
                )
            engine.times = StepTimes()  # layers of prompts may follow

    def _drafted(self, batch: Batch, max_logits: int) -> Batch:
        """The batch, with drafts of its requests where there is room and they pay."""
        engine, speculation = self._engine, self.speculation
        engine.times = StepTimes()
        if speculation is None:
            return batch
        most = min(engine.kernel_tokens, max_logits) - len(batch.requests)
        batch = speculation.drafted(batch, most, self._reserve)
        engine.times = StepTimes()  # of the step, and what its drafts took
        engine.times.add_draft(speculation.draft_ns)
        return batch

    def _stepped(self, batch: Batch) -> list[StepEnd]:
        """Run a step, again without drafts where it failed: they may be why."""
        try:
            return batch.step(self._engine)
        except RequestError:
            if not batch.drafts:
                raise
            return batch.with_drafts([]).step(self._engine)

    def _reserve(self, request: ActiveRequest, count: int) -> int:
        """Allocate pages for a draft of `count` tokens, and return for how many there are any.

        The last free pages are left to those that will need them for tokens of their own.
        """
        pool, first = self._pool, request.num_positions(0)
        pool.extend(request.slot, first + count, request.num_done, len(self._running))
        return min(count, pool.num_positions(request.slot) - first)

    def _accept(
        self, request: ActiveRequest, rows: list[np.ndarray], draft: Sequence[int] = ()
    ) -> None:
        with self._failing([request]):
            if request.suspect is not None:
                self._blame(request.suspect)
            if request.verify(rows, draft):
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
        """Find whether a service made a NaN, or the numbers of a request are too large for it.

        Those that have one are computed again, alone: they fail where it comes again and again at
        one place. Where it comes at another one or not at all, or the services do no better with
        the token of `Engine.is_sound`, the service is replaced, if it can be, and all that it had a
        part in is computed anew. Errors: CacheLost.
        """
        if self._chunk is not None and self._chunk.request in requests:
            self._chunk = None
        bad = [one for one in requests if one.slot in error.slots] or requests
        is_elsewhere = any(
            one.suspect is not None
            and (one.suspect.where, one.suspect.service) != (error.where, error.service)
            for one in bad
        )
        for request in bad:
            request.suspect, request.num_nans = error, request.num_nans + 1
        failed = [one for one in bad if one.num_nans == _MOST_NANS or error.service is None]
        for request in bad:
            if request not in failed:
                self._preempt(request)
        if error.service is not None and (is_elsewhere or not self._is_sound()):
            self._blame(error)
            failed = bad
        self._fail(failed, error)

    def _blame(self, error: NotFiniteError) -> None:
        """Replace a service that made a NaN, if that may help. Errors: CacheLost."""
        for request in (*self._running, *self._preempted):
            request.suspect, request.num_nans = None, 0
        self._prefixes.forget(anew=True)
        if error.service is not None and self.try_replace(error.service, str(error)):
            raise CacheLost(f"the KV cache may be wrong: {error}")

    def _is_sound(self) -> bool:
        """Whether the services compute a token that they could compute at the start."""
        slot = self._pool.allocate(1)
        if slot is None:
            return True
        try:
            return self._engine.is_sound(slot)
        except RequestError:  # a service does not even answer
            return False
        finally:
            self._pool.free(slot)

    def _fail(self, requests: list[ActiveRequest], error: BaseException) -> None:
        for request in requests:
            request.fail(error)
            if request in self._preempted:
                self._preempted.remove(request)
            else:
                self._leave(request)

    def _leave(self, request: ActiveRequest) -> None:
        self._running.remove(request)
        self._prefixes.end(request)
        if self._chunk is not None and self._chunk.request is request:
            self._chunk = None
