"""The pages of the KV cache: which are free, which sequence has which, what each is found by.

Layers without a window, with one and recurrent layers have pages of their own (groups FULL,
WINDOWED and RECURRENT of the page tables). A sequence keeps all pages of the first, and of the
others those that its next tokens see. Recurrent layers' pages are large and of few positions: of a
prompt's chunk a sequence has those at chosen ends alone.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.numba_kernels.loops.mailbox import FULL
from hotcold.numba_kernels.recurrent_arrays import NO_PAGE

_KEY_BYTES = 16
# 64 positions: one page of each group, in the order of groups; of recurrent layers the one at their
# end, or NO_PAGE
Page = tuple[int, ...]


def num_pages_of(num_positions: int, page_positions: int = PAGE_POSITIONS) -> int:
    """Pages for `num_positions` of one sequence."""
    return -(-num_positions // page_positions)


@dataclass(frozen=True)
class Window:
    """What a sequence has pages for in layers with a window.

    size: positions that a token sees at most, its own included
    step: tokens of the sequence that are computed at once, at most; but for chunks with `most_ends`
    num_reserved: pages that a running sequence must be able to have once its prompt is done; 0: all
    page_positions: of a page, a divisor of 64
    most_ends: a chunk needs only pages that tokens after its ends see, so many at most; 0: all
    """

    size: int
    step: int
    num_reserved: int = 0
    page_positions: int = PAGE_POSITIONS
    most_ends: int = 0

    @property
    def num_pages(self) -> int:
        """Pages that a sequence has at most: they hold a window and a step, wherever it begins."""
        pages = num_pages_of(self.size + self.step - 2, self.page_positions) + 1
        return max(pages, 2 * self.most_ends and self.most_ends + 2)


# Of layers without one: all positions are seen, and may be computed at once.
_NO_WINDOW = Window(1 << 60, 1 << 60)


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


def states_key(key: bytes) -> bytes:
    """The key of what recurrent layers have at the end of a page of that key, in files."""
    return hashlib.blake2b(b"states" + key, digest_size=_KEY_BYTES).digest()


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
    """The pages of all layers of a kind: without a window, with one, or recurrent.

    page_of: pages by key; those that no sequence has stay until they are taken, oldest use first
    """

    def __init__(self, num_pages: int, window: Window) -> None:
        self.num_pages = num_pages
        self.page_of: dict[bytes, int] = {}
        self.held: dict[int, _Held] = {}
        self._window = window
        self.page_positions = window.page_positions
        self.has_ends = window.most_ends > 0
        self._a_key = PAGE_POSITIONS // self.page_positions  # pages of a key's positions
        self._free_pages = list(range(num_pages - 1, -1, -1))  # without a key; the next stands last
        self._unused: dict[int, None] = {}  # with a key, in the order of their last use
        self._key_of: dict[int, bytes] = {}
        self._num_users = [0] * num_pages  # sequences, and writers, of each page

    @property
    def num_free(self) -> int:
        return len(self._free_pages) + len(self._unused)

    def count(self, num_positions: int) -> int:
        """Pages of so many positions."""
        return num_pages_of(num_positions, self.page_positions)

    def most(self, num_positions: int) -> int:
        """Pages that a sequence of so many positions has at any time, at most."""
        return min(self.count(num_positions), self._window.num_pages)

    def num_lacking(self, slot: int, num_positions: int) -> int:
        """Pages that a running sequence must be able to have: of its prompt it has them."""
        most, pages = self.most(num_positions), self.held[slot].pages
        most = min(most, self._window.num_reserved or most)
        return max(0, most - len(pages) + pages.count(NO_PAGE))

    def first_page(self, num_done: int) -> int:
        """The first page that tokens from position `num_done` on see."""
        return max(0, num_done + 1 - self._window.size) // self.page_positions

    def num_found(self, keys: Sequence[bytes], first: int, step: int) -> int:
        """With how many of `keys` a sequence can go on that has its pages before key `first`.

        A multiple of `step`. Pages before the window of what follows need not be there.
        """
        num_found, begin = 0, 0  # the pages of keys[begin:count] are there
        for count, key in enumerate(keys, 1):
            if key not in self.page_of:
                begin = count
            seen = self.first_page((first + count) * PAGE_POSITIONS) // self._a_key - first
            if count % step == 0 and begin <= max(0, seen):
                num_found = count
        return num_found

    def found(self, keys: Sequence[bytes], first: int = 0) -> list[int]:
        """The pages of `keys`, of a sequence's positions from 64 `first` on, that it still sees."""
        seen = self.first_page((first + len(keys)) * PAGE_POSITIONS)
        numbers = range(max(seen, first * self._a_key), (first + len(keys)) * self._a_key)
        pages = [self._named(keys, number - first * self._a_key) for number in numbers]
        return [page for page in pages if page is not None]

    def _named(self, keys: Sequence[bytes], number: int) -> int | None:
        """Of a key's pages the last one has its name."""
        index, place = divmod(number, self._a_key)
        return self.page_of.get(keys[index]) if place == self._a_key - 1 else NO_PAGE

    def at_end(self, slot: int, index: int) -> int | None:
        """The page at the end of a slot's positions of key `index`, or NO_PAGE; None: neither."""
        return self.held[slot].at((index + 1) * self._a_key - 1)

    def num_wanted(self, num_positions: int, keys: Sequence[bytes]) -> int:
        """Free pages that a sequence takes which begins with those of `keys`, at most."""
        pages = [page for page in self.found(keys) if page != NO_PAGE]
        in_use = sum(page not in self._unused for page in pages)
        return self.most(num_positions) - in_use

    def replace(self, slot: int, first: int, keys: Sequence[bytes]) -> None:
        """Let the pages of `keys` be a slot's from key `first` on, in place of its own."""
        held, seen = self.held[slot], self.first_page((first + len(keys)) * PAGE_POSITIONS)
        begin, end = first * self._a_key, (first + len(keys)) * self._a_key
        before = held.pages[max(0, seen - held.first) : max(0, begin - held.first)]
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

    def to_take(
        self, slot: int, num_positions: int, num_done: int, ends: Sequence[int] | None
    ) -> list[int]:
        """Which pages a slot lacks for the step after `num_done`.

        ends: of a chunk, instead, as in `KvPool.extend`
        """
        held = self.held[slot]
        if self.has_ends and ends is not None:
            wanted = {n for end in ends for n in range(self.first_page(end), self.count(end))}
            return [n for n in sorted(wanted) if n >= held.first and held.at(n) in (None, NO_PAGE)]
        end = min(num_positions, num_done + self._window.step)
        return list(range(held.end, self.count(end)))

    def extend(self, slot: int, numbers: Sequence[int]) -> None:
        """Take these pages of a slot, and none of those between them that it lacks."""
        held = self.held[slot]
        for number in numbers:
            held.pages += [NO_PAGE] * (number + 1 - held.end)
            held.pages[number - held.first] = self.take()

    def take(self) -> int:
        """A free page, for something new."""
        if self._free_pages:
            page = self._free_pages.pop()
        else:
            page = next(iter(self._unused))
            del self._unused[page]
            del self.page_of[self._key_of.pop(page)]
        self._num_users[page] = 1
        return page

    def use(self, page: int) -> None:
        if page == NO_PAGE:
            return
        if not self._num_users[page]:
            del self._unused[page]
        self._num_users[page] += 1

    def release(self, page: int) -> None:
        if page == NO_PAGE:
            return
        self._num_users[page] -= 1
        if self._num_users[page]:
            return
        if page in self._key_of:
            self._unused[page] = None
        else:
            self._free_pages.append(page)

    def name(self, key: bytes, page: int) -> bool:
        """Let a page be found, unless another one holds the same; says whether it will be."""
        if key in self.page_of or page in self._key_of:
            return False
        self.page_of[key], self._key_of[page] = page, key
        return True

    def forget(self) -> None:
        self._free_pages.extend(self._unused)
        for found in (self.page_of, self._key_of, self._unused):
            found.clear()


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
        windows: Mapping[int, tuple[Window, int]] = {},
    ) -> None:
        """`page_tables` (groups, slots, pages of a sequence at most) int32 are for the services.

        The pages are those of the group whose pages have the fewest positions.
        windows: of groups beside FULL, in their order, what a sequence sees, and their pages
        """
        self._page_tables = page_tables
        self._numbers = [FULL, *windows]  # of groups, as tables have them
        self._groups = [_Group(num_pages, _NO_WINDOW)]
        self._groups += [_Group(count, window) for window, count in windows.values()]

    @property
    def num_pages(self) -> np.ndarray:
        """All pages of each group."""
        return np.array([group.num_pages for group in self._groups])

    @property
    def num_free_pages(self) -> np.ndarray:
        """Pages of each group that nobody has, those that can be found included."""
        return np.array([group.num_free for group in self._groups])

    @property
    def has_states(self) -> bool:
        """Whether there are recurrent layers, whose pages are at chosen ends alone."""
        return any(group.has_ends for group in self._groups)

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
        self,
        num_positions: int,
        num_spare: int | np.ndarray = 0,
        found: Sequence[bytes] = (),
        ends: Sequence[int] | None = None,
    ) -> int | None:
        """The lowest free slot, with pages for `num_positions`; None where either is lacking.

        Of layers with a window pages are free for it, and `extend` takes them, step by step.

        num_spare: pages that must be free after that
        found: keys that `find` has found, of its first pages
        ends: as of `extend`
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
        self.extend(slot, num_positions, len(found) * PAGE_POSITIONS, ends=ends)
        return slot

    def num_lacking(self, slot: int, num_positions: int) -> np.ndarray:
        """Pages of each group that a slot lacks of those for `num_positions`."""
        return np.array([group.num_lacking(slot, num_positions) for group in self._groups])

    def extend(
        self,
        slot: int,
        num_positions: int,
        num_done: int = 0,
        num_spare: int | np.ndarray = 0,
        ends: Sequence[int] | None = None,
    ) -> bool:
        """Allocate a slot what it lacks for `num_positions`; False where too few pages are free.

        Of layers with a window only for the step that begins at position `num_done`. What is before
        its window then is released.

        num_spare: pages that must be free after that
        ends: of a chunk, the positions at which later tokens may go on: recurrent layers then have
        no other pages; [] for none yet, None for tokens that kernels take
        Errors:  ValueError for more positions than a slot can ever have
        """
        self._require_fits(num_positions)
        for group in self._groups:
            group.leave_behind(slot, num_done)
        lacking = [group.to_take(slot, num_positions, num_done, ends) for group in self._groups]
        if not any(lacking):
            return True
        if not (np.array([len(one) for one in lacking]) + num_spare <= self.num_free_pages).all():
            return False
        for group, numbers in zip(self._groups, lacking, strict=True):
            group.extend(slot, numbers)
        self._write_tables(slot)
        return True

    def lacks_states_alone(
        self, slot: int, num_positions: int, num_done: int, ends: Sequence[int] | None
    ) -> bool:
        """Whether `extend` found too few pages of recurrent layers, and enough of the others."""
        return all(
            group.has_ends
            or len(group.to_take(slot, num_positions, num_done, ends)) <= group.num_free
            for group in self._groups
        )

    def num_positions(self, slot: int) -> int:
        """Positions that a slot has pages for, its first ones included."""
        return min(group.held[slot].end * group.page_positions for group in self._groups)

    def pages(self, slot: int, first: int, count: int, of_states: bool = False) -> list[Page]:
        """A slot's pages from key `first` on, `count` at most: of each the page of each group.

        of_states: of recurrent layers, or else of the others; NO_PAGE stands for the rest
        """
        found: list[Page] = []
        for index in range(first, first + count):
            own = [group.at_end(slot, index) for group in self._groups]
            pages = self._whole(own, of_states)
            if pages is None:
                break
            found.append(pages)
        return found

    def _whole(self, pages: Sequence[int | None], of_states: bool) -> Page | None:
        """The pages that are meant of each group's, NO_PAGE of the others; None where one lacks."""
        is_meant = [group.has_ends == of_states for group in self._groups]
        found = [
            page if meant and page is not None else NO_PAGE
            for page, meant in zip(pages, is_meant, strict=True)
        ]
        is_whole = any(is_meant) and [page != NO_PAGE for page in found] == is_meant
        return tuple(found) if is_whole else None

    def replace(self, slot: int, first: int, keys: Sequence[bytes]) -> None:
        """Let what `find` has found be a slot's from its page `first` on, in place of its own."""
        for group in self._groups:
            group.replace(slot, first, keys)
        self._write_tables(slot)

    def name(self, slot: int, index: int, key: bytes) -> list[bytes]:
        """Let a slot's page `index` be found by `key`, unless another one already is.

        Returns the keys in files of what is found now: `key`, `states_key(key)`, both or none.
        """
        named = {False: False, True: False}
        for group in self._groups:
            page = group.at_end(slot, index)
            if page is not None and page != NO_PAGE:
                named[group.has_ends] |= group.name(key, page)
        return [key] * named[False] + [states_key(key)] * named[True]

    def hold(self, key: bytes, of_states: bool = False) -> Page | None:
        """Keep the page of `key` from being given up until it is `let_go`; None: there is none.

        Returns the page of each group, as `pages`.
        """
        pages = self._whole([group.page_of.get(key) for group in self._groups], of_states)
        for group, page in zip(self._groups, pages or (), strict=False):
            group.use(page)
        return pages

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
        if max(group.count(num_positions) for group in self._groups) > max_pages:
            raise ValueError(f"{num_positions} positions do not fit in {max_pages} pages")

    def _write_tables(self, slot: int) -> None:
        """Entries before and after a slot's pages stay: no kernel reads them."""
        for number, group in zip(self._numbers, self._groups, strict=True):
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
