"""Prefix caching: what prompts begin with is computed once, in pages that earlier requests filled.

A page's key says all tokens up to its end, who computed them and for whom, so a page that is found
holds what the request would compute itself, to the last bit. Only what goes through matmul of a
prompt is shared (`actors.protocol.step_sizes`). Pages stay until they are wanted for something
else, and where there is a store, they are written there and found again after that.
"""

import time
from dataclasses import dataclass, field

import numpy as np

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.kv_cache.page_store import PageStore
from hotcold.actors.kv_cache.pool import KvPool, Page, namespace_key, states_key
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS

_LOADED_AT_ONCE = 8  # pages of a store, or what is shared at least: others wait meanwhile
_SAVED_SHARE = 4  # at most one in so many pages is kept from use while it is being saved
_SAVED_AT_ONCE = 16  # pages, at most: two calls of a store
_POLL_S, _LONGEST_SAVE_S = 0.001, 60.0


@dataclass
class Prefix:
    """What a running request may share: a key for each page, of which `num_named` are in the index.

    The keys hold for one `epoch` of the cache, whose services computed all of the pages.
    """

    keys: list[bytes]
    epoch: int
    num_named: int = 0


@dataclass
class PrefixCache:
    """Used by the engine's thread alone. It finds nothing before `use`."""

    pool: KvPool
    store: PageStore | None = None
    _identity: bytes = b""
    _share_tokens: int = 0
    _epoch: int = 0
    _prefixes: dict[int, Prefix] = field(default_factory=dict)  # by slot
    _unsaved: dict[bytes, bytes] = field(default_factory=dict)  # keys in files, in order; of pages
    _saving: dict[bytes, Page] = field(default_factory=dict)  # by key

    def use(self, identity: bytes, share_tokens: int) -> None:
        """From now on keep what `identity` computes, in pieces of `share_tokens`; 0: nothing."""
        self._identity, self._share_tokens = identity, share_tokens
        self.forget()

    def forget(self, anew: bool = False) -> None:
        """Find none of what has been computed until now, nor what running requests go on with.

        `anew`: it may be wrong, so nothing is found on file, either.
        """
        self._epoch += 1
        self._unsaved.clear()
        self.pool.forget()
        if self.store is None or self.store.reopen(self._identity, anew):
            while self._saving:  # the store reads none of them any more
                self.pool.let_go(self._saving.popitem()[1])

    def start(
        self, request: ActiveRequest, num_positions: int, num_spare: int | np.ndarray
    ) -> bool:
        """Give a request a slot that begins with all pages found; False where there is no room.

        `num_positions` and `num_spare` as of `KvPool.allocate`.
        """
        prefix = self._prefix(request)
        wanted = prefix.keys[: self._num_wanted(request)]
        found = wanted[: self.pool.find(wanted, 0, self._step)]
        slot = self.pool.allocate(num_positions, num_spare, found, ends=[])
        if slot is None:
            return False
        prefix.num_named = len(found)
        self._prefixes[slot] = prefix
        request.start(slot)
        request.skip_to(len(found) * PAGE_POSITIONS)
        return True

    def extend(self, request: ActiveRequest) -> bool:
        """Before a chunk of a request: find more of it, computed meanwhile or in the store.

        Says whether there was more; there may be still more then.
        """
        prefix, first = self._prefixes[request.slot], request.num_done // PAGE_POSITIONS
        is_whole = self._share_tokens > 0 and request.num_done % self._share_tokens == 0
        wanted = prefix.keys[first : self._num_wanted(request)] if is_whole else []
        if not wanted or prefix.epoch != self._epoch:
            return False
        num_found = self.pool.find(wanted, first, self._step)
        if num_found:
            self.pool.replace(request.slot, first, wanted[:num_found])
        else:
            num_found = self._num_loaded(request, first, wanted)
        prefix.num_named = max(prefix.num_named, first + num_found)
        request.skip_to((first + num_found) * PAGE_POSITIONS)
        return num_found > 0

    def keep(self, request: ActiveRequest) -> None:
        """Let others find what of a running request's prompt is done by now."""
        prefix = self._prefixes[request.slot]
        if prefix.epoch != self._epoch or not prefix.keys:
            return
        num_pages = min(request.num_done // PAGE_POSITIONS, len(prefix.keys))
        for index in range(prefix.num_named, self._whole(num_pages)):
            key = prefix.keys[index]
            for named in self.pool.name(request.slot, index, key):
                if self.store is not None:
                    self._unsaved[named] = key
            prefix.num_named = index + 1

    def end(self, request: ActiveRequest) -> None:
        """Take a request's slot back."""
        del self._prefixes[request.slot]
        self.pool.free(request.slot)

    @property
    def is_saving(self) -> bool:
        """Whether pages are still to be written to the store."""
        return bool(self._saving or self._unsaved)

    def save(self) -> None:
        """Go on writing pages to the store: now and then, while `is_saving`."""
        if self.store is None or not self.is_saving:
            return
        for key in self.store.saved():
            if key in self._saving:
                self.pool.let_go(self._saving.pop(key))
        most = max(1, min(_SAVED_AT_ONCE, int(self.pool.num_pages.min()) // _SAVED_SHARE))
        while self._unsaved and len(self._saving) < most:
            key = next(iter(self._unsaved))
            of_page = self._unsaved.pop(key)
            if key in self._saving:  # an earlier write of it, which has not ended
                continue
            page = self.pool.hold(of_page, key != of_page)
            if page is not None:  # it has not been given up meanwhile
                self._saving[key] = page
                self.store.save(key, page)

    def await_saves(self) -> None:
        """Return once no page is kept from use by a write to the store, or after a minute."""
        self._unsaved.clear()
        self.save_all(_LONGEST_SAVE_S)

    def save_all(self, longest_s: float) -> None:
        """Return once all pages that are to be written to the store are, or after a while."""
        until_s = time.monotonic() + longest_s
        while self.is_saving and time.monotonic() < until_s:
            self.save()
            time.sleep(_POLL_S)

    @property
    def _step(self) -> int:
        """Pages that are shared together."""
        return max(self._share_tokens // PAGE_POSITIONS, 1)

    def _whole(self, num_pages: int) -> int:
        return num_pages - num_pages % self._step

    def _prefix(self, request: ActiveRequest) -> Prefix:
        if not self._share_tokens or not request.may_share:
            return Prefix([], self._epoch)
        namespace = namespace_key(self._identity, request.cache_salt)
        return Prefix(request.page_keys(namespace), self._epoch)

    def _num_wanted(self, request: ActiveRequest) -> int:
        """Pages that a request may find: one token is computed in any case."""
        return min(request.num_prompt_tokens, len(request.tokens) - 1) // PAGE_POSITIONS

    def _num_loaded(self, request: ActiveRequest, first: int, wanted: list[bytes]) -> int:
        """How many pages of a request, from `first` on, could be filled from the store."""
        if self.store is None:
            return 0
        pool, slot, on_file = self.pool, request.slot, self.store.keys()
        most = -(-_LOADED_AT_ONCE // self._step) * self._step
        num_there = next((i for i, key in enumerate(wanted) if key not in on_file), len(wanted))
        if pool.has_states:  # go on where they are on file, too
            ends = [i + 1 for i, key in enumerate(wanted[:num_there]) if states_key(key) in on_file]
            most = num_there = next((end for end in ends if end >= most), max(ends, default=0))
        keys = wanted[: self._whole(min(num_there, most))]
        end = (first + len(keys)) * PAGE_POSITIONS
        if not keys or not pool.extend(
            slot, request.num_positions(0), first * PAGE_POSITIONS, ends=[end]
        ):
            return 0
        pages = pool.pages(slot, first, len(keys))
        if not pool.has_states:
            keys = keys[: self._whole(len(pages))]
            num_good = self._whole(self.store.load(keys, pages[: len(keys)])) if keys else 0
        else:
            states = pool.pages(slot, first + len(keys) - 1, 1, of_states=True)
            num_good = self.store.load([states_key(keys[-1]), *keys], [*states, *pages])
            num_good = len(keys) if num_good == 1 + len(keys) else 0
        for index, key in enumerate(keys[:num_good], first):
            pool.name(slot, index, key)
        return num_good
