"""Typed access to a JSON object from a file; every error names the file and the key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from hotcold.model.errors import LONGEST_POINTER, ConfigError, HotcoldError, refuse_pointer, shown

MAX_JSON_BYTES = 256 << 20


def parse_json(text: str | bytes, source: str, error: type[HotcoldError] = ConfigError) -> Any:
    """Parse untrusted JSON. Errors: `error` for bad syntax, depth or a repeated key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise error(f"{source}: key {shown(key)} is given twice; remove one")
            result[key] = value
        return result

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as problem:
        head = text[:LONGEST_POINTER]
        refuse_pointer(source, head.encode() if isinstance(head, str) else head, error)
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise error(f"{source}: not valid JSON ({reason[:100]}); download it again") from None


def read_bounded(file: Path, max_bytes: int, error: type[HotcoldError], remedy: str) -> bytes:
    """Return a file's content. Errors: `error`, of a file that is too large too; FileNotFoundError.

    `remedy` ends the text about the size.
    """
    try:
        if file.stat().st_size > max_bytes:
            raise error(f"{file}: larger than {max_bytes >> 20} MiB; {remedy}")
        return file.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise error(f"{file}: cannot be read ({problem.strerror})") from None


def read_json_object(file: Path, error: type[HotcoldError] = ConfigError) -> dict[str, Any]:
    """Read a file that holds one JSON object. Errors: `error` naming the file."""
    try:
        content = read_bounded(file, MAX_JSON_BYTES, error, "this is not a JSON file")
    except FileNotFoundError:
        raise error(f"{file}: not found; give a directory with a Hugging Face model") from None
    value = parse_json(content, str(file), error)
    if not isinstance(value, dict):
        raise error(
            f"{file}: holds a JSON {type(value).__name__}, not an object; download it again"
        )
    return value


class _Noted(dict[str, Any]):
    """An object that notes which keys are asked for."""

    def __init__(self, values: dict[str, Any], keys: set[str]):
        super().__init__(values)
        self._keys = keys

    def get(self, key: str, default: Any = None) -> Any:
        self._keys.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._keys.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._keys.add(str(key))
        return super().__contains__(key)


_NOTED: ContextVar[set[str] | None] = ContextVar("noted keys", default=None)


@contextmanager
def noting_keys() -> Iterator[set[str]]:
    """Give the keys that all readers made meanwhile are asked for, as they are."""
    keys: set[str] = set()
    before = _NOTED.set(keys)
    try:
        yield keys
    finally:
        _NOTED.reset(before)


class ConfigReader:
    """Reads keys of one object; a key that is null counts as absent.

    prefix: stands before keys in the object, for `has` and the getters of numbers and texts
    """

    prefix = ""

    def __init__(
        self, values: dict[str, Any], source: str, error: type[HotcoldError] = ConfigError
    ):
        keys = _NOTED.get()
        self.values = values if keys is None else _Noted(values, keys)
        self.source = source
        self._error = error

    def fail(self, key: str, problem: str) -> HotcoldError:
        """Return (not raise) the error that `key` of this file has `problem`."""
        return self._error(f"{self.source}: {self.prefix}{key} {problem}")

    def has(self, key: str) -> bool:
        """Whether the key is present and not null."""
        return self.values.get(self.prefix + key) is not None

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        """Return a whole number in [low, high]; required where `default` is None."""
        value = self._value(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.fail(key, f"is {shown(value)}; give a whole number from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, low: float, high: float) -> float:
        """Return a finite number in [low, high]; required where `default` is None."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.fail(key, f"is {shown(value)}; give a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.fail(key, f"is {shown(value)}; give true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; required where `default` is None."""
        value = self._value(key, default)
        if type(value) is not str:
            raise self.fail(key, f"is {shown(value)}; give a string")
        return value

    def token_ids(self, key: str, default: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
        """Return one id or a list of ids as a tuple, each inside the vocabulary."""
        if key in self.values and self.values[key] is None:
            return ()
        if key not in self.values:
            return tuple(token for token in default if token < vocab_size)
        value = self.values[key]
        ids = value if isinstance(value, list) else [value]
        if any(type(token) is not int or not 0 <= token < vocab_size for token in ids):
            raise self.fail(key, f"is {shown(value)}; give token ids from 0 to {vocab_size - 1}")
        return tuple(ids)

    def refuse(self, key: str, accepted: Callable[[Any], bool], reason: str) -> None:
        """Raise where `key` has a value that `accepted` rejects."""
        if self.has(key) and not accepted(self.values[key]):
            raise self.fail(key, f"is {shown(self.values[key], 60)}; {reason}")

    def renamed(self, keys: Mapping[str, str], **others: Any) -> ConfigReader:
        """Return a reader in which keys have other names, too, and `others` their values."""
        values = {**self.values, **others}
        values |= {name: self.values[key] for key, name in keys.items() if self.has(key)}
        return ConfigReader(values, self.source, self._error)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(self.prefix + key)
        value = default if value is None else value
        if value is None:
            own = "'s own config.json" if Path(self.source).name == "config.json" else " again"
            raise self.fail(key, f"is missing; download the model{own}")
        return value
