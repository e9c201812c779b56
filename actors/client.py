"""A running system as an asyncio server sees it: many requests, one stream of their events."""

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from typing import Any

import ray

from hotcold.actors.exchange.pulse import DRIVER_POLLS, POLL_S
from hotcold.actors.protocol.failures import service_error
from hotcold.actors.protocol.messages import DriverLoad, GenerateRequest, ReaderEpoch, TokenEvent
from hotcold.actors.system import System
from hotcold.model.errors import HotcoldError

_WAIT_S = 1.0  # the longest that the driver keeps a request for events open
# Unanswered polls after which the driver counts as stuck.
_TIMEOUT_POLLS = round(_WAIT_S / POLL_S) + DRIVER_POLLS

Deliver = Callable[[TokenEvent | BaseException], None]


class AsyncClient:
    """Takes the events of all requests from one driver, in one call while there are any.

    Each client belongs to one event loop.
    """

    def __init__(self, system: System) -> None:
        """`system` must outlive the client."""
        self._system = system
        self._epoch = ReaderEpoch(uuid.uuid4().hex)
        self._num_taken = 0  # of what the driver hands out, the last that has come
        self._readers: dict[str, Deliver] = {}
        self._taking: asyncio.Task[None] | None = None
        self._failure: Exception | None = None  # what ended the last `_take`

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        """Queue a request; returns its id, by which it can be cancelled: its own, or a new one.

        `deliver` is called in this loop with each event, the last of which has a result, or with
        the RequestError or ServiceError that ends them.
        Errors:  PromptError, UsageError, ServiceError
        """
        name = request.request_id or uuid.uuid4().hex
        request = replace(request, request_id=name)
        self._readers[name] = deliver
        if self._taking is None or self._taking.done():
            # Within no call of Ray's: it cancels what a cancelled one has begun.
            self._taking = asyncio.create_task(self._take(), context=Context())
        submitting = asyncio.ensure_future(
            _answer(self._system.begin("submit", self._epoch, request))
        )
        try:
            # The other task checks that the driver lives.
            await asyncio.wait({submitting, self._taking}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None and not submitting.done():
                raise self._failure
            await submitting
        except asyncio.CancelledError:
            submitting.add_done_callback(lambda done: self._forget(name, done))
            raise
        except BaseException:
            self._readers.pop(name, None)
            raise
        return name

    def cancel(self, request_id: str) -> None:
        """End a request within a token, if it has not ended; nothing more of it is delivered.

        Its last event is taken all the same, or the driver would wait for that to be read.
        """
        if request_id in self._readers:
            self._readers[request_id] = lambda event: None
            self.stop(request_id)

    def stop(self, request_id: str) -> None:
        """End a request within a token; its result is delivered, and says that it was cancelled."""
        if request_id in self._readers:
            with suppress(HotcoldError, ray.exceptions.RayError):
                self._system.cancel(request_id)

    def _forget(self, request_id: str, submitted: asyncio.Future[None]) -> None:
        """End a request whose submitter was cancelled, once it is queued or refused."""
        if not submitted.cancelled() and submitted.exception() is None:
            self.cancel(request_id)
        else:
            self._readers.pop(request_id, None)

    async def load(self, with_experts: bool = False) -> DriverLoad:
        """What the driver is busy with, as `Driver.load`. Errors: ServiceError."""
        load: DriverLoad = await _answer_soon(self._system.begin("driver_load", with_experts))
        return load

    async def _take(self) -> None:
        """Deliver events until no request is left; an error ends all of them."""
        self._failure = None
        try:
            while self._readers:
                asked = self._system.begin("take_events", self._epoch, self._num_taken, _WAIT_S)
                self._num_taken, events = await _answer_soon(asked)
                for request_id, event in events:
                    self._deliver(request_id, event)
        except Exception as error:
            self._failure = error
            self._new_epoch()
            for request_id in list(self._readers):
                self._deliver(request_id, error)

    def _new_epoch(self) -> None:
        """Give up all that was submitted; a driver that recovers is told so."""
        self._epoch = replace(self._epoch, number=self._epoch.number + 1)
        self._num_taken = 0
        with suppress(HotcoldError, ray.exceptions.RayError):
            self._system.begin("attend", self._epoch)

    def _deliver(self, request_id: str, event: TokenEvent | BaseException) -> None:
        deliver = self._readers.get(request_id)
        if deliver is not None:
            if isinstance(event, BaseException) or event.result is not None:
                del self._readers[request_id]
            deliver(event)


async def _answer(ref: Any) -> Any:
    """What a call returned. Errors: HotcoldError."""
    try:
        return await ref
    except ray.exceptions.RayError as error:
        raise service_error("driver", error) from error


async def _answer_soon(ref: Any) -> Any:
    """What a call returned, which a live driver answers soon. Errors: HotcoldError."""
    answering = asyncio.ensure_future(_answer(ref))
    for _ in range(_TIMEOUT_POLLS):
        if (await asyncio.wait({answering}, timeout=POLL_S))[0]:
            return answering.result()
    answering.cancel()
    raise service_error("driver", ray.exceptions.GetTimeoutError())
