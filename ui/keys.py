"""The keys that clients must send, and how those that guess are slowed down."""

import hashlib
import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_KEY_CHARS = 16
_FREE_FAILURES = 5  # in which a person may mistype
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_MAX_ADDRESSES = 4096  # that are remembered, those that were seen last
_NETWORK_BITS = 64  # of an IPv6 address: what one client usually has


@dataclass
class _Record:
    """What an address has given so far."""

    num_failures: int = 0
    may_ask_at: float = 0.0
    is_known: bool = False  # it has given a key that is right


class Keys:
    """The server's keys, and the addresses that have given keys.

    After five wrong keys an address waits for a second, and twice as long after each further one,
    up to a minute; meanwhile it is not told whether a key is right. An address that has once given
    a right key never waits: behind a proxy all clients have the same one.
    """

    def __init__(self, keys: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """Without keys everybody may ask. `clock` counts seconds."""
        self._digests = [_digest(key.encode()) for key in keys]
        self._clock = clock
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return bool(self._digests)

    def seconds_to_wait(self, address: str) -> float:
        """How long the address must wait until a key of its is looked at; 0 where it need not."""
        record = self._records.get(_network(address))
        return 0.0 if record is None else max(0.0, record.may_ask_at - self._clock())

    def is_right(self, given: bytes, address: str) -> bool:
        """Whether this is one of the keys; as long as it takes says nothing about them."""
        digest = _digest(given)
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        right = any(found)
        self._note(right, address)
        return right

    def _note(self, right: bool, address: str) -> None:
        network = _network(address)
        record = self._records.setdefault(network, _Record())
        self._records.move_to_end(network)
        if len(self._records) > _MAX_ADDRESSES:
            self._records.popitem(last=False)
        if right:
            record.is_known = True
        elif not record.is_known:
            record.num_failures += 1
            doublings = min(record.num_failures - _FREE_FAILURES, 10)
            if doublings >= 0:
                wait_s = min(_FIRST_WAIT_S * 2**doublings, _LONGEST_WAIT_S)
                record.may_ask_at = self._clock() + wait_s


def _digest(key: bytes) -> bytes:
    """Of one length, whatever the key's."""
    return hashlib.sha256(key).digest()


def _network(address: str) -> str:
    """The address, or an IPv6 one's network."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 4 or found.ipv4_mapped is not None:
        return address
    return str(ipaddress.ip_network((found, _NETWORK_BITS), strict=False))
