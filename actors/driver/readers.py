"""Those who read what requests produce, in other processes: what ends when one of them does.

A reader that was silent for a minute has died, or might as well have: what it asked for is
cancelled. A reader that has given up on the driver, because that was stopped for a while, begins a
new epoch: what it asked for before is cancelled too, and nothing of it is handed out any more.
"""

import threading
from contextlib import suppress

from hotcold.actors.driver.active_request import Stream
from hotcold.actors.driver.request_events import EventQueue, RequestEvent
from hotcold.actors.protocol.failures import RequestError
from hotcold.actors.protocol.messages import ReaderEpoch

POLL_S = 1.0  # between two looks
# Silent looks at which a reader counts as gone. Looks are counted, not seconds: time in which all
# processes are stopped is no silence.
TIMEOUT_POLLS = 60


class Reader:
    """One epoch of a reader: the streams that it reads, and events that it has not had."""

    def __init__(self, epoch: int = 0) -> None:
        """Nothing is read yet."""
        self.epoch = epoch
        self.has_ended = False
        self.num_silent = 0  # looks since it was last heard
        self.events = EventQueue()
        self._streams: list[Stream] = []
        self._changing = threading.Lock()
        self._taking = threading.Lock()
        self._handed_out: tuple[int, list[RequestEvent]] = (0, [])

    def add(self, stream: Stream) -> None:
        """It reads this stream until `remove`."""
        with self._changing:
            self._streams.append(stream)
            if self.has_ended:
                stream.cancelled.set()

    def remove(self, stream: Stream) -> None:
        """It has ended."""
        self._streams.remove(stream)

    def take(self, num_taken: int, wait_s: float) -> tuple[int, list[RequestEvent]]:
        """The next events, and the number by which a later call says that they have come.

        Until one does, the same events are handed out. See `EventQueue.take`.
        """
        with self._taking:
            if self._handed_out[0] <= num_taken:
                events = self.events.take(wait_s)
                self._handed_out = (num_taken + bool(events), events)
            return self._handed_out

    def end(self) -> None:
        """Cancel what it reads."""
        with self._changing:
            self.has_ended = True
            for stream in list(self._streams):
                stream.cancelled.set()


class Readers:
    """All readers by their names."""

    def __init__(self) -> None:
        self._readers: dict[str, Reader] = {}
        self._changing = threading.Lock()

    def hear(self, epoch: ReaderEpoch) -> Reader:
        """The reader lives, in this epoch; earlier ones of it end.

        Errors:  RequestError where this one has ended
        """
        with self._changing:
            reader = self._readers.get(epoch.name)
            if reader is not None and (
                epoch.number < reader.epoch or (epoch.number == reader.epoch and reader.has_ended)
            ):
                raise RequestError("nobody read this answer for a while; ask again")
            if reader is None or reader.epoch < epoch.number:
                if reader is not None:
                    reader.end()
                reader = self._readers[epoch.name] = Reader(epoch.number)
            reader.num_silent = 0
            return reader

    def attend(self, epoch: ReaderEpoch) -> None:
        """As `hear`, of a reader that may have ended, or has never asked for anything."""
        with suppress(RequestError):
            self.hear(epoch)

    def forget(self, name: str) -> None:
        """This reader has all that it wanted."""
        with self._changing:
            self._readers.pop(name, None)

    def look(self) -> None:
        """End those that have been silent for too long; those that want nothing are forgotten."""
        with self._changing:
            for name, reader in list(self._readers.items()):
                reader.num_silent += 1
                if reader.num_silent < TIMEOUT_POLLS:
                    continue
                if reader.events.is_idle and not reader.has_ended:
                    del self._readers[name]
                else:
                    reader.end()
