"""The store of pages that services with attention keep in files, as the index of prompts has it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hotcold.actors.protocol.page_store import OpenedPages, Page, SavedPages
from hotcold.model.errors import HotcoldError

_log = logging.getLogger(__name__)
_PAGES_A_CALL = 8

# Calls a method of each service with attention; returns their answers in order. Errors:
# HotcoldError of one that is lost.
CallServices = Callable[..., list[Any]]


class ServicePageStore:
    """A `PageStore`: a page is on file where all services with attention have their layers of it.

    A thread of its own asks services to write, so the engine never waits for a disk.

    note: the last line that is worth telling; "" at first
    """

    def __init__(self, call: CallServices) -> None:
        self._call = call
        self._session = b""  # names what is on file to services; a new process knows none
        self._keys: set[bytes] = set()
        self._waiting: dict[bytes, Page] = {}  # pages to be written, by key
        self._used: list[bytes] = []  # since the last call
        self._ended: list[bytes] = []
        self._changed = threading.Condition()
        self._is_writing = self._is_closing = False
        self.note = ""
        self._thread = threading.Thread(target=self._write, name="page store", daemon=True)
        self._thread.start()

    def reopen(self, identity: bytes) -> None:
        """See `PageStore`."""
        with self._changed:
            self._stop_writing()
        session = os.urandom(8)
        try:
            opened: list[OpenedPages] = self._call("open_pages", session, identity)
        except HotcoldError as problem:  # of a lost service: whoever asks it next replaces it
            self._tell(str(problem))
            return
        for one in opened:
            self._tell(one.note)
        if all(one.path for one in opened):
            keys = set.intersection(*(one.keys for one in opened))
            num_bytes = sum(one.num_bytes for one in opened)
            with self._changed:
                self._session, self._keys = session, keys
            if not self.note:
                self.note = (
                    f"prefix cache: {len(keys)} pages, {num_bytes / 1e6:.1f} MB, in "
                    f"{opened[0].path}"
                )

    def keys(self) -> set[bytes]:
        """See `PageStore`."""
        return self._keys

    def save(self, key: bytes, page: Page) -> None:
        """See `PageStore`."""
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
        """See `PageStore`."""
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    def load(self, keys: Sequence[bytes], pages: Sequence[Page]) -> int:
        """See `PageStore`."""
        num_good = 0
        if self._session and keys:
            with suppress(HotcoldError):  # as in `reopen`
                num_good = min(self._call("load_pages", self._session, list(keys), list(pages)))
        with self._changed:
            self._keys -= set(keys[num_good:])
        return num_good

    def close(self) -> None:
        """Write no more; returns once no page is read any more."""
        with self._changed:
            self._is_closing = True
            self._stop_writing()
        self._thread.join()

    def _stop_writing(self) -> None:
        """Give up what waits, and end the session once no page is read any more."""
        self._waiting.clear()
        self._used.clear()
        self._changed.notify_all()
        self._changed.wait_for(lambda: not self._is_writing)
        self._ended.clear()
        self._session, self._keys = b"", set()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._used or self._is_closing)
                if self._is_closing:
                    return
                keys = list(self._waiting)[:_PAGES_A_CALL]
                pages = [self._waiting.pop(key) for key in keys]
                used, self._used = self._used, []
                session, self._is_writing = self._session, True
            found: list[SavedPages | None] = [None]
            with suppress(HotcoldError):  # as in `reopen`
                found = self._call("save_pages", session, used, keys, pages)
            with self._changed:
                self._note_saved(found)
                self._ended += keys
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
