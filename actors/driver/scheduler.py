"""The main loop: requests come, are admitted, computed step by step, and their tokens sent.

`_serve` runs in the engine's thread, all other threads put requests and jobs into its queue. First
come, first served. A job uses the engine in another way: it waits until nothing runs, and requests
behind it wait for it.

Continuous batching: everything that can go through kernels goes in one step: the next token of
every request, and short prompts as far as they fit. A long prompt goes through matmul, one layer of
a chunk at a time, with steps in between. What earlier requests have computed of it is found by
`prefix_cache`.

Each running request has a slot, and pages of the KV cache as it grows. Where no page is free for
the next token, the request that was admitted last is preempted: its tokens are recomputed once
there are pages, before any waiting request starts. A request is admitted where there are pages for
the next `_AHEAD` tokens of all, so none is preempted more than once in so many.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy as np

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.driver.batches import Batch, Keep, PromptChunks, StepEnd, Turns
from hotcold.actors.driver.draft_policy import Fate
from hotcold.actors.driver.drafts import Speculation
from hotcold.actors.driver.engine import Engine
from hotcold.actors.driver.prefix_cache import PrefixCache
from hotcold.actors.protocol.failures import (
    CacheLost,
    NotFiniteError,
    RequestError,
    SystemLost,
    first_line,
)
from hotcold.actors.telemetry.step_times import StepRecord, StepTimes, sum_drafts
from hotcold.model.errors import HotcoldError, ServiceError

_Result = TypeVar("_Result")
_MAX_RECENT = 2048  # steps that are remembered, to say how fast it goes
_AHEAD = 256  # tokens
_MOST_NANS = 3  # of a request, at one place: a service's own would come at others
_NOTICED_S = 0.001  # a wait for kernels: more than a look at whether they are there
_IDLE_S = 0.01  # between two looks for requests where nothing can run yet
_SAVE_S = 0.005  # between two looks at what has been written of the KV cache


class _Job:
    def __init__(self, function: Callable[[], object], waits: bool) -> None:
        """`waits`: until nothing runs; else only for the step in progress."""
        self._function = function
        self.waits = waits
        self.future: Future[object] = Future()

    def run(self, try_replace: Callable[[int, str], bool]) -> None:
        """Call the function, again from its beginning where a service was replaced meanwhile."""
        while not self.future.done():
            try:
                self._call(try_replace)
            except CacheLost:
                continue
            except BaseException as error:
                self.future.set_exception(error)

    def _call(self, try_replace: Callable[[int, str], bool]) -> None:
        try:
            self.future.set_result(self._function())
        except NotFiniteError as error:
            if error.service is None or not try_replace(error.service, str(error)):
                raise

    def fail(self, error: BaseException) -> None:
        self.future.set_exception(error)


class Scheduler:
    """Runs requests side by side: queue, admit, step, draw, send."""

    def __init__(
        self,
        engine: Engine,
        prefixes: PrefixCache,
        speculation: Speculation | None = None,
        counts_step: Callable[[bool], None] = lambda is_answer: None,
        begins_answer: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the thread. The pool of `prefixes` has no more slots than kernels take tokens.

        counts_step: told before a step whether it gives answers tokens
        begins_answer: told that one begins where none runs
        """
        self._engine = engine
        self._prefixes = prefixes
        self._pool = prefixes.pool
        self.speculation = speculation
        self._counts_step, self._begins_answer = counts_step, begins_answer
        self._incoming: queue.SimpleQueue[ActiveRequest | _Job | None] = queue.SimpleQueue()
        self._waiting: deque[ActiveRequest | _Job] = deque()
        self._running: list[ActiveRequest] = []  # in the order of admission
        self._preempted: deque[ActiveRequest] = deque()  # in the same order
        self._chunk: PromptChunks | None = None
        self._turns = Turns(time.monotonic_ns)
        self.recent: deque[StepRecord] = deque(maxlen=_MAX_RECENT)
        self._ended_by: ServiceError | None = None
        self._is_closing = False
        self._submitting = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="driver", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """The main loop: serve until the end, or until a failure that is not one request's own."""
        try:
            while self._collect():
                self._admit_waiting()
                try:
                    self.advance()
                except CacheLost:
                    self.recompute_all()
            self._end_cancelled()
        except BaseException as error:
            self._end_all(error)
        finally:
            self._end_waiting()

    def advance(self) -> None:
        """Run one step, or one layer of a long prompt. Errors: CacheLost; ServiceError ends all."""
        self._prefixes.save()
        self._end_cancelled()
        while self._preempted and self._start(self._preempted[0]):
            self._preempted.popleft()
        others = [request for request in self._running if not request.chunk_sizes]
        long = self._long_prompt(bool(others))
        is_prompts = self._turns.is_prompts(long is not None, bool(others))
        with self._turns.timed(is_prompts):
            if long is not None and is_prompts:
                self._run_layer(long)
            elif others := self._with_pages(others):
                self._run_step(others)

    def _run_step(self, requests: list[ActiveRequest]) -> None:
        """Compute the next tokens of `requests` at once, draw them and send them."""
        if self._chunk is not None:
            self._chunk.pause()
        with self._failing(requests):
            engine = self._engine
            max_logits = engine.exchange.buffers.logits.shape[0]
            batch = self._drafted(Batch.of(requests, engine.kernel_tokens, max_logits), max_logits)
            answering = {request for request in requests if request.has_answered}
            self._counts_step(bool(answering))
            began = time.monotonic_ns()
            ends = self._stepped(batch)
            ended = time.monotonic_ns()
            fates = [self._accept(end.request, end.rows, end.draft) for end in ends]
            if self.speculation is not None:
                self.speculation.learn(ended - began, time.monotonic_ns() - ended, fates)
            if answering:
                of_requests = list(zip((end.request for end in ends), fates, strict=True))
                drafts = sum_drafts(
                    {request.draft_source: (fate.num_drafted, fate.num_accepted)}
                    for request, fate in of_requests
                )
                num_new = sum(fate.num_got for request, fate in of_requests if request in answering)
                self.recent.append(StepRecord(time.monotonic(), num_new, engine.times, drafts))
            engine.times = StepTimes()  # layers of prompts may follow

    def submit(self, item: ActiveRequest | _Job) -> None:
        """Put a request in the queue. Errors: ServiceError where the system has ended."""
        with self._submitting:
            self.require_running()
            self._incoming.put(item)

    def between_requests(self, function: Callable[[], _Result]) -> _Result:
        """Call `function` in the engine's thread while nothing runs. Errors: its own.

        It is called again where the KV cache is lost, or a service replaced for a NaN.
        """
        return self._run(function, waits=True)

    def between_steps(self, function: Callable[[], _Result]) -> _Result:
        """Call `function` in the engine's thread, whatever runs.

        Errors:  its own; SystemLost ends the system
        """
        return self._run(function, waits=False)

    def _run(self, function: Callable[[], _Result], waits: bool) -> _Result:
        job = _Job(function, waits)
        self.submit(job)
        result: _Result = job.future.result()  # type: ignore[assignment]
        return result

    def require_running(self) -> None:
        """Raise the ServiceError that ended the system, if one did."""
        if self._ended_by is not None:
            raise self._ended_by

    def require_thread(self) -> None:
        """Raise the ServiceError with which the thread ended, if it did without `close`."""
        if not (self._thread.is_alive() or self._is_closing):
            raise self._ended_by or ServiceError("the driver failed; start again")

    @property
    def num_waiting(self) -> int:
        """How many wait in the queue, or to run again."""
        return self._incoming.qsize() + len(self._waiting) + len(self._preempted)

    @property
    def num_running(self) -> int:
        """How many requests run."""
        return len(self._running)

    @property
    def _is_idle(self) -> bool:
        """Whether nothing runs, or has been preempted."""
        return not (self._running or self._preempted)

    def close(self, cancel_all: Callable[[], None]) -> None:
        """End the thread within a token; `cancel_all` marks the requests that run as cancelled."""
        self._is_closing = True
        with self._submitting:  # nothing is submitted later
            self._ended_by = self._ended_by or ServiceError("the system is being stopped")
        cancel_all()
        self._incoming.put(None)
        self._thread.join()

    def _end_cancelled(self) -> None:
        """End requests whose readers have cancelled them."""
        for request in [request for request in self._running if request.is_cancelled]:
            request.end("cancelled")
            self._leave(request)
        for request in [request for request in self._preempted if request.is_cancelled]:
            request.end("cancelled")
            self._preempted.remove(request)

    def _end_all(self, error: BaseException) -> None:
        """End all that runs, and let nothing into the queue from now on."""
        if not isinstance(error, ServiceError):
            error = ServiceError(f"the driver failed: {first_line(error)}; start again")
        with self._submitting:
            self._ended_by = self._ended_by or error
        for request in list(self._running):
            request.fail(error)
            self._leave(request)
        while self._preempted:
            self._preempted.popleft().fail(error)

    def _end_waiting(self) -> None:
        """Fail all that still wait; the queue is closed by now."""
        error = self._ended_by or ServiceError("the system is being stopped")
        while not self._incoming.empty():
            item = self._incoming.get()
            if item is not None:
                self._waiting.append(item)
        while self._waiting:
            self._waiting.popleft().fail(error)

    def _collect(self) -> bool:
        """Move what has come into the queue, waiting for it when idle; False at the end."""
        idle = self._is_idle and not self._waiting
        if not idle and not self._running:
            self._await_room()
        while idle or not self._incoming.empty():
            item = self._next()
            if item is None:
                return False
            if isinstance(item, _Job) and not item.waits:
                item.run(self.try_replace)
                if isinstance(error := item.future.exception(), SystemLost):
                    raise error
                continue
            self._waiting.append(item)
            idle = False
        return True

    def _await_room(self) -> None:
        """Wait a little while what waits may have no pages, as they are being written."""
        until_s = time.monotonic() + _SAVE_S
        while self._prefixes.is_saving and self._incoming.empty() and time.monotonic() < until_s:
            time.sleep(_SAVE_S / 5)

    def _next(self) -> ActiveRequest | _Job | None:
        """What comes next; pages of the KV cache are written meanwhile."""
        while self._prefixes.is_saving:
            with suppress(queue.Empty):
                return self._incoming.get(timeout=_SAVE_S)
            self._prefixes.save()
        return self._incoming.get()

    def _admit_waiting(self) -> None:
        """End cancelled requests, and start those at the head while there is room."""
        for item in list(self._waiting):
            if isinstance(item, ActiveRequest) and item.is_cancelled:
                item.end("cancelled")
                self._waiting.remove(item)
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, ActiveRequest):
                if not self.admit(first):
                    return
                self._waiting.popleft()
            elif not self._is_idle:
                return
            else:
                self._waiting.popleft()  # before it is done, and who asked looks how many wait
                first.run(self.try_replace)

    def admit(self, request: ActiveRequest) -> bool:
        """Start a request, if there is a slot and pages for it, and no preempted one waits."""
        return not self._preempted and self._start(request)

    def _start(self, request: ActiveRequest) -> bool:
        """Let a request run, if there is a slot and pages for it."""
        num_spare: int | np.ndarray = sum(
            self._pool.num_lacking(one.slot, one.num_positions(_AHEAD)) for one in self._running
        )
        if not self._prefixes.start(request, request.num_positions(_AHEAD), num_spare):
            return False
        if not self._running:
            self._begins_answer()
        self._running.append(request)
        return True

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
                ends = request.chunk_ends(self._engine.chunks_at_once)
                if self._prefixes.extend(request) or not self._with_pages([request], ends):
                    return
                self._chunk = PromptChunks(self._engine, request)
            chunk = self._chunk
            logits = chunk.run_layer(self._keep)
            self._prefixes.keep(request)
            if chunk.is_done:
                self._chunk = None
            if logits is not None:
                self._accept(request, [logits])

    def _with_pages(
        self, requests: list[ActiveRequest], ends: Sequence[int] | None = None
    ) -> list[ActiveRequest]:
        """Those of `requests` that have pages for their next tokens, or for a chunk with `ends`.

        Pages of recurrent layers come back after a few tokens of others: a request waits for them
        while another one can go on. Else, and where others lack, the last one is preempted.
        """
        waiting: list[ActiveRequest] = []
        for request in requests:
            while request.slot >= 0:
                wanted = request.slot, request.num_positions(0), request.num_done
                if self._pool.extend(*wanted, ends=ends):
                    break
                if self._pool.lacks_states_alone(*wanted, ends):
                    waiting.append(request)
                    break
                self._preempt(self._running[-1])
        ready = [one for one in requests if one.slot >= 0 and one not in waiting]
        others = (one for one in self._running if not one.chunk_sizes)
        if not waiting or any(one not in waiting for one in others):
            return ready
        self._preempt(self._running[-1])
        return self._with_pages([one for one in waiting if one.slot >= 0], ends)

    def _preempt(self, request: ActiveRequest) -> None:
        self._leave(request)
        request.slot = -1
        request.recompute()
        self._preempted.appendleft(request)

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
            return batch.step(self._engine, self._keep)
        except RequestError:
            if not batch.drafts:
                raise
            return batch.with_drafts([]).step(self._engine, self._keep)

    @property
    def _keep(self) -> Keep | None:
        """What takes hidden states for drafts."""
        return None if self.speculation is None else self.speculation.keep

    def _reserve(self, request: ActiveRequest, count: int) -> int:
        """Allocate pages for a draft of `count` tokens, and return for how many there are any.

        The last free pages are left to those that will need them for tokens of their own.
        """
        pool, first = self._pool, request.num_positions(0)
        pool.extend(request.slot, first + count, request.num_done, len(self._running))
        return min(count, pool.num_positions(request.slot) - first)

    def _accept(
        self, request: ActiveRequest, rows: list[np.ndarray], draft: Sequence[int] = ()
    ) -> Fate:
        """Draw a request's tokens from rows of logits, and send them."""
        num_before, num_accepted = len(request.tokens), -request.drafts.num_accepted
        if request.has_answered:
            request.times.include(self._engine.times)
        with self._failing([request]):
            if request.suspect is not None:
                self._blame(request.suspect)
            if request.verify(rows, draft):
                self._leave(request)
        num_accepted += request.drafts.num_accepted
        return Fate(len(draft), len(request.tokens) - num_before, num_accepted)

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
