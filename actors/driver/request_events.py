"""How readers get what requests produce: events of a moment handed out together.

Each call between two processes costs about as much as a token of a small model. So a reader takes
what has come some times a second. And a server does not follow each request by a stream of its own:
it takes what all of them have produced, and the same call shows that the driver lives.
"""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from hotcold.actors.driver.active_request import Stream
from hotcold.actors.protocol.messages import TokenEvent

# The least time between two handings out: what comes sooner rides along with the next one.
PACE_S = 0.04

_EARLY_CANCELS = 256  # ids of requests cancelled before they came that are kept, the last ones

RequestEvent = tuple[str, TokenEvent | BaseException]  # a request's id, and its event or its error


class EventQueue:
    """Events of one or many requests, from the engine's thread; one reader at a time takes them."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._num_open = 0  # streams that have not ended
        self._all_ended = threading.Event()
        self._taken_at = -math.inf

    def stream(self, request_id: str, on_end: Callable[[Stream], None]) -> Stream:
        """A stream whose events come here; `on_end` is called with it before the last of them."""
        self._count(1)
        return _QueuedStream(request_id, self, on_end)

    def drop_stream(self) -> None:
        """Expect nothing of a stream whose request could not be queued."""
        self._count(-1)

    @property
    def is_idle(self) -> bool:
        """Whether no stream is open, and nothing waits to be taken."""
        return not self._num_open and self._events.empty()

    def put(self, request_id: str, event: TokenEvent | BaseException) -> None:
        """Add an event of a stream."""
        self._events.put((request_id, event))
        if _is_last(event):
            self._count(-1)

    def take(self, wait_s: float | None = None) -> list[RequestEvent]:
        """What has come since the last call, in order; waits up to `wait_s` for the first.

        Events of one request come as one, its error behind them. The first of all, and the last
        when no stream is open any more, are handed out at once.
        """
        try:
            first = self._events.get(timeout=wait_s)
        except queue.Empty:
            return []
        self._all_ended.wait(max(0.0, self._taken_at + PACE_S - time.monotonic()))
        events = [first, *(self._events.get() for _ in range(self._events.qsize()))]
        self._taken_at = time.monotonic()
        return joined(events)

    def _count(self, change: int) -> None:
        with self._counting:
            self._num_open += change
            if self._num_open:
                self._all_ended.clear()
            else:
                self._all_ended.set()


class _QueuedStream(Stream):
    def __init__(
        self, request_id: str, events: EventQueue, on_end: Callable[[Stream], None]
    ) -> None:
        super().__init__(request_id)
        self._events = events
        self._on_end = on_end

    def put(self, event: TokenEvent | BaseException) -> None:
        """See `Stream.put`."""
        if _is_last(event):
            self._on_end(self)
        self._events.put(self.request_id, event)


class OpenStreams:
    """The streams of all requests that have not ended, and how a request is cancelled by its id."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []
        self._cancelled_early: deque[str] = deque(maxlen=_EARLY_CANCELS)
        self._naming = threading.Lock()  # held while one of the two is read and changed

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: Stream) -> None:
        """Its request has come; it may have been cancelled already."""
        with self._naming:
            self._streams.append(stream)
            if stream.request_id in self._cancelled_early:
                self._cancelled_early.remove(stream.request_id)
                stream.cancelled.set()

    def remove(self, stream: Stream) -> None:
        """Its request has ended."""
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


def joined(events: list[RequestEvent]) -> list[RequestEvent]:
    """Join the events of each request; its error, if there is one, stays behind them."""
    texts: dict[str, TokenEvent] = {}
    errors: list[RequestEvent] = []
    for request_id, event in events:
        if isinstance(event, BaseException):
            errors.append((request_id, event))
        else:
            earlier = texts.get(request_id)
            texts[request_id] = event if earlier is None else earlier + event
    return [*texts.items(), *errors]


def _is_last(event: TokenEvent | BaseException) -> bool:
    return isinstance(event, BaseException) or event.result is not None
