"""A service: threads that wait for a doorbell, do their part of a request, and ring back."""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from hotcold.actors.exchange.call_exchange import ServiceReply, ServiceRequest
from hotcold.actors.exchange.doorbell_exchange import ArenaExchange
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.model.errors import ServiceError
from hotcold.numba_kernels.loops.doorbell import INTS_A_CELL, clock_ns, sleep_change
from hotcold.numba_kernels.loops.mailbox import (
    ANY_WEIGHTS,
    ARRIVED,
    BARRIER_COUNT,
    DELAYED_US,
    DONE,
    DRAFT,
    FAILED,
    IDLE_NS,
    NO_COUNTERS,
    NUM_ANSWERED,
    OPERATION,
    OWN_NUMBER,
    PING,
    REQUEST,
    STATUS,
    STOP,
    TAKEN_US,
    TARGET,
    TEAM,
    WANTED,
    WEIGHTS,
    SharedBuffers,
    cell_index,
    finish_request,
    is_for_others,
)
from hotcold.placement.machine.core_affinity import CoreAffinity, Delays
from hotcold.placement.machine.pinning import pin_thread


class Service(ABC):
    """A part of the model on some device, which serves requests from a mailbox in the arena.

    The threads live inside compiled loops that hold no GIL, so the process stays free to answer
    actor calls. A loop returns to Python only for a request that it cannot serve itself.
    """

    buffers: SharedBuffers
    _arena: np.ndarray

    def __init__(self, name: str, index: int, num_threads: int) -> None:
        """`index` is the service's row in the buffers."""
        self.name = name
        self.index = index
        self.num_threads = num_threads
        self.thread_cores: tuple[tuple[int, ...], ...] = ()  # of each thread; () if not pinned
        self.affinity: CoreAffinity | None = None  # of threads that are not pinned
        self.device_name = "cpu"
        self.last_error = ""
        self.weights = ANY_WEIGHTS  # that it serves: with a draft, its own are TARGET
        self._draft: Service | None = None
        self._broken = False
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._calls: ArenaExchange | None = None

    @property
    def draft(self) -> Service | None:
        """The same part of the model in fewer bits: requests for DRAFT weights are for it.

        It works within this service, with the same threads, arena and KV cache.
        """
        return self._draft

    @draft.setter
    def draft(self, draft: Service) -> None:
        self._draft, self.weights, draft.weights = draft, TARGET, DRAFT

    @property
    def may_leave_out(self) -> bool:
        """Whether its last threads may be left out of requests (`next_share`)."""
        return True

    def work_within(self, service: Service) -> None:
        """Use another service's requests and threads."""
        self.thread_cores, self.buffers = service.thread_cores, service.buffers
        self._arena = service._arena

    @abstractmethod
    def serve(self, thread: int, seen: int) -> int:
        """Serve requests after number `seen` until one is left to Python; return its number.

        0: the service has ended, and the thread was left out.
        """

    @abstractmethod
    def answer_in_python(self) -> None:
        """Serve the request in the mailbox that the compiled loop left to Python."""

    @abstractmethod
    def prepare(self, layout: ArenaLayout) -> None:
        """Allocate work space for requests of this layout."""

    @abstractmethod
    def release(self) -> None:
        """End what `prepare` started; called at a STOP request."""

    @abstractmethod
    def prepare_prompts(self) -> None:
        """Import and compile what only long prompts need, while requests are served.

        Otherwise the first long prompt waits for it.
        """

    def attach(
        self, layout: ArenaLayout, arena: np.ndarray, buffers: SharedBuffers | None = None
    ) -> None:
        """Start the threads on this arena, which may hold a request already.

        `buffers`: instead of the arena's own
        """
        self._calls = None
        self._prepare_all(layout, arena, layout.buffers(arena) if buffers is None else buffers)
        cells = self.buffers.cells
        for kind in (ARRIVED, BARRIER_COUNT, TEAM):
            first = cell_index(self.index, kind) * INTS_A_CELL
            cells[first : first + INTS_A_CELL] = 0
        seen = int(cells[cell_index(self.index, DONE) * INTS_A_CELL])
        self._threads = [
            threading.Thread(target=self._run, args=(i, seen), name=f"{self.name}-{i}", daemon=True)
            for i in range(self.num_threads)
        ]
        for thread in self._threads:
            thread.start()
        if self.affinity is not None:
            self._watch_affinity(self.affinity)

    def _prepare_all(self, layout: ArenaLayout, arena: np.ndarray, buffers: SharedBuffers) -> None:
        self._arena, self.buffers = arena, buffers
        self.prepare(layout)
        if self._draft is not None:
            self._draft.work_within(self)
            self._draft.prepare(layout)

    def prepare_unattached(self, layout: ArenaLayout) -> None:
        """As `attach`, on an arena of its own and without threads: to compile."""
        arena = layout.new_arena()
        self._prepare_all(layout, arena, layout.buffers(arena))

    def compile(self) -> None:
        """Compile the loops, after `prepare_unattached`.

        Each is entered with a request that it leaves to Python.
        """
        self.buffers.requests[self.index, OPERATION] = STOP
        self.buffers.cells[cell_index(self.index, REQUEST) * INTS_A_CELL] = 1
        for service in filter(None, (self, self._draft)):
            service.serve(0, 0)

    def _watch_affinity(self, affinity: CoreAffinity) -> None:
        """Keep adapting the threads' cores for as long as they serve this arena."""
        ended = self._ended = threading.Event()
        cells, reply = self.buffers.cells, self.buffers.replies[self.index]
        bell, done = cell_index(self.index, REQUEST), cell_index(self.index, DONE)

        def await_work() -> bool:
            # The bell is read first: nothing that rings later is slept through. A request that is
            # being served may be the STOP after which nothing rings.
            number = cells[bell * INTS_A_CELL]
            if number == cells[done * INTS_A_CELL] and not ended.is_set():
                sleep_change(cells, bell, number, IDLE_NS)
            return not ended.is_set()

        def delays() -> Delays:
            return Delays(int(reply[DELAYED_US]), int(reply[TAKEN_US]), int(reply[NUM_ANSWERED]))

        def leave_out(count: int) -> None:
            cells[cell_index(self.index, TEAM) * INTS_A_CELL + WANTED] = count

        if self.may_leave_out:
            affinity.leave_out = leave_out
            leave_out(0 if affinity.is_pinned else 1)
        threading.Thread(
            target=affinity.watch, args=(await_work, delays), name="affinity", daemon=True
        ).start()

    def answer(self, request: ServiceRequest) -> ServiceReply:
        """Serve a request that came as an actor call, in this process's own arena."""
        if self._calls is None:
            self._calls = ArenaExchange(self.buffers, self)
        request.write(self.buffers, self.index)
        self._calls.request([self.index])
        return ServiceReply.read(self.buffers, self.index)

    def try_out(self) -> None:
        """Send the threads an empty request; returns once their compiled loops run.

        Called once, before any other request: it has a sequence number of its own. Of the request
        words only the operation is written and, where the loop of a draft has to run too, WEIGHTS.
        Errors:  ServiceError
        """
        self.buffers.requests[self.index, OPERATION] = PING
        if self._draft is not None:
            self.buffers.requests[self.index, WEIGHTS] = DRAFT
        ArenaExchange(self.buffers, self, OWN_NUMBER).request([self.index])

    def check(self, services: Sequence[int], num_polls: int) -> None:
        """Raise ServiceError if a thread has failed: no request will be served any more."""
        if self._broken:
            raise ServiceError(f"{self.explain(self.index)}; start again")

    def explain(self, service: int) -> str:
        """The last error's last line, with the service's name."""
        lines = self.last_error.strip().splitlines() or ["unknown error"]
        return f"the {self.name} service failed: {lines[-1]}"

    def _run(self, thread: int, seen: int) -> None:
        self._pin(thread)
        serving: Service = self
        while True:
            try:
                number = serving.serve(thread, seen)
            except Exception:  # a kernel that cannot be compiled must not leave the driver waiting
                self._fail()
                self._broken = True
                return
            if number == 0:
                return
            request = self.buffers.requests[self.index]
            if is_for_others(request, serving.weights):
                serving = self._other(serving)
                seen = number - 1  # it has yet to be served
                continue
            stop = request[OPERATION] == STOP
            started = clock_ns()
            if thread == 0:
                try:
                    if stop:
                        self._ended.set()
                        self.release()
                        if self._draft is not None:
                            self._draft.release()
                    else:
                        self._unpin(thread)
                        serving.answer_in_python()
                except Exception:
                    self._fail()
                self._pin(thread)
            buffers = self.buffers
            left_out = int(buffers.cells[cell_index(self.index, TEAM) * INTS_A_CELL])
            finish_request(
                buffers.cells, buffers.requests, buffers.replies, NO_COUNTERS, self.index, number,
                self.num_threads - left_out, started,
            )  # fmt: skip
            if stop:
                return
            seen = number

    def _other(self, serving: Service) -> Service:
        """The draft instead of this service, or the other way round."""
        return self._draft if serving is self and self._draft is not None else self

    def _pin(self, thread: int) -> None:
        """Keep this thread on its own cores."""
        if self.thread_cores:
            pin_thread(self.thread_cores[thread])
        elif self.affinity is not None:
            self.affinity.pin(thread)

    def _unpin(self, thread: int) -> None:
        """Let this thread, and those that it starts, use all of the service's cores."""
        if self.thread_cores:
            pin_thread([core for cores in self.thread_cores for core in cores])
        elif self.affinity is not None:
            self.affinity.unpin(thread)

    def _fail(self) -> None:
        self.last_error = traceback.format_exc()
        self.buffers.replies[self.index, STATUS] = FAILED

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end after a STOP request; False if one still runs."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)
