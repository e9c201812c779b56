"""The door: the server's own application, whose models are deployments of replicas."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import httpx
from starlette.types import ASGIApp

from hotcold.actors.processes.cluster import look_for_own_modules
from hotcold.model.errors import HotcoldError
from hotcold.ui.access_log import AccessLog
from hotcold.ui.api.backend import Backend, ServerSettings
from hotcold.ui.api.cached import client
from hotcold.ui.api.served_models import ServedModels
from hotcold.ui.app import create_app
from hotcold.ui.fleet.arguments import FleetArgs
from hotcold.ui.fleet.backend import FleetBackend
from hotcold.ui.fleet.client import FleetClient
from hotcold.ui.fleet.models import FleetModel
from hotcold.ui.fleet.turns import Turns, at_once, places
from hotcold.ui.gate import Gate
from hotcold.ui.page.late_page import late_pages

_NO_LIMIT = 1 << 30  # of the backend's own queue: `Turns` has the limit
_BATCH_S = 24 * 3600.0  # for an answer of a batch, in which it waits for others


class Door:
    """The ingress deployment."""

    def __init__(
        self, models: Sequence[tuple[FleetModel, Any]], args: FleetArgs, keys: Sequence[str]
    ) -> None:
        """`models`: each with its deployment's handle; `keys`: one of them is required."""
        look_for_own_modules()
        self._models, self._args, self._keys = models, args, keys
        self._batch_backends: list[Backend] = []

    async def _backend(self, model: FleetModel, handle: Any) -> Backend:
        args, deployment, may_leave = self._args, handle.deployment_name, not self._args.replicas
        limits = ServerSettings(model.name, _NO_LIMIT, args.max_tokens_limit, args.request_timeout)
        # Where there is no replica some wait within Serve, which loads the model for them.
        least = model.system.max_batch if may_leave else 0
        turns = Turns(
            lambda: places.get(deployment, 0) or least,
            args.queue,
            lambda: at_once.get(deployment, 0) or least,
        )
        backend = FleetBackend(model.system, limits)
        backend.handle, backend.may_leave = handle, may_leave
        backend.attach(None, FleetClient(handle, turns))
        with suppress(HotcoldError):  # the first call learns how many replicas there are
            await backend.client.load()
        batches = copy.copy(backend)  # with the same counts of tokens
        batches.settings = replace(limits, request_timeout_s=_BATCH_S)
        batches.attach(None, FleetClient(handle, turns, is_batch=True))
        self._batch_backends.append(batches)
        return backend

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """The application; Serve calls it."""
        args = self._args
        models = ServedModels([await self._backend(*one) for one in self._models])
        app: Any = Gate(
            create_app(models, late_pages(models) if args.page and args.doors == 1 else None),
            keys=self._keys,
            local=True,  # without keys
            max_body_bytes=ServerSettings.max_body_bytes,
            origins=args.origins,
        )
        if args.log != "none":
            app = AccessLog(app, args.log, partial(print, file=sys.stderr, flush=True))
        return app

    @cached_property
    def _batches(self) -> httpx.AsyncClient:
        """The same routes for batches, within this process; made for the first of them."""
        app: Any = create_app(ServedModels(self._batch_backends))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://door", timeout=None)

    async def answer(self, batch: str, url: str, body: bytes) -> tuple[int, bytes, int]:
        """Answer a request of a batch by the same routes: status, body, places of the fleet.

        batch: its name; it has nothing in common with others, as clients' keys have not
        """
        client.set(f"batch {batch}")
        headers = {"Content-Type": "application/json"}
        answer = await self._batches.post(url, content=body, headers=headers)
        return answer.status_code, answer.content, sum(places.values())
