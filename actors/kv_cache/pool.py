"""The pages of the KV cache: which are free, which sequence has which, what each is found by.

Layers without and with a window have pages of their own (groups FULL and WINDOWED of the page
tables). A sequence keeps all pages of the first, and of the second those that its next tokens see.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.numba_kernels.loops.mailbox import FULL

_KEY_BYTES = 16
Page = tuple[int, ...]  # 64 positions: one of layers without a window, and one of those with it


def num_pages_of(num_positions: int) -> int:
    """Pages for `num_positions` of one sequence."""
    return -(-num_positions // PAGE_POSITIONS)


@dataclass(frozen=True)
class Window:
    """What a sequence has pages for in layers with a window.

    size: positions that a token sees at most, its own included
    step: tokens of the sequence that are computed at once, at most
    """

    size: int
    step: int

    @property
    def num_pages(self) -> int:
        """Pages that a sequence has at most: they hold a window and a step, wherever it begins."""
        return num_pages_of(self.size + self.step - 2) + 1


def namespace_key(identity: bytes, salt: str) -> bytes:
    """The key before a prompt's first page: who computes, and for whom. 16 bytes."""
    content = identity + salt.encode("utf-8", "surrogatepass")  # JSON may hold lone surrogates
    return hashlib.blake2b(content, digest_size=_KEY_BYTES).digest()


def page_keys(namespace: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """A key of 16 bytes for each whole page: of its 64 tokens, and the key before it."""
    ids = np.asarray(token_ids, "<i4")
    keys, key = list[bytes](), namespace
    for first in range(0, ids.size - PAGE_POSITIONS + 1, PAGE_POSITIONS):
        content = ids[first : first + PAGE_POSITIONS].tobytes()
        key = hashlib.blake2b(key + content, digest_size=_KEY_BYTES).digest()
        keys.append(key)
    return keys


class PageIndex:
    """Pages by key. Those that no sequence has stay until they are given up, oldest use first."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._unused: dict[int, None] = {}  # pages, in the order of their last use

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def page(self, key: bytes) -> int | None:
        """The page of a key."""
        return self._pages.get(key)

    def has_key(self, page: int) -> bool:
        """Whether the page can be found."""
        return page in self._keys

    @property
    def num_unused(self) -> int:
        """Pages with a key that no sequence has."""
        return len(self._unused)

    def is_unused(self, page: int) -> bool:
        """Whether no sequence has the page, which has a key."""
        return page in self._unused

    def add(self, key: bytes, page: int) -> bool:
        """Let a page be found, unless another one holds the same; says whether it will be."""
        if key in self._pages or page in self._keys:
            return False
        self._pages[key] = page
        self._keys[page] = key
        return True

    def use(self, page: int) -> None:
        """A sequence has the page again."""
        del self._unused[page]

    def leave(self, page: int) -> None:
        """No sequence has the page any more."""
        self._unused[page] = None

    def evict_oldest(self) -> int:
        """The page that has been unused longest; it is found no more."""
        page = next(iter(self._unused))
        del self._unused[page]
        del self._pages[self._keys.pop(page)]
        return page

    def clear(self) -> list[int]:
        """Find nothing any more; returns the pages that no sequence has."""
        unused = list(self._unused)
        for found in (self._pages, self._keys, self._unused):
            found.clear()
        return unused


@dataclass
class _Held:
    """The pages of a slot, in the order of positions, from the sequence's page `first` on."""

    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)

    def at(self, index: int) -> int | None:
        return self.pages[index - self.first] if self.first <= index < self.end else None


class _Group:
    """The pages of all layers with a window, or of all without."""

    def __init__(self, num_pages: int, window: Window | None) -> None:
        self.num_pages = num_pages
        self.index = PageIndex()
        self.held: dict[int, _Held] = {}
        self._window = window
        self._free_pages = list(range(num_pages - 1, -1, -1))  # without a key; the next stands last
        self._num_users = [0] * num_pages  # sequences, and writers, of each page

    @property
    def num_free(self) -> int:
        return len(self._free_pages) + self.index.num_unused

    def most(self, num_positions: int) -> int:
        """Pages that a sequence of so many positions has at any time, at most."""
        num_pages = num_pages_of(num_positions)
        return num_pages if self._window is None else min(num_pages, self._window.num_pages)

    def first_page(self, num_done: int) -> int:
        """The first page that tokens from position `num_done` on see."""
        if self._window is None:
            return 0
        return max(0, num_done + 1 - self._window.size) // PAGE_POSITIONS

    def num_found(self, keys: Sequence[bytes], first: int, step: int) -> int:
        """With how many of `keys` a sequence can go on that has its pages before `first`.

        A multiple of `step`. Pages before the window of what follows need not be there.
        """
        num_found, begin = 0, 0  # the pages of keys[begin:count] are there
        for count, key in enumerate(keys, 1):
            if self.index.page(key) is None:
                begin = count
            seen = max(0, self.first_page((first + count) * PAGE_POSITIONS) - first)
            if count % step == 0 and begin <= seen:
                num_found = count
        return num_found

    def found(self, keys: Sequence[bytes], first: int = 0) -> list[int]:
        """The pages of `keys`, of a sequence's pages from `first` on, that it still sees then."""
        seen = self.first_page((first + len(keys)) * PAGE_POSITIONS)
        pages = [self.index.page(key) for key in keys[max(0, seen - first) :]]
        return [page for page in pages if page is not None]

    def num_wanted(self, num_positions: int, keys: Sequence[bytes]) -> int:
        """Free pages that a sequence takes which begins with those of `keys`, at most."""
        in_use = sum(not self.index.is_unused(page) for page in self.found(keys))
        return self.most(num_positions) - in_use

    def replace(self, slot: int, first: int, keys: Sequence[bytes]) -> None:
        """Let the pages of `keys` be a slot's from its page `first` on, in place of its own."""
        held, end = self.held[slot], first + len(keys)
        seen = self.first_page(end * PAGE_POSITIONS)
        before = held.pages[max(0, seen - held.first) : max(0, first - held.first)]
        after = held.pages[max(0, end - held.first) :]
        found = self.found(keys, first)
        for page in found:
            self.use(page)
        kept = {*before, *after}
        for page in reversed(held.pages):
            if page not in kept:
                self.release(page)
        held.first, held.pages = max(held.first, seen), [*before, *found, *after]

    def leave_behind(self, slot: int, num_done: int) -> None:
        """Release the pages of a slot that tokens from position `num_done` on do not see."""
        held, first = self.held[slot], self.first_page(num_done)
        while held.pages and held.first < first:
            self.release(held.pages.pop(0))
            held.first += 1
        if not held.pages:
            held.first = max(held.first, first)

    def num_to_take(self, slot: int, num_positions: int, num_done: int) -> int:
        """Pages that a slot lacks for the step after `num_done`, or for all without a window."""
        if self._window is not None:
            num_positions = min(num_positions, num_done + self._window.step)
        return max(0, num_pages_of(num_positions) - self.held[slot].end)

    def take(self) -> int:
        """A free page, for something new."""
        page = self._free_pages.pop() if self._free_pages else self.index.evict_oldest()
        self._num_users[page] = 1
        return page

    def use(self, page: int) -> None:
        if not self._num_users[page]:
            self.index.use(page)
        self._num_users[page] += 1

    def release(self, page: int) -> None:
        self._num_users[page] -= 1
        if self._num_users[page]:
            return
        if self.index.has_key(page):
            self.index.leave(page)
        else:
            self._free_pages.append(page)

    def forget(self) -> None:
        self._free_pages.extend(self.index.clear())


class KvPool:
    """Allocates slots, and pages to them as their sequences grow.

    Several sequences may have a page whose positions are full; none writes there any more. A page
    with a key stays as it is when the last of them ends, or leaves it behind its window: it is
    free, and can be found until it is wanted for something else. Pages freed last are allocated
    first, those without a key before those with one: the system has backed them with memory
    already. Pages are counted by group; a number of spare pages may be one for all groups.
    """

    def __init__(
        self,
        num_pages: int,
        page_tables: np.ndarray,
        window: Window | None = None,
        num_window_pages: int = 0,
    ) -> None:
        """`page_tables` (2, slots, pages of a sequence at most) int32 are written for the services.

        window, num_window_pages: of layers with a window; None: there are none
        """
        self._page_tables = page_tables
        self._groups = [_Group(num_pages, None)]  # FULL; WINDOWED where there are such layers
        if window is not None:
            self._groups.append(_Group(num_window_pages, window))

    @property
    def num_pages(self) -> np.ndarray:
        """All pages of each group."""
        return np.array([group.num_pages for group in self._groups])

    @property
    def num_free_pages(self) -> np.ndarray:
        """Pages of each group that nobody has, those that can be found included."""
        return np.array([group.num_free for group in self._groups])

    @property
    def num_used(self) -> int:
        """Pages that are allocated, of layers without a window."""
        return self._groups[FULL].num_pages - self._groups[FULL].num_free

    @property
    def usage(self) -> float:
        """The share of these pages that is allocated."""
        return self.num_used / max(self._groups[FULL].num_pages, 1)

    def find(self, keys: Sequence[bytes], first: int = 0, step: int = 1) -> int:
        """With the pages of how many of `keys` a sequence can go on from its page `first` on.

        A multiple of `step`. What it has before that it still has, as far as windows reach.
        """
        num_found = len(keys)
        while True:
            counts = [group.num_found(keys[:num_found], first, step) for group in self._groups]
            if min(counts) == num_found:
                return num_found
            num_found = min(counts)

    def allocate(
        self, num_positions: int, num_spare: int | np.ndarray = 0, found: Sequence[bytes] = ()
    ) -> int | None:
        """The lowest free slot, with pages for `num_positions`; None where either is lacking.

        Of layers with a window pages are free for it, and `extend` takes them, step by step.

        num_spare: pages that must be free after that
        found: keys that `find` has found, of its first pages
        Errors:  ValueError for more positions than a slot can ever have
        """
        self._require_fits(num_positions)
        slot = self._free_slot()
        wanted = np.array([group.num_wanted(num_positions, found) for group in self._groups])
        if slot is None or not (wanted + num_spare <= self.num_free_pages).all():
            return None
        for group in self._groups:
            group.held[slot] = _Held()
        self.replace(slot, 0, found)
        self.extend(slot, num_positions, len(found) * PAGE_POSITIONS)
        return slot

    def allocate_whole(self, num_positions: int) -> int | None:
        """The lowest free slot for one that computes `num_positions` from the first on by itself.

        Without `extend`: with a window a sequence's pages stand for later ones in turn.
        Errors:  ValueError for more positions than a slot can ever have
        """
        slot = self.allocate(num_positions)
        if slot is None:
            return None
        for number, group in enumerate(self._groups):
            held = group.held[slot]
            held.pages += [group.take() for _ in range(group.most(num_positions) - held.end)]
            row = self._page_tables[number, slot, : num_pages_of(num_positions)]
            row[:] = np.resize(np.array(held.pages, np.int32), row.shape)
        return slot

    def num_lacking(self, slot: int, num_positions: int) -> np.ndarray:
        """Pages of each group that a slot lacks of those for `num_positions`."""
        return np.array(
            [
                max(0, group.most(num_positions) - len(group.held[slot].pages))
                for group in self._groups
            ]
        )

    def extend(
        self, slot: int, num_positions: int, num_done: int = 0, num_spare: int | np.ndarray = 0
    ) -> bool:
        """Allocate a slot what it lacks for `num_positions`; False where too few pages are free.

        Of layers with a window only for the step that begins at position `num_done`. What is before
        its window then is released.

        num_spare: pages that must be free after that
        Errors:  ValueError for more positions than a slot can ever have
        """
        self._require_fits(num_positions)
        for group in self._groups:
            group.leave_behind(slot, num_done)
        counts = [group.num_to_take(slot, num_positions, num_done) for group in self._groups]
        if not any(counts):
            return True
        if not (np.array(counts) + num_spare <= self.num_free_pages).all():
            return False
        for group, count in zip(self._groups, counts, strict=True):
            group.held[slot].pages += [group.take() for _ in range(count)]
        self._write_tables(slot)
        return True

    def num_positions(self, slot: int) -> int:
        """Positions that a slot has pages for, its first ones included."""
        return min(group.held[slot].end for group in self._groups) * PAGE_POSITIONS

    def pages(self, slot: int, first: int, count: int) -> list[Page]:
        """A slot's pages from `first` on, `count` at most: of each the page of each group."""
        found: list[Page] = []
        for index in range(first, first + count):
            pages = [group.held[slot].at(index) for group in self._groups]
            there = tuple(page for page in pages if page is not None)
            if len(there) < len(pages):
                break
            found.append(there)
        return found

    def replace(self, slot: int, first: int, keys: Sequence[bytes]) -> None:
        """Let what `find` has found be a slot's from its page `first` on, in place of its own."""
        for group in self._groups:
            group.replace(slot, first, keys)
        self._write_tables(slot)

    def name(self, slot: int, index: int, key: bytes) -> bool:
        """Let a slot's page `index` be found by `key`; False where another one already is."""
        named = False
        for group in self._groups:
            page = group.held[slot].at(index)
            named |= page is not None and group.index.add(key, page)
        return named

    def hold(self, key: bytes) -> Page | None:
        """Keep the page of `key` from being given up until it is `let_go`; None: there is none.

        Returns the page of each group.
        """
        pages = [group.index.page(key) for group in self._groups]
        there = tuple(page for page in pages if page is not None)
        if len(there) < len(pages):
            return None
        for group, page in zip(self._groups, there, strict=True):
            group.use(page)
        return there

    def let_go(self, page: Page) -> None:
        """What `hold` held is held no more."""
        for group, number in zip(self._groups, page, strict=True):
            group.release(number)

    def forget(self) -> None:
        """Let no page be found any more; sequences keep theirs."""
        for group in self._groups:
            group.forget()

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
        for group in self._groups:
            for page in reversed(group.held.pop(slot).pages):
                group.release(page)

    def _free_slot(self) -> int | None:
        held = self._groups[FULL].held
        return next((s for s in range(self._page_tables.shape[1]) if s not in held), None)

    def _require_fits(self, num_positions: int) -> None:
        max_pages = self._page_tables.shape[2]
        if num_pages_of(num_positions) > max_pages:
            raise ValueError(f"{num_positions} positions do not fit in {max_pages} pages")

    def _write_tables(self, slot: int) -> None:
        """Entries before and after a slot's pages stay: no kernel reads them."""
        for number, group in enumerate(self._groups):
            held = group.held[slot]
            self._page_tables[number, slot, held.first : held.end] = held.pages


@dataclass(frozen=True)
class OpenedPages:
    """A service's file of pages as it was opened."""

    path: str = ""  # "": it cannot be used
    keys: set[bytes] = field(default_factory=set)
    num_bytes: int = 0
    note: str = ""  # what is wrong, a line


@dataclass(frozen=True)
class SavedPages:
    """What a service has written, and which pages it gave up for that."""

    keys: list[bytes]
    given_up: list[bytes]
    note: str = ""  # what went wrong, a line
