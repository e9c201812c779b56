"""The pages of the KV cache: which are free, and which sequence has which."""

import numpy as np

from numba_kernels.decode.attention import PAGE_POSITIONS


def num_pages_of(num_positions: int) -> int:
    """Pages that hold so many positions of one sequence."""
    return -(-num_positions // PAGE_POSITIONS)


class KvPool:
    """Lends slots, and pages to them. A sequence gets all pages that it can need at once.

    So nothing that runs ever lacks a page or loses one. Pages freed last are lent first: their
    memory has been taken from the system already.
    """

    def __init__(self, num_pages: int, page_tables: np.ndarray) -> None:
        """`page_tables` (slots, most pages of a sequence) int32 is written for the services."""
        self._page_tables = page_tables
        self._free_pages = list(range(num_pages - 1, -1, -1))  # the next one stands last
        self._lent: dict[int, list[int]] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that no slot has."""
        return len(self._free_pages)

    @property
    def usage(self) -> float:
        """The share of all pages that is lent."""
        num_lent = sum(map(len, list(self._lent.values())))
        return num_lent / max(num_lent + len(self._free_pages), 1)

    def take(self, num_positions: int) -> int | None:
        """The lowest free slot, with pages for `num_positions`; None where either is lacking.

        Errors:  ValueError for more positions than a slot can ever have
        """
        num_pages, (num_slots, most_pages) = num_pages_of(num_positions), self._page_tables.shape
        if num_pages > most_pages:
            raise ValueError(f"{num_positions} positions do not fit in {most_pages} pages")
        free_slots = [slot for slot in range(num_slots) if slot not in self._lent]
        if not free_slots or num_pages > len(self._free_pages):
            return None
        slot, pages = free_slots[0], [self._free_pages.pop() for _ in range(num_pages)]
        self._lent[slot] = pages
        self._page_tables[slot, :num_pages] = pages
        return slot

    def copy_to(self, page_tables: np.ndarray) -> None:
        """Write what is lent into other page tables too. Errors: ValueError for other shapes."""
        if page_tables.shape != self._page_tables.shape:
            raise ValueError(f"page tables of {page_tables.shape}, not {self._page_tables.shape}")
        page_tables[:] = self._page_tables

    def move(self, page_tables: np.ndarray) -> None:
        """Write into other page tables from now on, after what is lent."""
        self.copy_to(page_tables)
        self._page_tables = page_tables

    def give_back(self, slot: int) -> None:
        """Free a slot and its pages."""
        self._free_pages.extend(reversed(self._lent.pop(slot)))
