"""Who gives way where there is no room: no client can crowd out the others."""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

_Key = TypeVar("_Key")


def first_to_leave(clients: Mapping[_Key, Hashable]) -> _Key:
    """The first key of the client that has most; `clients`: of each key, in order, not empty."""
    (most, _), *_ = Counter(clients.values()).most_common(1)
    return next(key for key, client in clients.items() if client == most)
