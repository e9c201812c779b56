"""Answers of a deployment's replicas, each of which another one goes on with where it must.

Tokens have the same bits in all systems of one identity. So what was handed out, and the state of
the request's random numbers, are all that another replica needs.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.serve.exceptions import RayServeException

from hotcold.actors.client import Deliver
from hotcold.actors.kv_cache.pool import namespace_key, page_keys
from hotcold.actors.protocol.failures import service_error
from hotcold.actors.protocol.messages import (
    DrawState,
    DriverLoad,
    GenerateRequest,
    Generation,
    TokenEvent,
)
from hotcold.model.errors import ServiceError
from hotcold.ui.api.cached import client
from hotcold.ui.fleet.order import Order
from hotcold.ui.fleet.turns import Turns

_MOST_LOST = 3  # replicas, one after another, that a request may lose without a new token
_AGAIN_S = 0.2
_FOUND_S = 60.0  # for who goes on with a batch's answer; its client asks anew
LOST = (ray.exceptions.RayError, RayServeException)


@dataclass
class _Answer:
    """A request, and what of its answer was handed out."""

    request: GenerateRequest
    deliver: Deliver
    identity: str = ""
    given: list[int] = field(default_factory=list)
    state: DrawState | None = None
    num_lost: int = 0  # since the last token

    def order(self) -> Order:
        """What is left of it."""
        keys = page_keys(namespace_key(b"", self.request.cache_salt), self.request.prompt_ids or ())
        begun = replace(
            self.request,
            request_id="",  # the replica's own
            is_resumable=not self.request.wants_embedding,
            given=tuple(self.given),
            state=self.state,
        )
        return Order(begun, self.identity if self.given else "", keys)

    def hand_out(self, event: TokenEvent) -> None:
        """Give an event to the reader."""
        self.given += event.token_ids
        if event.token_ids:
            self.state, self.num_lost = event.state, 0
        self.deliver(replace(event, state=None))


class FleetClient:
    """Has the methods of an `AsyncClient`; its system is a deployment of `Replica`."""

    def __init__(self, handle: Any, turns: Turns, is_batch: bool = False) -> None:
        """`handle`: of the deployment. Requests of a batch leave their places to others."""
        self._handle = handle
        self._stream = handle.options(stream=True)
        self._turns = turns
        self._is_batch = is_batch
        self._answers: dict[str, tuple[_Answer, asyncio.Task[None]]] = {}

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        """Queue a request at a replica, as `AsyncClient.submit`.

        Errors:  ApiError 429; PromptError, UsageError, ServiceError
        """
        name = request.request_id or uuid.uuid4().hex
        answer = _Answer(request, deliver)
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Serve's router takes calls in the context of one HTTP request for the same call.
        running = self._run(answer, client.get(), accepted)
        task = asyncio.create_task(running, context=Context())
        self._answers[name] = answer, task
        task.add_done_callback(lambda _: self._answers.pop(name, None))
        try:
            await accepted
        except asyncio.CancelledError:
            task.cancel()
            raise
        return name

    def cancel(self, request_id: str) -> None:
        """End a request; nothing more of it is delivered."""
        if (found := self._answers.pop(request_id, None)) is not None:
            found[1].cancel()

    def stop(self, request_id: str) -> None:
        """End a request; its result is delivered, and says that it was cancelled."""
        if (found := self._answers.pop(request_id, None)) is not None:
            answer, task = found
            task.cancel()
            num_prompt = len(answer.request.prompt_ids or ())
            nothing = Generation("", answer.given, "cancelled", num_prompt, 0.0, 0.0)
            answer.deliver(TokenEvent("", nothing))

    async def load(self, with_experts: bool = False) -> DriverLoad:
        """What all replicas together are busy with. Errors: ServiceError where there is none."""
        try:
            found = await self._handle.broadcast("status", with_experts).results_async()
        except LOST as error:
            raise ServiceError(f"no replica answers: {error}") from error
        loads: list[DriverLoad] = [load for load, _ in found]
        return replace(
            loads[0],
            num_running=sum(one.num_running for one in loads),
            num_waiting=sum(one.num_waiting for one in loads),
            kv_cache_usage=sum(one.kv_cache_usage for one in loads) / len(loads),
        )

    async def _run(self, answer: _Answer, asker: str, accepted: asyncio.Future[None]) -> None:
        """Answer a client's request to its end, by as many replicas as it takes."""

        def accept() -> None:
            if not accepted.done():
                accepted.set_result(None)

        has_ended = False
        try:
            while not has_ended:
                with suppress(TimeoutError):  # a batch's is interrupted
                    async with self._turns.turn(asker, self._is_batch):
                        while not await self._answered(answer, accept):
                            await asyncio.sleep(_AGAIN_S)
                        has_ended = True
        except Exception as error:
            if accepted.done():
                answer.deliver(error)
            else:
                accepted.set_exception(error)

    async def _answered(self, answer: _Answer, accept: Callable[[], None]) -> bool:
        """Whether a replica came to the end of an answer.

        Errors:  HotcoldError of the request; ServiceError where one replica after another is lost
        """
        stream = self._stream.answer.remote(answer.order())
        try:
            limit_s = _FOUND_S if self._is_batch and answer.given else None
            answer.identity = await asyncio.wait_for(anext(stream), limit_s)
            accept()
            async for event in stream:
                result = event.result
                if result is not None and result.finish_reason == "cancelled":
                    return False  # the replica is ending
                answer.hand_out(event)
                if result is not None:
                    return True
        except StopAsyncIteration:
            pass
        except TimeoutError:
            raise ServiceError("no replica goes on with this answer; ask again") from None
        except LOST as error:
            found = service_error("replica", error)
            if not isinstance(found, ServiceError):
                raise found from None
            answer.num_lost += 1
            if answer.num_lost >= _MOST_LOST:
                raise found from error
        finally:
            stream.cancel()
        return False
