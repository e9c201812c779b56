"""A system's configuration comes out of its JSON as it went in."""

from dataclasses import MISSING, fields
from typing import Any

import pytest

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage

_STORAGE = NeuronStorage("bundles é", 1 << 40, True, "signs", 7, ("cache", "pipeline"))


def _changed(default: Any) -> Any:
    """Another value of the same type."""
    match default:
        case bool():
            return not default
        case int():
            return default + 3
        case None:  # a number of bytes
            return 3
        case str():
            return f"{default} 'ö\n"
        case tuple():
            return ("10.0.0.1", "10.0.0.2")
    raise TypeError(f"say what else {default!r} may be")


def test_every_field_comes_back() -> None:
    values: dict[str, Any] = {"storage": _STORAGE, "model_path": "a/b"}
    for each in fields(SystemConfig):
        if each.name not in values:
            assert each.default is not MISSING
            values[each.name] = _changed(each.default)
    system = SystemConfig(**values)
    found = SystemConfig.from_json(system.as_json())
    assert found == system
    assert hash(found) == hash(system)  # lists have none


def test_what_is_left_out_comes_back() -> None:
    system = SystemConfig("model")
    assert SystemConfig.from_json(system.as_json()) == system


@pytest.mark.parametrize("text", [b"", b"[]", b'{"hosts": []}', b'{"x": 1'])
def test_other_text_is_refused(text: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        SystemConfig.from_json(text)
