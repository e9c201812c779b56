"""Prefix caching on disk, as the driver sees it: pages that its services write and read."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hotcold.actors.kv_cache.pool import OpenedPages, Page, SavedPages
from hotcold.actors.protocol.failures import ServiceLost
from hotcold.model.errors import HotcoldError

_log = logging.getLogger(__name__)
_PAGES_A_CALL = 8
_LONGEST_WRITE_S = 20.0  # that is waited for before the store is closed
_RETRY_S = 5.0

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
