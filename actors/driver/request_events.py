"""How readers get what requests produce: events of a moment handed out together.

Each call between two processes costs about as much as a token of a small model. So a reader takes
what has come some times a second. And a server does not follow each request by a stream of its own:
it takes what all of them have produced, and the same call shows that the driver lives.
"""

import queue
import threading
import time
from collections.abc import Callable

from actors.driver.active_request import Stream
from actors.protocol.messages import TokenEvent

# The least time between two handings out: what comes sooner rides along with the next one.
PACE_S = 0.04

RequestEvent = tuple[str, TokenEvent | BaseException]  # a request's id, and its event or its error


class Outbox:
    """Collects events in the engine's thread; one reader at a time takes them."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        self._taken_at = 0.0

    def stream(self, request_id: str, on_end: Callable[[Stream], None]) -> Stream:
        """A stream whose events come here; `on_end` is called with it after the last of them."""
        return _OutboxStream(request_id, self._events, on_end)

    def take(self, wait_s: float) -> list[RequestEvent]:
        """What has come since the last call, in order; waits up to `wait_s` for the first.

        Events of one request come as one.
        """
        try:
            first = self._events.get(timeout=wait_s)
        except queue.Empty:
            return []
        time.sleep(max(0.0, self._taken_at + PACE_S - time.monotonic()))
        events = [first, *(self._events.get() for _ in range(self._events.qsize()))]
        self._taken_at = time.monotonic()
        return joined(events)


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


class OwnStream(Stream):
    """A request's events for a reader of its own."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self._events: queue.SimpleQueue[TokenEvent | BaseException] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._taken_at = 0.0

    def put(self, event: TokenEvent | BaseException) -> None:
        """See `Stream.put`."""
        self._events.put(event)
        if _is_last(event):
            self._ended.set()

    def take(self) -> list[TokenEvent | BaseException]:
        """What has come since the last call, as one event and perhaps the error behind it.

        Waits for the first; the first of all and the last are handed out at once.
        """
        first = self._events.get()
        self._ended.wait(max(0.0, self._taken_at + PACE_S - time.monotonic()))
        events = [first, *(self._events.get() for _ in range(self._events.qsize()))]
        self._taken_at = time.monotonic()
        return [event for _, event in joined([(self.request_id, event) for event in events])]


class _OutboxStream(Stream):
    def __init__(
        self,
        request_id: str,
        events: "queue.SimpleQueue[RequestEvent]",
        on_end: Callable[[Stream], None],
    ) -> None:
        super().__init__(request_id)
        self._events = events
        self._on_end = on_end

    def put(self, event: TokenEvent | BaseException) -> None:
        """See `Stream.put`."""
        self._events.put((self.request_id, event))
        if _is_last(event):
            self._on_end(self)


def _is_last(event: TokenEvent | BaseException) -> bool:
    return isinstance(event, BaseException) or event.result is not None
