"""A replica: one whole system, in a deployment of its model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray

from hotcold.actors.client import AsyncClient
from hotcold.actors.launch import prepare_in_cluster
from hotcold.actors.processes.cluster import bundle_nodes, look_for_own_modules
from hotcold.actors.protocol.messages import DriverLoad, Generation, TokenEvent
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.system import System
from hotcold.model.errors import HotcoldError, ServiceError
from hotcold.model.files.locate import locate_model
from hotcold.ui.fleet.order import Facts, Identity, Order, Speeds
from hotcold.ui.fleet.policy import measure


class Replica:
    """Answers orders by its system, and ends where that has ended: Serve starts another one."""

    def __init__(self, model: str | None, options: SystemOptions) -> None:
        """Load `model`, with any `hosts` on the placement group's nodes. Errors: HotcoldError."""
        look_for_own_modules()
        self._group = ray.util.get_current_placement_group()
        if options.hosts:
            options = replace(options, hosts=bundle_nodes(self._group))
        self._hosts = options.hosts
        self._system = System.start(prepare_in_cluster(locate_model(model), options, print))
        self._client = AsyncClient(self._system)
        identity, share_tokens, num_pages = self._system.call("identity")
        self._facts = Facts(
            identity=identity,
            share_tokens=share_tokens,
            num_pages=num_pages,
            num_parallel=self._system.call("describe").max_batch,
        )
        self._speeds = Speeds(token_s=0.0, answer_s=0.0)
        self._is_cold = True  # the first answer is slower than any other

    async def answer(self, order: Order) -> AsyncGenerator[Identity | TokenEvent, None]:
        """Its identity, once the request is queued; then the events of `Driver.generate`.

        Errors:  HotcoldError of the request
        """
        events: asyncio.Queue[TokenEvent | BaseException] = asyncio.Queue()
        request_id = ""
        try:
            request_id = await self._client.submit(order.request, events.put_nowait)
            yield self._facts["identity"]
            while True:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                if event.result is not None:
                    self._measure(event.result)
                yield event
                if event.result is not None:
                    return
        except ServiceError:
            await self.check_health()
            raise
        finally:
            self._client.cancel(request_id)

    def _measure(self, result: Generation) -> None:
        if self._is_cold:
            self._is_cold = False
            return
        num_read = result.num_prompt_tokens - result.num_cached_tokens
        measure(self._speeds, num_read, result.prefill_s, result.decode_s)

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the driver by name. Errors: HotcoldError."""
        return await asyncio.to_thread(self._system.call, method, *args)

    async def status(self, with_experts: bool = False) -> tuple[DriverLoad, dict[str, int]]:
        """What the system is busy with, and process ids by name. Errors: ServiceError."""
        processes = await self.call("processes")
        return await self._client.load(with_experts), {"replica": os.getpid(), **processes}

    async def check_health(self) -> None:
        """End this process where the system or a node of it has ended: who waits goes elsewhere."""
        try:
            await self._client.load()
        except ServiceError:
            os._exit(1)
        # Ray makes a lost node's bundle anew elsewhere.
        if self._hosts and await asyncio.to_thread(bundle_nodes, self._group) != self._hosts:
            os._exit(1)

    def record_replica_metadata(self) -> Facts:
        """What the router chooses by; Serve asks once."""
        return self._facts

    def record_routing_stats(self) -> Speeds:
        """What else it chooses by; Serve asks now and then."""
        return self._speeds

    def __del__(self) -> None:
        """End the system; Serve calls it once the last request is answered."""
        with suppress(HotcoldError, AttributeError):
            self._system.end()
