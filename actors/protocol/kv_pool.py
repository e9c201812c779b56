"""The pages of the KV cache: which are free, and which sequence has which."""

import numpy as np

from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS


def num_pages_of(num_positions: int) -> int:
    """Pages for `num_positions` of one sequence."""
    return -(-num_positions // PAGE_POSITIONS)


class KvPool:
    """Allocates slots, and pages to them as their sequences grow.

    Pages freed last are allocated first: the system has backed them with memory already.
    """

    def __init__(self, num_pages: int, page_tables: np.ndarray) -> None:
        """`page_tables` (slots, pages of a sequence at most) int32 is written for the services."""
        self._page_tables = page_tables
        self._free_pages = list(range(num_pages - 1, -1, -1))  # the next one stands last
        self._allocated: dict[int, list[int]] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages of no slot."""
        return len(self._free_pages)

    @property
    def usage(self) -> float:
        """The share of all pages that is allocated."""
        num_allocated = sum(map(len, list(self._allocated.values())))
        return num_allocated / max(num_allocated + len(self._free_pages), 1)

    def allocate(self, num_positions: int, num_spare_pages: int = 0) -> int | None:
        """The lowest free slot, with pages for `num_positions`; None where either is lacking.

        num_spare_pages: how many must be free after that
        Errors:  ValueError for more positions than a slot can ever have
        """
        num_slots = len(self._page_tables)
        free_slots = [slot for slot in range(num_slots) if slot not in self._allocated]
        num_pages = self._checked_pages(num_positions)
        if not free_slots or num_pages + num_spare_pages > len(self._free_pages):
            return None
        self._allocated[free_slots[0]] = []
        self.extend(free_slots[0], num_positions)
        return free_slots[0]

    def num_lacking(self, slot: int, num_positions: int) -> int:
        """Pages that a slot lacks of those for `num_positions`."""
        return max(0, num_pages_of(num_positions) - len(self._allocated[slot]))

    def extend(self, slot: int, num_positions: int) -> bool:
        """Allocate a slot the pages it lacks for `num_positions`; False where too few are free.

        Errors:  ValueError for more positions than a slot can ever have
        """
        pages, num_pages = self._allocated[slot], self._checked_pages(num_positions)
        first, num_lacking = len(pages), self.num_lacking(slot, num_positions)
        if num_lacking > len(self._free_pages):
            return False
        pages += [self._free_pages.pop() for _ in range(num_lacking)]
        self._page_tables[slot, first:num_pages] = pages[first:]
        return True

    def _checked_pages(self, num_positions: int) -> int:
        num_pages, max_pages = num_pages_of(num_positions), self._page_tables.shape[1]
        if num_pages > max_pages:
            raise ValueError(f"{num_positions} positions do not fit in {max_pages} pages")
        return num_pages

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
        """Free a slot and its pages."""
        self._free_pages.extend(reversed(self._allocated.pop(slot)))
