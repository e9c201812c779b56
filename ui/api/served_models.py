"""The models of a server, and the choice of one for a request."""

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

TAG = ":latest"  # what a name without a tag has in Ollama
_ANSWER_S = 5.0  # for a driver; Prometheus waits ten seconds for all


class ServedModels:
    """All models of a server, in the order in which they were given; every route chooses here."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        """At least one, with different names; the first answers requests that name none."""
        self._backends = {backend.name: backend for backend in backends}

    @property
    def backends(self) -> list[Backend]:
        """All models, loaded or not."""
        return list(self._backends.values())

    @property
    def first(self) -> Backend:
        """The model of requests that name none."""
        return self.backends[0]

    def choose(self, request: Request, name: str | None) -> Backend:
        """The model `name`, which the access log then shows; `Backend.start` loads it.

        The name may have the tag that clients of Ollama add.
        Errors:  ApiError 404
        """
        name = self.first.name if name is None else name
        backend = self._backends.get(name) or self._backends.get(name.removesuffix(TAG))
        if backend is None:
            raise ApiError(
                404, f"model {name[:100]!a} not found; {self._names()}",
                param="model", code="model_not_found",
            )  # fmt: skip
        request.state.model = backend.name
        return backend

    def of(self, request: Request) -> Backend:
        """The model chosen for a request; the first before one was chosen."""
        return self._backends[getattr(request.state, "model", self.first.name)]

    @property
    def page_paths(self) -> dict[str, str]:
        """Path of each model's page, by the model's name."""
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
        """The answer of /health: `status` is "ok" where the drivers of all loaded models answer."""
        found = [await self._state(backend) for backend in self.backends]
        failed = [{"reason": one["reason"]} for one in found if "reason" in one]
        health: dict[str, Any] = {"status": "failed", **failed[0]} if failed else {"status": "ok"}
        health |= {name: text for name, text in found[0].items() if name in ("model", "device")}
        return health if len(found) == 1 else {**health, "models": found}

    async def _state(self, backend: Backend) -> dict[str, Any]:
        state = {"model": backend.name, "state": backend.state}
        if not backend.is_loaded:
            return state
        try:
            return {**state, "device": (await backend.client.load()).device}
        except Exception as error:
            return {**state, "state": "failed", "reason": as_api_error(error).message}

    async def metrics_text(self) -> bytes:
        """Metrics of all models for Prometheus."""
        loads = await asyncio.gather(*(_load(backend) for backend in self.backends))
        for backend, load in zip(self.backends, loads, strict=True):
            backend.metrics.show(load)
        counts = [backend.metrics for backend in self.backends]
        return await asyncio.to_thread(metrics_text, counts)  # of many experts: much text

    def _names(self) -> str:
        names = [f"{name!r}" for name in self._backends]
        return f"this is {names[0]}" if len(names) == 1 else f"these are: {', '.join(names)}"


async def _load(backend: Backend) -> DriverLoad | None:
    """The load of the model's driver; None where there is none, or it does not answer."""
    if not backend.is_loaded:
        return None
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await backend.client.load(with_experts=True)
    except (HotcoldError, TimeoutError):
        return None
