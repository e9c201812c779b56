"""What the index of kept prompts asks of a store of pages that outlives the KV cache's memory.

A key names 64 positions and all before them (16 bytes); a page of the KV cache's pool is one of the
layers without a window, and where there are others one of these (FULL, WINDOWED).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

Page = tuple[int, ...]


class PageStore(Protocol):
    """Called from the engine's thread alone. Raises nothing for what it cannot read or write."""

    def reopen(self, identity: bytes) -> None:
        """Keep pages of this arithmetic from now on; give up writes that have not ended.

        Called first, where the KV cache was lost, and where other services compute from now on.
        When it returns, no page is read any more, and `saved` names none of the earlier keys.
        """
        ...

    def keys(self) -> set[bytes]:
        """Return the keys of the pages that are on file now, to look keys up in at once."""
        ...

    def save(self, key: bytes, page: Page) -> None:
        """Begin to write a page. Its content must stay as it is until `saved` names the key.

        A key that is on file already is only marked as used, and `saved` names it too.
        """
        ...

    def saved(self) -> list[bytes]:
        """Return the keys of writes that ended since the last call, well or not."""
        ...

    def load(self, keys: Sequence[bytes], pages: Sequence[Page]) -> int:
        """Fill pages with what the keys name, in order.

        Returns how many of the first ones are good (their checksums agree); the rest is not on file
        any more.
        """
        ...


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
