"""Parts of Ray, public or not, and its settings, that others take the place of for a while."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` within this context; no effect where Ray has no such name."""
    if not hasattr(owner, name):
        yield
        return
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Environment variables, or None for one that is not set, within this context."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
