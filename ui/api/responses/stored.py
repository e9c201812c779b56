"""Responses that later requests continue, by `previous_response_id`: in memory, for a while."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, NamedTuple

from pydantic_core import from_json

from hotcold.ui.api.cached import client
from hotcold.ui.api.errors import ApiError
from hotcold.ui.fair_share import first_to_leave

MOST = 1000  # responses, of all clients
MOST_BYTES = 64 << 20
MOST_S = 24 * 3600.0  # since the last use
_BYTES_BESIDE = 1000  # of a response: its objects


class StoredResponse(NamedTuple):
    """A response with the whole conversation that it answers, each as JSON."""

    items: bytes
    response: bytes
    item_ids: frozenset[str]  # of its answer
    used_at: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Those that it takes."""
        return len(self.items) + len(self.response) + _BYTES_BESIDE

    @property
    def output(self) -> list[dict[str, Any]]:
        """The answer's items."""
        return list(from_json(self.response)["output"])


class StoredResponses:
    """The responses stored for all clients; each finds its own alone.

    Those used last stay, within a number, bytes and a time. Where all have too many, the client
    that has most loses its oldest, so none pushes out those of a client that has fewer. Each holds
    its whole conversation: what continues one that is forgotten stays whole.
    """

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        # By client and id, those used last at the end.
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    def add(self, response_id: str, stored: StoredResponse) -> None:
        """Keep a new response of this context's client."""
        self._stored[client.get(), response_id] = stored._replace(used_at=time.monotonic())
        self._forget_old()

    def found(self, response_id: str) -> StoredResponse:
        """This client's response of that id, which stays for longer now. Errors: ApiError 404."""
        self._forget_old()
        key = client.get(), response_id
        if key not in self._stored:
            raise ApiError(404, f"Response with id {response_id[:100]!a} not found.")
        self._stored[key] = found = self._stored.pop(key)._replace(used_at=time.monotonic())
        return found

    def continued(self, response_id: str) -> StoredResponse:
        """As `found`. Errors: ApiError 400 with OpenAI's code, by which agents send all again."""
        try:
            return self.found(response_id)
        except ApiError as error:
            raise ApiError(
                400, f"Previous {error.message[0].lower()}{error.message[1:]}",
                param="previous_response_id", code="previous_response_not_found",
            ) from None  # fmt: skip

    def own(self) -> list[StoredResponse]:
        """All of this client's."""
        self._forget_old()
        return [stored for (owner, _), stored in self._stored.items() if owner == client.get()]

    def remove(self, response_id: str) -> None:
        """Forget this client's response of that id. Errors: ApiError 404."""
        self.found(response_id)
        del self._stored[client.get(), response_id]

    def _forget_old(self) -> None:
        oldest = time.monotonic() - MOST_S
        while self._stored and next(iter(self._stored.values())).used_at < oldest:
            self._stored.popitem(last=False)
        while len(self._stored) > self._most:
            del self._stored[first_to_leave(self._owners)]
        while sum(one.num_bytes for one in self._stored.values()) > self._most_bytes:
            del self._stored[first_to_leave(self._owners, lambda key: self._stored[key].num_bytes)]

    @property
    def _owners(self) -> dict[tuple[str, str], str]:
        return {key: key[0] for key in self._stored}
