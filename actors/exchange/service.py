"""What every service is: threads that wait for a doorbell, do their part, and ring back."""

import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from hotcold.actors.exchange.call_exchange import ServiceReply, ServiceRequest
from hotcold.actors.exchange.doorbell_exchange import ArenaExchange
from hotcold.actors.protocol.arena import ArenaLayout
from hotcold.model.errors import ServiceError
from hotcold.numba_kernels.serve.doorbell import INTS_A_CELL, clock_ns, sleep_change
from hotcold.numba_kernels.serve.mailbox import (
    ARRIVED,
    BARRIER_COUNT,
    DELAYED_US,
    DONE,
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
    SharedBuffers,
    cell,
    finish_request,
)
from hotcold.placement.machine.core_affinity import CoreAffinity, Delays
from hotcold.placement.machine.pinning import pin_thread


class Service(ABC):
    """A piece of the model on some device, asked through a mailbox in the arena.

    The threads live inside compiled loops that hold no GIL, so the process stays free to answer
    actor calls. A loop returns to Python only for a request that it cannot answer itself.
    """

    def __init__(self, name: str, index: int, num_threads: int) -> None:
        """`index` is the service's row in the buffers."""
        self.name = name
        self.index = index
        self.num_threads = num_threads
        self.thread_cores: tuple[tuple[int, ...], ...] = ()  # of each thread; () if not pinned
        self.keeper: CoreAffinity | None = None  # of threads that are not pinned
        self.device_name = "cpu"
        self.last_error = ""
        self._broken = False
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._calls: ArenaExchange | None = None

    @abstractmethod
    def serve(self, thread: int, seen: int) -> int:
        """ServiceReply requests after number `seen` until one is Python's; return its number."""

    @abstractmethod
    def answer_in_python(self) -> None:
        """ServiceReply the request in the mailbox that the compiled loop left to Python."""

    @abstractmethod
    def prepare(self, layout: ArenaLayout) -> None:
        """Make work space for requests of this layout."""

    @abstractmethod
    def release(self) -> None:
        """End what `prepare` started; called at a STOP request."""

    @abstractmethod
    def prepare_prompts(self) -> None:
        """Import and compile what only long prompts need, if anything; beside what is served.

        Without this the first long prompt does it, and waits.
        """

    def attach(
        self, layout: ArenaLayout, arena: np.ndarray, buffers: SharedBuffers | None = None
    ) -> None:
        """Map the arena and start the threads; the arena may hold a request already.

        `buffers`: instead of the arena's own.
        """
        self._arena = arena
        self._calls = None
        self.buffers: SharedBuffers = layout.buffers(arena) if buffers is None else buffers
        self.prepare(layout)
        cells = self.buffers.cells
        for kind in (ARRIVED, BARRIER_COUNT):
            cells[cell(self.index, kind) * INTS_A_CELL] = 0
        seen = int(cells[cell(self.index, DONE) * INTS_A_CELL])
        self._threads = [
            threading.Thread(target=self._run, args=(i, seen), name=f"{self.name}-{i}", daemon=True)
            for i in range(self.num_threads)
        ]
        for thread in self._threads:
            thread.start()
        if self.keeper is not None:
            self._keep(self.keeper)

    def _keep(self, keeper: CoreAffinity) -> None:
        """Let the keeper look after the threads for as long as they serve this arena."""
        ended = self._ended = threading.Event()
        cells, reply = self.buffers.cells, self.buffers.replies[self.index]
        bell, done = cell(self.index, REQUEST), cell(self.index, DONE)

        def await_work() -> bool:
            # The bell is read first: nothing that rings later is slept through. A request that is
            # being answered may be the STOP after which nobody rings.
            number = cells[bell * INTS_A_CELL]
            if number == cells[done * INTS_A_CELL] and not ended.is_set():
                sleep_change(cells, bell, number, IDLE_NS)
            return not ended.is_set()

        def delays() -> Delays:
            return Delays(int(reply[DELAYED_US]), int(reply[TAKEN_US]), int(reply[NUM_ANSWERED]))

        threading.Thread(
            target=keeper.watch, args=(await_work, delays), name="keeper", daemon=True
        ).start()

    def answer(self, question: ServiceRequest) -> ServiceReply:
        """ServiceReply a question that came as an actor call, through this process's own arena."""
        if self._calls is None:
            self._calls = ArenaExchange(self.buffers, self)
        question.write(self.buffers, self.index)
        self._calls.ask([self.index])
        return ServiceReply.read(self.buffers, self.index)

    def try_out(self) -> None:
        """Let the threads answer an empty question; returns once their compiled loops run.

        Once, before anybody else asks: it has a number of its own. Of the request words only the
        operation is written. Errors: ServiceError
        """
        self.buffers.requests[self.index, OPERATION] = PING
        ArenaExchange(self.buffers, self, OWN_NUMBER).ask([self.index])

    def check(self, services: Sequence[int], num_polls: int) -> None:
        """Raise ServiceError if a thread has failed: nothing will be answered any more."""
        if self._broken:
            raise ServiceError(f"{self.explain(self.index)}; start again")

    def explain(self, service: int) -> str:
        """The last error's last line, with the service's name."""
        lines = self.last_error.strip().splitlines() or ["unknown error"]
        return f"the {self.name} service failed: {lines[-1]}"

    def _run(self, thread: int, seen: int) -> None:
        self._stay(thread)
        while True:
            try:
                number = self.serve(thread, seen)
            except Exception:  # a kernel that cannot be compiled must not leave the driver waiting
                self._fail()
                self._broken = True
                return
            request = self.buffers.requests[self.index]
            stop = request[OPERATION] == STOP
            started = clock_ns()
            if thread == 0:
                try:
                    if stop:
                        self._ended.set()
                        self.release()
                    else:
                        self._roam(thread)
                        self.answer_in_python()
                except Exception:
                    self._fail()
                self._stay(thread)
            cells, replies = self.buffers.cells, self.buffers.replies
            finish_request(
                cells, replies, NO_COUNTERS, self.index, number, self.num_threads, started
            )
            if stop:
                return
            seen = number

    def _stay(self, thread: int) -> None:
        """Keep this thread on its own cores."""
        if self.thread_cores:
            pin_thread(self.thread_cores[thread])
        elif self.keeper is not None:
            self.keeper.stay(thread)

    def _roam(self, thread: int) -> None:
        """Let this thread, and what torch starts from it, use all of the service's cores."""
        if self.thread_cores:
            pin_thread([core for cores in self.thread_cores for core in cores])
        elif self.keeper is not None:
            self.keeper.roam(thread)

    def _fail(self) -> None:
        self.last_error = traceback.format_exc()
        self.buffers.replies[self.index, STATUS] = FAILED

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end after a STOP request; False if one still runs."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)
