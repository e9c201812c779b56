"""Which page of the KV cache holds which tokens, and which pages nobody uses any more."""

import hashlib
from collections.abc import Sequence

import numpy as np

from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS

_KEY_BYTES = 16


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

    def give_up_oldest(self) -> int:
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
