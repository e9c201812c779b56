"""The models of a server: which one a request means."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from hotcold.actors.protocol.messages import DriverLoad
from hotcold.model.errors import HotcoldError
from hotcold.ui.api.backend import Backend
from hotcold.ui.api.embeddings import POOLING
from hotcold.ui.api.errors import ApiError, as_api_error
from hotcold.ui.api.metrics import metrics_text

_ANSWER_S = 5.0  # for a driver; Prometheus waits ten seconds for all


class ServedModels:
    """All that a server has, in the order in which it was given them; every route asks here."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        """One at least, each with a name of its own; the first is that of requests without one."""
        self._backends = {backend.name: backend for backend in backends}

    @property
    def backends(self) -> list[Backend]:
        """Those of all models, loaded or not."""
        return list(self._backends.values())

    @property
    def first(self) -> Backend:
        """That of requests which name no model."""
        return self.backends[0]

    def choose(self, request: Request, name: str | None) -> Backend:
        """The model `name` that a request asks for, which the access log then knows.

        Nothing has to be loaded for it: `Backend.start` sees to that.
        Errors:  ApiError 404
        """
        name = self.first.name if name is None else name
        backend = self._backends.get(name)
        if backend is None:
            raise ApiError(
                404, f"the model {name[:100]!a} is not served; {self._told()}",
                param="model", code="model_not_found",
            )  # fmt: skip
        request.state.model = backend.name
        return backend

    def of(self, request: Request) -> Backend:
        """The model that a request has chosen; the first where it has not come so far."""
        return self._backends[getattr(request.state, "model", self.first.name)]

    @property
    def page_paths(self) -> dict[str, str]:
        """Where the page of each model is, by its name."""
        paths = {self.first.name: "/"}
        for number, backend in enumerate(self.backends[1:], 2):
            plain = re.sub(r"[^\w.-]+", "-", backend.name, flags=re.ASCII)
            paths[backend.name] = f"/model/{number}-{plain}/"
        return paths

    def listed(self, backend: Backend) -> dict[str, Any]:
        """A model as OpenAI's API lists it."""
        prompts = backend.prompts
        return {
            "id": backend.name,
            "object": "model",
            "created": backend.created_at,
            "owned_by": "hotcold",
            "max_model_len": prompts.context_length,
            "embedding": {"size": prompts.config.hidden_size, "pooling": POOLING},
        }

    async def health(self) -> dict[str, Any]:
        """Its `status` is "ok" where every driver answers whose model is loaded.

        Beside it stands the first model; where there are several, the state of each.
        """
        found = [await self._state(backend) for backend in self.backends]
        failed = [{"reason": one["reason"]} for one in found if "reason" in one]
        told: dict[str, Any] = {"status": "failed", **failed[0]} if failed else {"status": "ok"}
        told |= {name: text for name, text in found[0].items() if name in ("model", "device")}
        return told if len(found) == 1 else {**told, "models": found}

    async def _state(self, backend: Backend) -> dict[str, Any]:
        told = {"model": backend.name, "state": backend.state}
        if not backend.is_loaded:
            return told
        try:
            return {**told, "device": (await backend.client.load()).device}
        except Exception as error:
            return {**told, "state": "failed", "reason": as_api_error(error).message}

    async def metrics_text(self) -> bytes:
        """Counts of all models for Prometheus, also of those whose drivers do not answer."""
        loads = await asyncio.gather(*(_load(backend) for backend in self.backends))
        for backend, load in zip(self.backends, loads, strict=True):
            backend.metrics.show(load)
        return metrics_text([backend.metrics for backend in self.backends])

    def _told(self) -> str:
        names = [f"{name!r}" for name in self._backends]
        return f"this is {names[0]}" if len(names) == 1 else f"these are: {', '.join(names)}"


async def _load(backend: Backend) -> DriverLoad | None:
    """What the model's driver is busy with; None where there is none, or it does not answer."""
    if not backend.is_loaded:
        return None
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await backend.client.load()
    except (HotcoldError, TimeoutError):
        return None
