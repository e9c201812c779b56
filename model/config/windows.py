"""Sliding-window attention: which layers have a window, and its size."""

from __future__ import annotations

from collections.abc import Callable

from hotcold.model.config.json_reader import ConfigReader
from hotcold.model.errors import shown

_KINDS = ("full_attention", "sliding_attention")
_MAX_WINDOW = 1 << 26


def sliding_layers(
    reader: ConfigReader, is_sliding: Callable[[int], bool], num_layers: int
) -> tuple[bool, ...]:
    """Return which layers have a window: by `layer_types`, or by `is_sliding` without that key.

    Errors:  ConfigError for other kinds of layers, or another number of them
    """
    if not reader.has("layer_types"):
        return tuple(is_sliding(layer) for layer in range(num_layers))
    kinds = reader.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise reader.fail("layer_types", f"is {shown(kinds, 60)}; give one for each layer")
    for kind in kinds:
        if kind not in _KINDS:
            raise reader.fail(
                "layer_types", f"has {shown(kind)}, which is not supported; {' or '.join(_KINDS)}"
            )
    return tuple(kind == "sliding_attention" for kind in kinds)


def windows(
    reader: ConfigReader, sliding: tuple[bool, ...], default: int | None = None
) -> tuple[int, ...]:
    """Return the window of each layer, 0 for none; () where no layer has one.

    Errors:  ConfigError where a layer has one and config.json has no size
    """
    if not any(sliding):
        return ()
    size = reader.integer("sliding_window", default, high=_MAX_WINDOW)
    return tuple(size if is_windowed else 0 for is_windowed in sliding)
