"""Who gives way where there is no room: no client can crowd out the others."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

_Key = TypeVar("_Key")


def first_to_leave(
    clients: Mapping[_Key, Hashable], size: Callable[[_Key], int] = lambda key: 1
) -> _Key:
    """The first key of the client that has most, by the `size` of each key.

    `clients`: of each key, in order, not empty.
    """
    held: Counter[Hashable] = Counter()
    for key, client in clients.items():
        held[client] += size(key)
    ((most, _),) = held.most_common(1)
    return next(key for key, client in clients.items() if client == most)
