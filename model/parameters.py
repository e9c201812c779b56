"""What a parameter of a request is: the kinds of values, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from hotcold.model.errors import HotcoldError, UsageError, shown

LARGEST_SEED = (1 << 63) - 1
_LAST_ID = (1 << 31) - 1


class Kind:
    """The values that a parameter takes; each of its classes checks them."""

    def kept(self, value: Any) -> Any:
        """A given value in the form in which it is kept. Errors: UsageError."""
        return value

    def check(self, name: str, value: Any) -> None:
        """Raise UsageError for a value that `kept` gave and that is none of the kind's."""
        raise NotImplementedError


@dataclass(frozen=True)
class Whole(Kind):
    """Whole numbers from `low` to `high`, and perhaps none, or -1 for 0."""

    low: int
    high: int
    or_none: bool = False
    or_minus: bool = False

    def kept(self, value: Any) -> Any:
        """NumPy's as Python's own, and -1 as 0 where it stands for that."""
        if isinstance(value, Integral) and hasattr(value, "item"):
            value = value.item()
        return 0 if self.or_minus and _is_int(value, -1, -1) else value

    def check(self, name: str, value: Any) -> None:
        """As `Kind`."""
        if value is not None or not self.or_none:
            require_int(name, value, self.low, self.high)


@dataclass(frozen=True)
class Number(Kind):
    """Numbers from `low` to `high`; `low` is none of them where they are `above` it."""

    low: float
    high: float
    above: bool = False

    def kept(self, value: Any) -> Any:
        """NumPy's as Python's own."""
        return value.item() if isinstance(value, Real) and hasattr(value, "item") else value

    def check(self, name: str, value: Any) -> None:
        """As `Kind`."""
        require_number(name, value, self.low, self.high)


class Switch(Kind):
    """True or false."""

    def check(self, name: str, value: Any) -> None:
        """As `Kind`."""
        if not isinstance(value, bool):
            raise _out_of_range(name, value, "true or false")


class Texts(Kind):
    """Up to `most` texts of 1 to `most_characters`, or one: each token is compared with all."""

    most, most_characters = 64, 1000

    def kept(self, value: Any) -> Any:
        """As a tuple."""
        return (value,) if isinstance(value, str) else _as_tuple(value)

    def check(self, name: str, value: Any) -> None:
        """As `Kind`."""
        is_tuple = isinstance(value, tuple)
        if not is_tuple or any(not isinstance(text, str) or not text for text in value):
            raise UsageError(f"{name} is {shown(value)}; give texts that are not empty")
        if len(value) > self.most or any(len(text) > self.most_characters for text in value):
            raise UsageError(
                f"{name} may hold {self.most} texts of {self.most_characters} characters at most"
            )


class TokenIds(Kind):
    """Token ids."""

    def kept(self, value: Any) -> Any:
        """As a tuple."""
        return _as_tuple(value)

    def check(self, name: str, value: Any) -> None:
        """As `Kind`."""
        if not isinstance(value, tuple):
            raise _out_of_range(name, value, "a list of token ids")
        for token_id in value:
            require_int(name, token_id, 0, _LAST_ID)


class Biases(Kind):
    """Token ids, each with a number: pairs, or a mapping."""

    wanted = "token ids, each once, with a number from -100 to 100"

    def kept(self, value: Any) -> Any:
        """As a tuple of pairs; a mapping's keys may be texts, as JSON has them."""
        if isinstance(value, Mapping):
            return tuple((_token_id(key), bias) for key, bias in value.items())
        return _as_tuple(value)

    def check(self, name: str, value: Any) -> None:
        """As `Kind`."""
        are_biases = isinstance(value, tuple) and all(map(_is_bias, value))
        if not are_biases or len(dict(value)) < len(value):
            raise _out_of_range(name, value, self.wanted)


@dataclass(frozen=True)
class Parameter:
    """What all that read a sampling parameter know of it, beside its name.

    `default`: without a request's or a model's own value
    `about`: the help of its option, which is `--top-k` of top_k; "": there is none
    `http`: the values of its field in HTTP requests; None: there is none, or a route's own
    `ollama`: its key in Ollama's options; "": none
    `is_models`: a model's generation_config.json may set it
    """

    default: Any
    kind: Kind
    about: str = ""
    http: Kind | None = None
    ollama: str = ""
    is_models: bool = False

    @property
    def unchanging(self) -> tuple[Any, ...]:
        """The values that change nothing in any request, beside none and what is empty."""
        if self.is_models or self.default in (None, ()):
            return ()
        return (list(self.default) if isinstance(self.default, tuple) else self.default,)


def bias_of(text: str) -> tuple[int, float]:
    """The pair of a text such as 1234=-5. Errors: UsageError."""
    key, _, bias = text.partition("=")
    token_id = _token_id(key.strip())
    try:
        if isinstance(token_id, int):
            return token_id, float(bias)
    except ValueError:
        pass
    raise UsageError(f"{shown(text)} is no token id with a number; write it like 1234=-5")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _token_id(key: Any) -> Any:
    """The number of a text of digits; anything else as it is."""
    has_digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
    return int(key) if has_digits else key


def _is_bias(pair: Any) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    return _is_int(pair[0], 0, _LAST_ID) and _is_number(pair[1], -100.0, 100.0)


def _is_int(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and bool(low <= value <= high)


def require_int(name: str, value: Any, low: int, high: int) -> None:
    """Raise UsageError unless `value` is a whole number from `low` to `high`."""
    if not _is_int(value, low, high):
        raise _out_of_range(name, value, f"a whole number from {low} to {high}")


def require_number(name: str, value: Any, low: float, high: float) -> None:
    """Raise UsageError unless `value` is a number from `low` to `high`."""
    if not _is_number(value, low, high):
        raise _out_of_range(name, value, f"a number from {low:g} to {high:g}")


def _out_of_range(name: str, value: Any, wanted: str) -> HotcoldError:
    return UsageError(f"{name} is {shown(value)}; give {wanted}")
