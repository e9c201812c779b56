"""Responses that later requests continue, by `previous_response_id`: in memory, for a while."""

from __future__ import annotations

import time
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from pydantic_core import from_json, to_json

from hotcold.ui.api.cached import client
from hotcold.ui.api.errors import ApiError

MOST = 1000  # responses, of all clients
MOST_BYTES = 64 << 20
MOST_S = 24 * 3600.0  # since the last use
_BYTES_BESIDE = 1000  # of a response: its objects
Item = dict[str, Any]


class Turn:
    """A kept response with the request's own items, after the turn that it continues."""

    def __init__(self, previous: Turn | None, given: bytes, response: Item) -> None:
        """`given`: the JSON of the request's own items."""
        self._previous = previous
        self._given = given
        self.response = to_json(response)
        self.item_ids = [item["id"] for item in response["output"]]
        self.num_bytes = len(given) + len(self.response) + _BYTES_BESIDE

    @property
    def input(self) -> list[Item]:
        """All items before the answer, those of earlier turns included."""
        turns: list[Turn] = []
        before = self._previous
        while before is not None:
            turns.append(before)
            before = before._previous
        earlier = [item for turn in reversed(turns) for item in (*turn._own, *turn.output)]
        return [*earlier, *self._own]

    @property
    def output(self) -> list[Item]:
        """The answer's items."""
        return list(from_json(self.response)["output"])

    @property
    def _own(self) -> list[Item]:
        return list(from_json(self._given))


class KeptResponses:
    """The responses kept for all clients; each finds its own alone.

    Those used last stay, within a number, bytes and a time. Where all have too many, the client
    that has most loses its oldest, so none pushes out those of a client that has fewer. One that is
    forgotten is found no more; what continues it holds its items, and their bytes count until
    nothing holds them. A request that runs holds none: where what it continues is forgotten
    meanwhile, its own response is not kept.
    """

    def __init__(
        self,
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
        most_s: float = MOST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` counts seconds."""
        self._most, self._most_bytes, self._most_s = most, most_bytes, most_s
        self._clock = clock
        # By client, then by id, those used last at the end; and when each was used.
        self._turns: defaultdict[str, OrderedDict[str, tuple[Turn, float]]]
        self._turns = defaultdict(OrderedDict)
        self._by_item: dict[tuple[str, str], Turn] = {}
        self._held: Counter[str] = Counter()  # bytes by client
        self._released: list[tuple[str, int]] = []  # of turns that ended, in any thread

    def __len__(self) -> int:
        """How many are found."""
        return sum(map(len, self._turns.values()))

    @property
    def num_bytes(self) -> int:
        """The bytes of all that is held, found or not."""
        while self._released:
            owner, num_bytes = self._released.pop()
            self._held[owner] -= num_bytes
        return self._held.total()

    def add(self, response_id: str, turn: Turn) -> None:
        """Keep a new turn of this context's client."""
        owner = client.get()
        self._held[owner] += turn.num_bytes
        ended = (owner, turn.num_bytes)
        weakref.finalize(turn, self._released.append, ended).atexit = False
        self._turns[owner][response_id] = (turn, self._clock())
        self._by_item |= {(owner, item_id): turn for item_id in turn.item_ids}
        self._forget_old()

    def get(self, response_id: str) -> Turn | None:
        """This client's turn of that id, which stays for longer now; None: there is none."""
        self._forget_old()
        own = self._turns[client.get()]
        if response_id not in own:
            return None
        turn, _ = own[response_id]
        own[response_id] = (turn, self._clock())
        own.move_to_end(response_id)
        return turn

    def found(self, response_id: str) -> Turn:
        """As `get`. Errors: ApiError 404."""
        turn = self.get(response_id)
        if turn is None:
            raise ApiError(404, f"Response with id {response_id[:100]!a} not found.")
        return turn

    def continued(self, response_id: str) -> Turn:
        """As `get`. Errors: ApiError 400 with OpenAI's code, by which agents send all again."""
        turn = self.get(response_id)
        if turn is None:
            raise ApiError(
                400, f"Previous response with id {response_id[:100]!a} not found.",
                param="previous_response_id", code="previous_response_not_found",
            )  # fmt: skip
        return turn

    def holder(self, item_id: str) -> Turn:
        """The turn whose answer has that item, of those found. Errors: ApiError 404."""
        self._forget_old()
        turn = self._by_item.get((client.get(), item_id))
        if turn is None:
            text = f"Item with id {item_id[:100]!a} not found; send the item itself."
            raise ApiError(404, text, param="input")
        return turn

    def remove(self, response_id: str) -> None:
        """Forget this client's response of that id. Errors: ApiError 404."""
        self.found(response_id)
        self._forget(client.get(), response_id)

    def _forget_old(self) -> None:
        oldest = self._clock() - self._most_s
        for owner, turns in self._turns.items():
            while turns and next(iter(turns.values()))[1] < oldest:
                self._forget(owner, next(iter(turns)))
        self._forget_most(lambda: len(self) > self._most, lambda owner: len(self._turns[owner]))
        self._forget_most(lambda: self.num_bytes > self._most_bytes, self._held.__getitem__)

    def _forget_most(self, is_over: Callable[[], bool], held: Callable[[str], int]) -> None:
        """Forget the oldest of the client that has most by `held` while there are too many."""
        while is_over():
            owner = max(self._turns, key=held)
            if not self._turns[owner]:
                return  # some are being read, for a moment
            self._forget(owner, next(iter(self._turns[owner])))

    def _forget(self, owner: str, response_id: str) -> None:
        turn, _ = self._turns[owner].pop(response_id)
        for item_id in turn.item_ids:
            del self._by_item[owner, item_id]
