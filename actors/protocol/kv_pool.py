"""The pages of the KV cache: which are free, which sequence has which, what each is found by."""

from collections.abc import Sequence

import numpy as np

from hotcold.actors.protocol.page_index import PageIndex
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS


def num_pages_of(num_positions: int) -> int:
    """Pages for `num_positions` of one sequence."""
    return -(-num_positions // PAGE_POSITIONS)


class KvPool:
    """Allocates slots, and pages to them as their sequences grow.

    Several sequences may have a page whose positions are full; none writes there any more. A page
    with a key stays as it is when the last of them ends: it is free, and can be found until it is
    wanted for something else. Pages freed last are allocated first, those without a key before
    those with one: the system has backed them with memory already.
    """

    def __init__(self, num_pages: int, page_tables: np.ndarray) -> None:
        """`page_tables` (slots, pages of a sequence at most) int32 is written for the services."""
        self._page_tables = page_tables
        self._free_pages = list(range(num_pages - 1, -1, -1))  # without a key; the next stands last
        self._index = PageIndex()
        self._num_users = [0] * num_pages  # sequences, and writers, of each page
        self._allocated: dict[int, list[int]] = {}

    @property
    def num_pages(self) -> int:
        """All pages."""
        return len(self._num_users)

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody has, those that can be found included."""
        return len(self._free_pages) + self._index.num_unused

    @property
    def usage(self) -> float:
        """The share of all pages that is allocated."""
        return 1 - self.num_free_pages / max(self.num_pages, 1)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the first keys, up to one that there is no page of."""
        pages: list[int] = []
        for key in keys:
            page = self._index.page(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def allocate(
        self, num_positions: int, num_spare_pages: int = 0, found: Sequence[int] = ()
    ) -> int | None:
        """The lowest free slot, with pages for `num_positions`; None where either is lacking.

        num_spare_pages: how many must be free after that
        found: pages with its first positions, from `find`
        Errors:  ValueError for more positions than a slot can ever have
        """
        num_slots = len(self._page_tables)
        free_slots = [slot for slot in range(num_slots) if slot not in self._allocated]
        num_pages = self._checked_pages(num_positions)
        num_taken = num_pages - sum(not self._index.is_unused(page) for page in found)
        if not free_slots or num_taken + num_spare_pages > self.num_free_pages:
            return None
        slot = free_slots[0]
        self._allocated[slot] = []
        for page in found:
            self._use(page)
        self._append(slot, list(found))
        self.extend(slot, num_positions)
        return slot

    def num_lacking(self, slot: int, num_positions: int) -> int:
        """Pages that a slot lacks of those for `num_positions`."""
        return max(0, num_pages_of(num_positions) - len(self._allocated[slot]))

    def extend(self, slot: int, num_positions: int) -> bool:
        """Allocate a slot the pages it lacks for `num_positions`; False where too few are free.

        Errors:  ValueError for more positions than a slot can ever have
        """
        self._checked_pages(num_positions)
        num_lacking = self.num_lacking(slot, num_positions)
        if num_lacking > self.num_free_pages:
            return False
        self._append(slot, [self._take() for _ in range(num_lacking)])
        return True

    def pages(self, slot: int) -> list[int]:
        """The pages of a slot, in the order of their positions."""
        return self._allocated[slot]

    def replace(self, slot: int, first: int, found: Sequence[int]) -> None:
        """Let pages from `find` be a slot's from its page `first` on, in place of its own."""
        own = self._allocated[slot]
        last = first + len(found)
        for page in found:
            self._use(page)
        for page in reversed(own[first:last]):
            self._release(page)
        own[first:last] = found
        self._page_tables[slot, first:last] = found

    def name(self, page: int, key: bytes) -> bool:
        """Let a page in use be found by `key`; False where another one is, or it has a key."""
        return self._index.add(key, page)

    def hold(self, key: bytes) -> int | None:
        """Keep the page of `key` from being given up until it is `let_go`; None: there is none."""
        page = self._index.page(key)
        if page is not None:
            self._use(page)
        return page

    def let_go(self, page: int) -> None:
        """What `hold` held is held no more."""
        self._release(page)

    def forget(self) -> None:
        """Let no page be found any more; sequences keep theirs."""
        self._free_pages.extend(self._index.clear())

    def copy_to(self, page_tables: np.ndarray) -> None:
        """Write the allocated pages into other page tables, too. Errors: ValueError (shapes)."""
        if page_tables.shape != self._page_tables.shape:
            raise ValueError(f"page tables of {page_tables.shape}, not {self._page_tables.shape}")
        page_tables[:] = self._page_tables

    def move(self, page_tables: np.ndarray) -> None:
        """Use other page tables from now on, after `copy_to` them."""
        self.copy_to(page_tables)
        self._page_tables = page_tables

    def free(self, slot: int) -> None:
        """Free a slot and its pages: the last ones are given up before those that begin it."""
        for page in reversed(self._allocated.pop(slot)):
            self._release(page)

    def _checked_pages(self, num_positions: int) -> int:
        num_pages, max_pages = num_pages_of(num_positions), self._page_tables.shape[1]
        if num_pages > max_pages:
            raise ValueError(f"{num_positions} positions do not fit in {max_pages} pages")
        return num_pages

    def _append(self, slot: int, pages: list[int]) -> None:
        own = self._allocated[slot]
        self._page_tables[slot, len(own) : len(own) + len(pages)] = pages
        own += pages

    def _take(self) -> int:
        """A free page, for something new."""
        page = self._free_pages.pop() if self._free_pages else self._index.give_up_oldest()
        self._num_users[page] = 1
        return page

    def _use(self, page: int) -> None:
        if not self._num_users[page]:
            self._index.use(page)
        self._num_users[page] += 1

    def _release(self, page: int) -> None:
        self._num_users[page] -= 1
        if self._num_users[page]:
            return
        if self._index.has_key(page):
            self._index.leave(page)
        else:
            self._free_pages.append(page)
