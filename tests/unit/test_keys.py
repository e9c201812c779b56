"""API keys: how long they are, how they are compared, and how those that guess are slowed down."""

from __future__ import annotations

import hmac

import pytest

from hotcold.jobs.commands.serve import check_keys
from hotcold.model.errors import UsageError
from hotcold.ui import keys as keys_module
from hotcold.ui.keys import Keys
from tests.unit.test_gate import ask, gate

KEY = b"0123456789abcdef"
ATTACKER, CLIENT = "192.0.2.1", "192.0.2.2"


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(clock: Clock) -> Keys:
    return Keys([KEY.decode()], clock)


def test_a_short_key_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"at least 16 characters.*openssl rand"):
        check_keys("0.0.0.0", (KEY.decode(), KEY.decode()[1:]), False)
    check_keys("0.0.0.0", (KEY.decode(),), False)


def test_what_is_compared_has_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    usual = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return usual(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = Keys(["a" * 16, "b" * 40])
    for given in (b"a" * 16, b"b" * 40, b"a", b"\xff" * 5000):
        keys.is_right(given, CLIENT)
    assert compared == [(32, 32)] * 8  # with every key, also behind the one that is right


def waits(keys: Keys, clock: Clock, count: int, address: str = ATTACKER) -> list[float]:
    """How long the address has to wait after each of its wrong keys, each given at once then."""
    found = []
    for _ in range(count):
        assert not keys.is_right(b"wrong", address)
        found.append(keys.seconds_to_wait(address))
        clock.now += found[-1]
    return found


def test_wrong_keys_make_an_address_wait_for_longer_and_longer(keys: Keys, clock: Clock) -> None:
    assert waits(keys, clock, 20) == [0, 0, 0, 0, 1, 2, 4, 8, 16, 32] + [60] * 10
    assert keys.seconds_to_wait(ATTACKER) == 0  # until the next one
    assert keys.seconds_to_wait(CLIENT) == 0


def test_an_address_that_has_given_a_right_key_never_waits(keys: Keys, clock: Clock) -> None:
    assert keys.is_right(KEY, CLIENT)
    assert waits(keys, clock, 20, CLIENT) == [0] * 20


def test_an_ipv6_network_is_one_address(keys: Keys, clock: Clock) -> None:
    for last in range(5):
        assert not keys.is_right(b"wrong", f"2001:db8::{last}")
    assert keys.seconds_to_wait("2001:db8::9:9") > 0
    assert keys.seconds_to_wait("2001:db8:0:1::1") == 0
    assert keys.seconds_to_wait("::ffff:192.0.2.1") == 0


def test_what_is_remembered_is_bounded(
    keys: Keys, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "_MAX_ADDRESSES", 3)
    for number in range(10):
        waits(keys, clock, 5, f"192.0.2.{number}")
    assert len(keys._records) == 3


def test_the_gate_looks_at_no_key_of_an_address_that_has_to_wait() -> None:
    closed = gate(["one"], local=False)
    right = {"Authorization": "Bearer one"}
    wrong = {"Authorization": "Bearer two"}
    for _ in range(10):  # a browser's first question has none
        assert ask(closed).status_code == 401
    for _ in range(5):
        assert ask(closed, headers=wrong).status_code == 401
    refused = ask(closed, headers=right)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "too_many_failures"
    assert ask(closed, path="/health").status_code == 200
