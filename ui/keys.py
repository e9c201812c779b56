"""The API keys that clients must send, and a limit on guessing."""

import hashlib
import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_KEY_CHARS = 16
_FREE_FAILURES = 5  # for a person's typing errors
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_MAX_ADDRESSES = 4096  # the last ones are remembered
_NETWORK_BITS = 64  # of an IPv6 address: what one client usually has


@dataclass
class _Record:
    """The keys that an address has sent so far."""

    num_failures: int = 0
    may_ask_at: float = 0.0
    is_known: bool = False  # it has sent a right key


class Keys:
    """The server's keys, and the addresses that have sent keys.

    After five wrong keys an address is locked out for a second, and twice as long after each
    further one, up to a minute. An address that has once sent a right key never is: behind a proxy
    all clients have the same one.
    """

    def __init__(self, keys: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """Without keys every request is allowed. `clock` counts seconds."""
        self._digests = [_digest(key.encode()) for key in keys]
        self._clock = clock
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether a key is required."""
        return bool(self._digests)

    def seconds_to_wait(self, address: str) -> float:
        """How long the address is still locked out."""
        record = self._records.get(network_of(address))
        return 0.0 if record is None else max(0.0, record.may_ask_at - self._clock())

    def is_right(self, given: bytes, address: str) -> bool:
        """Whether this is one of the keys, in constant time."""
        digest = _digest(given)
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        right = any(found)
        self._note(right, address)
        return right

    def _note(self, right: bool, address: str) -> None:
        network = network_of(address)
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


def client_of(given: bytes) -> str:
    """What tells the client with this key from others, and not the key; "" without one."""
    return hashlib.sha256(b"client " + given).hexdigest() if given else ""


def _digest(key: bytes) -> bytes:
    """SHA-256, so that all have one length."""
    return hashlib.sha256(key).digest()


def network_of(address: str) -> str:
    """The address, or an IPv6 one's network."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 4 or found.ipv4_mapped is not None:
        return address
    return str(ipaddress.ip_network((found, _NETWORK_BITS), strict=False))
