"""What a fleet decides: where a request goes, and whose is next.

Nothing here needs Ray or a clock: the fleet calls it, and so does its simulation.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.ui.fair_share import first_to_leave
from hotcold.ui.fleet.order import Speeds

AHEAD = 1  # request that waits at each replica, so that none is idle between two
# Until they are measured: of a small model.
_TOKEN_S, _ANSWER_S = 0.001, 1.0
_NEWEST = 0.2  # the weight of the last answer among those measured
_RISE = 1.02  # the most by which a token's time rises with an answer
_LEAST_TOKENS = 32  # of a prompt, for its time to be that of its tokens

Replica = TypeVar("Replica")
PageKey = TypeVar("PageKey")
Waiter = TypeVar("Waiter")


class HeldPages(Generic[Replica, PageKey]):
    """Which pages of prompts are in which replica's KV cache.

    That follows from what was sent there: pages that are used least leave.
    """

    def __init__(self) -> None:
        self._pages: dict[Replica, OrderedDict[PageKey, None]] = defaultdict(OrderedDict)
        self._begun: dict[PageKey, set[Replica]] = {}  # who has the first page of a prompt

    def add(self, replica: Replica, keys: Sequence[PageKey], most: int) -> None:
        """Note that a replica reads a prompt of these pages; its KV cache holds `most`."""
        pages = self._pages[replica]
        for key in keys:
            pages[key] = None
            pages.move_to_end(key)
        if keys:
            self._begun.setdefault(keys[0], set()).add(replica)
        while len(pages) > most:
            self._leave(pages.popitem(last=False)[0], replica)

    def forget(self, replica: Replica) -> None:
        """Note that a replica has ended."""
        for key in self._pages.pop(replica, ()):
            self._leave(key, replica)

    def count(self, replica: Replica) -> int:
        """How many pages a replica holds."""
        return len(self._pages.get(replica, ()))

    def beginnings(self, keys: Sequence[PageKey]) -> dict[Replica, int]:
        """How many of the first pages each replica holds, of those that hold one."""
        found = {}
        for replica in self._begun.get(keys[0], ()) if keys else ():
            pages = self._pages[replica]
            found[replica] = next(
                (at for at, one in enumerate(keys) if one not in pages), len(keys)
            )
        return found

    def _leave(self, key: PageKey, replica: Replica) -> None:
        if (holders := self._begun.get(key)) is not None:
            holders.discard(replica)
            if not holders:
                del self._begun[key]


def cached_tokens(num_pages: int, share_tokens: int) -> int:
    """Tokens of a prompt in its first pages, as far as prompts share them."""
    num_tokens = num_pages * PAGE_POSITIONS
    return num_tokens - num_tokens % share_tokens if share_tokens else 0


@dataclass
class ReplicaColumns:
    """What is known of some replicas.

    Shapes:  each (R,)
    Units:   seconds; 0: not measured yet
    """

    num_parallel: np.ndarray  # requests that run at once
    count: np.ndarray  # requests that run or wait there
    num_pages: np.ndarray  # that it holds
    token_s: np.ndarray  # a prompt's token that was not in the KV cache
    answer_s: np.ndarray  # a whole answer


def ranked(known: ReplicaColumns, num_tokens: np.ndarray) -> Iterator[int]:
    """The replicas, the first to begin to answer first.

    begins = requests there * seconds an answer / requests at once + tokens * seconds a token
    A replica with room begins at once, but later the more it answers: they share its time.
    Of those that begin at the same time first come those with fewest requests, then pages.
    Shapes:  num_tokens (R,): of the prompt, that its KV cache does not hold
    """
    wait_s = known.count * _filled(known.answer_s, _ANSWER_S) / known.num_parallel
    begins_s = wait_s + num_tokens * _filled(known.token_s, _TOKEN_S)
    columns = begins_s, known.count, known.num_pages
    left = np.arange(len(begins_s))
    for column in columns if len(left) else ():  # the first without sorting all
        values = column[left]
        left = left[values == values.min()]
    yield from map(int, left[:1])
    yield from (int(one) for one in np.lexsort(columns[::-1]) if one != left[0])


def _filled(seconds: np.ndarray, otherwise: float) -> np.ndarray:
    """As measured; the mean of it for those without: these are as fast as the others."""
    num_measured = np.count_nonzero(seconds)
    if num_measured == len(seconds):
        return seconds
    return np.where(
        seconds > 0, seconds, seconds.sum() / num_measured if num_measured else otherwise
    )


def measure(speeds: Speeds, num_read: int, prefill_s: float, decode_s: float) -> None:
    """Take an answer's times into a replica's speeds.

    A prompt's time has in it what others took meanwhile, so that of a token is the least: it falls
    at once, and rises slowly, should the replica become slower.
    num_read: tokens of the prompt that were computed
    """
    answer_s = prefill_s + decode_s
    before_s = speeds["answer_s"] or answer_s
    speeds["answer_s"] = before_s + _NEWEST * (answer_s - before_s)
    if num_read >= _LEAST_TOKENS:
        token_s = prefill_s / num_read
        speeds["token_s"] = min(token_s, (speeds["token_s"] or token_s) * _RISE)


class FairQueue(Generic[Waiter]):
    """Who runs and who waits, where the fleet has no room for all.

    The next is of the client with fewest running. Those of batches wait without a limit and come
    last. Beside others they run only as far as none of these waits at its replica.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._running: Counter[str] = Counter()  # by client
        self._waiting: dict[Waiter, str] = {}  # clients, in order
        self._running_batches: Counter[str] = Counter()
        self._waiting_batches: dict[Waiter, str] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait, those of batches aside."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that run, those of batches aside."""
        return self._running.total()

    def join(self, waiter: Waiter, client: str, is_batch: bool = False) -> None:
        """Let one wait."""
        (self._waiting_batches if is_batch else self._waiting)[waiter] = client

    def refuse(self) -> Waiter | None:
        """Take out whom there is no place to wait for: the newest of who has most waiting."""
        if len(self._waiting) <= self._most_waiting + self._running_batches.total():
            return None
        leaves = first_to_leave(dict(reversed(self._waiting.items())))
        del self._waiting[leaves]
        return leaves

    def give_up(self, waiter: Waiter, is_batch: bool = False) -> bool:
        """Take one out; whether it waited."""
        waiting = self._waiting_batches if is_batch else self._waiting
        return waiting.pop(waiter, None) is not None

    def end(self, client: str, is_batch: bool = False) -> None:
        """Note that a request of the client runs no more."""
        running = self._running_batches if is_batch else self._running
        running[client] -= 1
        running += Counter()  # without those that have none

    def begin(self, room: int, at_once: int) -> tuple[list[Waiter], int]:
        """Those that begin to run now, and how many of batches may go on.

        room: requests that may run; at_once: of these those that need not wait at a replica
        """
        begun = []
        while self._waiting and self.num_running + self._running_batches.total() < room:
            begun.append(_take_next(self._waiting, self._running))
        num_others = self.num_running + self.num_waiting
        most = (at_once if num_others else room) - num_others
        while self._waiting_batches and self._running_batches.total() < most:
            begun.append(_take_next(self._waiting_batches, self._running_batches))
        return begun, max(0, most)


def _take_next(waiting: dict[Waiter, str], running: Counter[str]) -> Waiter:
    found = min(waiting, key=lambda one: running[waiting[one]])
    running[waiting.pop(found)] += 1
    return found
