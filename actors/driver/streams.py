"""How readers, in other processes, get the events of their requests: those of a moment together.

Each call between two processes costs about as much as a token of a small model. So a reader takes
events some times a second, and a server takes those of all its requests in one call, which also
shows that the driver lives.

A reader that was silent for a minute counts as dead: its requests are cancelled. A reader that gave
up on the driver, because that was stopped for a while, begins a new epoch: its earlier requests are
cancelled too, and none of their events is handed out any more.
"""

import math
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress

from hotcold.actors.protocol.failures import RequestError
from hotcold.actors.protocol.messages import ReaderEpoch, TokenEvent

PACE_S = 0.04  # the least time between two takes: later events join the next one
POLL_S = 1.0  # between two polls of readers
# Silent polls at which a reader counts as gone. Polls are counted, not seconds: while all processes
# are stopped, no reader is late.
TIMEOUT_POLLS = 60

_EARLY_CANCELS = 256  # request ids cancelled before their requests came, of which the last are kept
_MOST_DEAD = 1024  # readers that are told so where they call again

RequestEvent = tuple[str, TokenEvent | BaseException]  # a request's id, and its event or its error


class Stream:
    """Carries one request's events from the engine's thread to its reader."""

    def __init__(
        self, request_id: str, reader: "Reader", on_end: "Callable[[Stream], None]"
    ) -> None:
        """`on_end` is called before the last event is handed on."""
        self.request_id = request_id
        self.cancelled = threading.Event()
        self._reader = reader
        self._on_end = on_end

    def put(self, event: TokenEvent | BaseException) -> None:
        """Hand an event to the reader, or the error that is the last of them."""
        if is_last := isinstance(event, BaseException) or event.result is not None:
            self._on_end(self)
        self._reader.put(self, event, is_last)


class Reader:
    """One epoch of a reader: its open streams, and their events that it has not taken."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.has_ended = False
        self.num_silent = 0  # polls since its last call
        self._events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        self._streams: list[Stream] = []
        self._changing = threading.Lock()
        self._all_ended = threading.Event()  # no stream is open any more
        self._taken_at = -math.inf
        self._taking = threading.Lock()
        self._handed_out: tuple[int, list[RequestEvent]] = (0, [])

    def open(self, request_id: str, on_end: Callable[[Stream], None]) -> Stream:
        """A new stream, cancelled at once where the epoch has ended."""
        stream = Stream(request_id, self, on_end)
        with self._changing:
            self._streams.append(stream)
            self._all_ended.clear()
            if self.has_ended:
                stream.cancelled.set()
        return stream

    def put(self, stream: Stream, event: TokenEvent | BaseException, is_last: bool) -> None:
        """Add an event of a stream, which the last one closes."""
        self._events.put((stream.request_id, event))
        if is_last:
            self.close(stream)

    def close(self, stream: Stream) -> None:
        """Expect no more events of a stream."""
        with self._changing:
            self._streams.remove(stream)
            if not self._streams:
                self._all_ended.set()

    @property
    def is_idle(self) -> bool:
        """Whether no stream is open, and no event waits to be taken."""
        return not self._streams and self._events.empty()

    def next_events(self, wait_s: float | None = None) -> list[RequestEvent]:
        """The events since the last call, in order; waits up to `wait_s` for the first.

        A request's events are joined into one, its error behind them. The first event of all, and
        the last when no stream is open any more, are handed out at once.
        """
        try:
            first = self._events.get(timeout=wait_s)
        except queue.Empty:
            return []
        self._all_ended.wait(max(0.0, self._taken_at + PACE_S - time.monotonic()))
        events = [first, *(self._events.get() for _ in range(self._events.qsize()))]
        self._taken_at = time.monotonic()
        return joined(events)

    def take(self, num_taken: int, wait_s: float) -> tuple[int, list[RequestEvent]]:
        """`next_events`, and the number by which a later call confirms them.

        Until one does, the same events are handed out.
        """
        with self._taking:
            if self._handed_out[0] <= num_taken:
                events = self.next_events(wait_s)
                self._handed_out = (num_taken + bool(events), events)
            return self._handed_out

    def end(self) -> None:
        """Cancel its streams."""
        with self._changing:
            self.has_ended = True
            for stream in self._streams:
                stream.cancelled.set()


def joined(events: list[RequestEvent]) -> list[RequestEvent]:
    """Join each request's events into one; its error, if there is one, comes behind them."""
    texts: dict[str, TokenEvent] = {}
    errors: list[RequestEvent] = []
    for request_id, event in events:
        if isinstance(event, BaseException):
            errors.append((request_id, event))
        else:
            earlier = texts.get(request_id)
            texts[request_id] = event if earlier is None else earlier + event
    return [*texts.items(), *errors]


class Readers:
    """All readers by their names."""

    def __init__(self) -> None:
        self._readers: dict[str, Reader] = {}
        self._dead: OrderedDict[str, int] = OrderedDict()  # names, and epochs that have ended
        self._changing = threading.Lock()

    def touch(self, epoch: ReaderEpoch) -> Reader:
        """Note that the reader lives, in this epoch; its earlier ones end.

        Errors:  RequestError where this one has ended
        """
        with self._changing:
            reader = self._readers.get(epoch.name)
            oldest = self._dead.get(epoch.name, -1) + 1 if reader is None else reader.epoch
            if epoch.number < oldest:
                raise RequestError("nobody read this answer for a while; ask again")
            if reader is None or reader.epoch < epoch.number:
                if reader is not None:
                    reader.end()
                reader = self._readers[epoch.name] = Reader(epoch.number)
                self._dead.pop(epoch.name, None)
            reader.num_silent = 0
            return reader

    def attend(self, epoch: ReaderEpoch) -> None:
        """As `touch`, of a reader that may have ended, or has no requests yet."""
        with suppress(RequestError):
            self.touch(epoch)

    def forget(self, name: str) -> None:
        """Drop a reader that has all its events."""
        with self._changing:
            self._readers.pop(name, None)

    def poll(self) -> None:
        """End readers that have been silent for too long, and drop them with all that they hold."""
        with self._changing:
            for name, reader in list(self._readers.items()):
                reader.num_silent += 1
                if reader.num_silent < TIMEOUT_POLLS:
                    continue
                del self._readers[name]
                if not reader.is_idle:
                    reader.end()
                    self._dead[name] = reader.epoch
                    if len(self._dead) > _MOST_DEAD:
                        self._dead.popitem(last=False)


class OpenStreams:
    """The streams of all requests that have not ended; cancels requests by their ids."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []
        self._cancelled_early: deque[str] = deque(maxlen=_EARLY_CANCELS)
        self._naming = threading.Lock()  # held while one of the two is read and changed

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: Stream) -> None:
        """Add a request's stream; the request may have been cancelled already."""
        with self._naming:
            self._streams.append(stream)
            if stream.request_id in self._cancelled_early:
                self._cancelled_early.remove(stream.request_id)
                stream.cancelled.set()

    def remove(self, stream: Stream) -> None:
        """Remove the stream of a request that has ended."""
        self._streams.remove(stream)

    def cancel(self, request_id: str) -> None:
        """End a request that waits, runs or has yet to come."""
        with self._naming:
            streams = list(self._streams)  # whole: they leave it at any moment
            found = [stream for stream in streams if stream.request_id == request_id]
            for stream in found:
                stream.cancelled.set()
            if not found:
                self._cancelled_early.append(request_id)

    def cancel_all(self) -> None:
        """End all of them."""
        for stream in list(self._streams):
            stream.cancelled.set()
