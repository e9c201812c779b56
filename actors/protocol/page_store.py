"""What the index of kept prompts asks of a store of pages that outlives the KV cache's memory.

A key names 64 positions and all before them (16 bytes); a page is a page of the KV cache's pool.
"""

from collections.abc import Sequence
from typing import Protocol


class PageStore(Protocol):
    """Called from the engine's thread alone. No method raises for a page that is not there, torn or unreadable."""

    def keys(self) -> set[bytes]:
        """Return the keys of the pages that are on file now."""
        ...

    def save(self, key: bytes, page: int) -> None:
        """Begin to write a page. Its content must stay as it is until `saved` names the key."""
        ...

    def saved(self) -> list[bytes]:
        """Return the keys of writes that ended since the last call, well or not."""
        ...

    def load(self, keys: Sequence[bytes], pages: Sequence[int]) -> int:
        """Fill pages with what the keys name, in order.

        Returns how many of the first ones are good (their checksums agree); the rest is not on file any more.
        """
        ...
