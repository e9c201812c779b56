"""Prefix caching: what prompts begin with is computed once, in pages that earlier requests filled.

A page's key says all tokens up to its end, who computed them and for whom, so a page that is found
holds what the request would compute itself, to the last bit. Only what goes through matmul of a
prompt is shared (`actors.protocol.step_sizes`). Pages stay until they are wanted for something
else, and where there is a store, they are written there and found again after that.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotcold.actors.driver.active_request import ActiveRequest
from hotcold.actors.protocol.failures import ServiceLost
from hotcold.actors.protocol.kv_pool import KvPool, OpenedPages, Page, SavedPages, namespace_key
from hotcold.model.errors import HotcoldError
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS

_log = logging.getLogger(__name__)
_LOADED_AT_ONCE = 8  # pages of a store, or what is shared at least: others wait meanwhile
_SAVED_SHARE = 4  # at most one in so many pages is kept from use while it is being saved
_SAVED_AT_ONCE = 16  # pages, at most: two calls of a store
_POLL_S, _LONGEST_SAVE_S = 0.001, 60.0
_PAGES_A_CALL = 8
_LONGEST_WRITE_S = 20.0  # that is waited for before the store is closed
_RETRY_S = 5.0


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
    _unsaved: dict[bytes, None] = field(default_factory=dict)  # keys, in order
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
        slot = self.pool.allocate(num_positions, num_spare, found)
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
            if self.pool.name(request.slot, index, key) and self.store is not None:
                self._unsaved[key] = None
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
            del self._unsaved[key]
            if key in self._saving:  # an earlier write of it, which has not ended
                continue
            page = self.pool.hold(key)
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
        slot, on_file = request.slot, self.store.keys()
        keys = wanted[: -(-_LOADED_AT_ONCE // self._step) * self._step]
        num_there = next((i for i, key in enumerate(keys) if key not in on_file), len(keys))
        if not num_there or not self.pool.extend(
            slot, request.num_positions(0), first * PAGE_POSITIONS
        ):
            return 0
        pages = self.pool.pages(slot, first, num_there)
        pages = pages[: self._whole(len(pages))]
        keys = keys[: len(pages)]
        num_good = self._whole(self.store.load(keys, pages)) if keys else 0
        for index, key in enumerate(keys[:num_good], first):
            self.pool.name(slot, index, key)
        return num_good


# Calls a method of each service with attention; returns their answers in order. Errors:
# HotcoldError of one that is lost: what was called may still run there.
CallServices = Callable[..., list[Any]]
# Starts new processes for services that are lost for some cause. Errors: CacheLost.
Renew = Callable[[Mapping[int, str]], None]


class PageStore:
    """Pages of the KV cache in files: one is there where all services have their layers of it.

    Called from the engine's thread alone. Raises nothing for what it cannot read or write.
    A thread of its own asks services to write, so the engine never waits for a disk. A call that
    fails ends the session, so nothing is written or found by it; pages it was to write are named by
    `saved` only once services have begun another one, which they do after the call has ended.

    note: the last line that is worth telling; "" at first
    """

    def __init__(self, call: CallServices, renew: Renew) -> None:
        """The engine's thread calls `renew` for a service that is lost while it fills pages."""
        self._call, self._renew = call, renew
        self._identity = b""
        self._spoiled: set[bytes] = set()  # identities whose files are to be begun anew
        self._session = b""  # names what is on file to services; a new process knows none
        self._keys: set[bytes] = set()
        self._waiting: dict[bytes, Page] = {}  # pages to be written, by key
        self._used: list[bytes] = []  # since the last call
        self._unsure: list[bytes] = []  # of failed calls, which may still read their pages
        self._ended: list[bytes] = []
        self._retry_at_s: float | None = None  # when to open files again after a failure
        self._changed = threading.Condition()
        self._is_writing = self._is_closing = False
        self.note = ""
        self._thread = threading.Thread(target=self._write, name="page store", daemon=True)
        self._thread.start()

    def reopen(self, identity: bytes, anew: bool = False) -> bool:
        """Keep pages of this arithmetic from now on; give up writes that have not ended.

        Called first, where the KV cache was lost, and where other services compute from now on.
        `anew`: drop what is on file, which may be wrong.
        Returns whether no page is read any more: `saved` names none of the earlier keys then. Else
        it names them all, each once its page is read no more.
        """
        self._identity = identity
        if anew:
            self._spoiled.add(identity)
        with self._changed:
            self._stop_writing()
        if not self._open():
            return False
        with self._changed:
            self._ended.clear()
        return True

    def _open(self) -> bool:
        """Begin a session; False where it is not sure that earlier calls have ended."""
        session, identity = os.urandom(8), self._identity
        self._retry_at_s = time.monotonic() + _RETRY_S
        if self._is_writing:  # services would wait for it
            self._tell("prefix cache: the disk does not answer; no page is kept there meanwhile")
            return False
        try:
            opened: list[OpenedPages] = self._call(
                "open_pages", session, identity, identity in self._spoiled
            )
        except HotcoldError as problem:  # of a lost service: whoever asks it next replaces it
            self._tell(str(problem))
            return False
        self._retry_at_s = None
        for one in opened:
            self._tell(one.note)
        is_open = all(one.path for one in opened)
        with self._changed:
            self._ended += self._unsure
            self._unsure.clear()
            if is_open:
                self._session = session
                self._keys = set.intersection(*(one.keys for one in opened))
        if is_open:
            self._spoiled.discard(identity)
        if is_open and not self.note:
            num_bytes = sum(one.num_bytes for one in opened)
            self.note = (
                f"prefix cache: {len(self._keys)} pages, {num_bytes / 1e6:.1f} MB, in "
                f"{opened[0].path}"
            )
        return True

    def keys(self) -> set[bytes]:
        """Return the keys of the pages that are on file now, to look keys up in at once."""
        return self._keys

    def save(self, key: bytes, page: Page) -> None:
        """Begin to write a page. Its content must stay as it is until `saved` names the key.

        A key that is on file already is only marked as used, and `saved` names it too.
        """
        with self._changed:
            if key in self._keys:
                self._used.append(key)
                self._ended.append(key)
            elif not self._session:
                self._ended.append(key)
            else:
                self._waiting[key] = page
            self._changed.notify_all()

    def saved(self) -> list[bytes]:
        """Return the keys of writes that ended since the last call, well or not."""
        if self._retry_at_s is not None and time.monotonic() >= self._retry_at_s:
            self._open()
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    def load(self, keys: Sequence[bytes], pages: Sequence[Page]) -> int:
        """Fill pages with what the keys name, in order.

        Returns how many of the first ones are good (their checksums agree); the rest is not on file
        any more.
        Errors:  CacheLost where a service was lost that may have gone on filling them
        """
        num_good = 0
        if self._session and keys:
            try:
                num_good = min(self._call("load_pages", self._session, list(keys), list(pages)))
            except HotcoldError:
                with self._changed:
                    self._end_session()
                self._await_readers()
        with self._changed:
            self._keys -= set(keys[num_good:])
            self._used += keys[:num_good]
            self._changed.notify_all()
        return num_good

    def _await_readers(self) -> None:
        """Return once no page is being filled any more. Errors: CacheLost; ServiceError."""
        self._retry_at_s = time.monotonic() + _RETRY_S
        try:
            self._call("open_pages", os.urandom(8), self._identity, False)
        except ServiceLost as problem:
            self._renew(problem.causes)

    def close(self) -> None:
        """Write no more; returns once no page is read any more, or the disk does not answer."""
        with self._changed:
            self._is_closing = True
            self._stop_writing()
        self._thread.join(0 if self._is_writing else None)

    def _stop_writing(self) -> None:
        """Give up what waits, and end the session once no page is read any more, or after long."""
        self._end_session()
        self._changed.notify_all()
        self._changed.wait_for(lambda: not self._is_writing, _LONGEST_WRITE_S)

    def _end_session(self) -> None:
        self._ended += self._waiting
        self._waiting.clear()
        self._used.clear()
        self._session, self._keys = b"", set()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._used or self._is_closing)
                if self._is_closing:
                    return
                # The first ones last: of one prompt, the others are given up before them.
                keys = list(self._waiting)[:_PAGES_A_CALL][::-1]
                pages = [self._waiting.pop(key) for key in keys]
                used, self._used = self._used, []
                session, self._is_writing = self._session, True
            found: list[SavedPages | None] | None = None
            with suppress(HotcoldError):  # as in `_open`
                found = self._call("save_pages", session, used, keys, pages)
            with self._changed:
                if found is None:
                    self._unsure += keys
                    self._end_session()
                    self._retry_at_s = time.monotonic() + _RETRY_S
                else:
                    self._ended += keys
                    if session == self._session:
                        self._note_saved(found)
                self._is_writing = False
                self._changed.notify_all()

    def _note_saved(self, found: Sequence[SavedPages | None]) -> None:
        answers = [one for one in found if one is not None]
        if len(answers) == len(found):
            self._keys |= set.intersection(*(set(one.keys) for one in answers))
        for one in answers:
            self._keys -= set(one.given_up)
            self._tell(one.note)

    def _tell(self, line: str) -> None:
        if line and line != self.note:
            self.note = line
            _log.warning("%s", line)
